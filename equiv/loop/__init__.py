"""L: vLLM's own context-parallel prefill loop, unmodified, on drawn batches and ranks."""
