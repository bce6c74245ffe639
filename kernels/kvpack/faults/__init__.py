"""Planted faults K01 to K18: kernels that are wrong in one place, each with its clean twin."""
