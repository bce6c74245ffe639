"""Byte identity of op pairs: cases, lanes, campaigns, evidence and the verdict."""
