"""The op pair ``dsmla``: vLLM's Kimi-K3 key concat with insert into an ``fp8_ds_mla`` cache."""
