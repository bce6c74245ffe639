"""The op pair ``k3quant``: vLLM's Kimi-K3 fp8 quantisation of q, k and v with cache insert."""
