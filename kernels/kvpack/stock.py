"""The reference: the four-op tail of vLLM's context-parallel prefill loop, statement for statement.

Source: vLLM 0.33.0, ``vllm/model_executor/layers/attention/mla_attention.py``,
``MLACommonBaseImpl._context_parallel_compute_prefill_context`` (the ``else`` branch beside
``fused_mla_kv_concat_fn``) and ``_concat_k_nope_k_pe`` with its direct copies. vLLM takes
``q_data_type`` from the prefill metadata; for fp8 prefill that is ``float8_e4m3fn``.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOPE = 128
"""Columns of the position-free key of a head (``qk_nope_head_dim``)."""
V = 128
"""Columns of the value of a head (``v_head_dim``)."""
ROPE = 64
"""Columns of the rotary key, shared by all heads of a token (``qk_rope_head_dim``)."""


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack ``k = [kv_nope[..., :128] | k_pe]`` and ``v = kv_nope[..., 128:]``, cast first if asked.

    Parameters
    ----------
    kv_nope : ``[T, H, 128 + 128]``, bfloat16 or float16, any strides.
    k_pe : ``[T, 1, 64]``, the same dtype, or ``float8_e4m3fn`` with ``use_fp8``: then its
        bytes pass through.
    use_fp8 : cast both operands to ``float8_e4m3fn``; what happens to finite overflow, inf and
        NaN is then torch's business and changed between its versions (see ``kvpack.oracle``).

    Returns
    -------
    k : ``[T, H, 192]``, contiguous, freshly allocated.
    v : ``[T, H, 128]``, a strided view: of ``kv_nope``, or with ``use_fp8`` of its cast.

    Raises
    ------
    RuntimeError
        From torch, for another last dimension of ``kv_nope`` or a ``k_pe`` that doesn't
        broadcast over the heads.

    """
    if use_fp8:
        kv_nope = kv_nope.to(torch.float8_e4m3fn)
        k_pe = k_pe.to(torch.float8_e4m3fn)
    k_nope, v = kv_nope.split([NOPE, V], dim=-1)
    return _concat_k_nope_k_pe(k_nope, k_pe), v


def _concat_k_nope_k_pe(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    if k_pe.shape[-1] == 0:
        return k_nope

    k = torch.empty(
        (*k_nope.shape[:-1], k_nope.shape[-1] + k_pe.shape[-1]),
        dtype=k_nope.dtype,
        device=k_nope.device,
    )
    k[..., : k_nope.shape[-1]] = k_nope
    k[..., k_nope.shape[-1] :] = k_pe
    return k
