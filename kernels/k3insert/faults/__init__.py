"""Planted faults I01 to I10: inserts that are wrong in one place, each with its clean twin."""
