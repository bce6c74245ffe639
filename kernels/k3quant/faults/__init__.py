"""Planted faults Q01 to Q15: quantisations that are wrong in one place, each with a clean twin."""
