"""The op pair ``k3decode``: vLLM's Kimi-K3 decode query concat with insert into the cache."""
