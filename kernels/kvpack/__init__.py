"""The K/V pack: the stock tail of vLLM's DCP prefill, its oracle, and kernels that claim it."""
