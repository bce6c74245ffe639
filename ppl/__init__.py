"""The server layer: what requests cross, stored log-probabilities, comparison, verdict."""
