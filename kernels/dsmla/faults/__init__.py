"""Planted faults S01 to S17: ``fp8_ds_mla`` inserts that are wrong in one place."""
