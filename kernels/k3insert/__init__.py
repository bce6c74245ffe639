"""The op pair ``k3insert``: vLLM's Kimi-K3 key concat with the insert into the paged cache."""
