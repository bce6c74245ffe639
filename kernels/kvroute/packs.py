"""The packs that ``--route fused`` can mean, and a wrapper that counts any pack.

A pack is ``pack(kv_nope, k_pe, use_fp8) -> (k, v)``, vLLM's own signature for the argument:
``kv_nope [T, H, nope + v]`` is the un-cast projection, ``k_pe [T, 1, rope]`` the gathered rotary
key, ``k [T, H, nope + rope]`` and ``v [T, H, v]`` in ``float8_e4m3fn`` where ``use_fp8``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from kvroute.tally import Tally

Pack: TypeAlias = Callable[[Any, Any, bool], tuple[Any, Any]]


def cat_pack(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
    """``k = cat(k_nope, expand(k_pe))``, cast after the concat: another way to the same bytes.

    The pack of a CPU server on the route ``fused``. ``torch.cat`` writes the key in one kernel,
    and with ``use_fp8`` key and value are cast one by one, where the stock tail casts the whole
    projection and copies twice: nothing is shared with the stock statements but the cast itself.
    Key and value have equally many columns (128 each in every model with a fused pack).
    ``v`` is a view of ``kv_nope``, as in stock, or with ``use_fp8`` contiguous, as in vLLM's op.
    """
    import torch

    k_nope, v = kv_nope.chunk(2, dim=-1)
    k = torch.cat((k_nope, k_pe.expand(-1, kv_nope.shape[1], -1)), dim=-1)
    if use_fp8:
        return k.to(torch.float8_e4m3fn), v.contiguous().to(torch.float8_e4m3fn)
    return k, v


def vllm_pack(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
    """VLLM's fused ops, as ``MultiHeadLatentAttention._fused_mla_kv_concat`` of Kimi-K3 calls them.

    CUDA only; fp16 or bf16, 128 + 64 key and 128 value columns, any number of heads.
    """
    from vllm.models.kimi_k3.nvidia.ops import (
        fused_mla_key_concat_kv_cache as ops,
    )

    k_nope, v = kv_nope.chunk(2, dim=-1)
    if use_fp8:
        k, v = ops.fused_mla_kv_concat_quant_fp8(k_nope, k_pe, v)
        return k, v
    return ops.fused_mla_kv_concat(k_nope, k_pe), v


def fused_pack(device_type: str) -> tuple[str, Pack]:
    """Return what ``fused`` means on a device, after the name that the evidence gives it."""
    if device_type == "cpu":
        return "kvroute.packs:cat_pack", cat_pack
    return "kvroute.packs:vllm_pack", vllm_pack


def counted(pack: Pack, tally: Tally) -> Pack:
    """``pack`` with a count of every call that returns."""

    def call(kv_nope: Any, k_pe: Any, use_fp8: bool) -> tuple[Any, Any]:  # noqa: FBT001
        k, v = pack(kv_nope, k_pe, use_fp8)
        source, target = (str(t.dtype).removeprefix("torch.") for t in (kv_nope, k))
        tally.count_pack(source if source == target else f"{source}>{target}", kv_nope.shape[0])
        return k, v

    return call
