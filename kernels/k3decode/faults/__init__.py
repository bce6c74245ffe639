"""Planted faults P01 to P17: decode epilogues that are wrong in one place."""
