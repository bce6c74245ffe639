"""The reference: the four-op tail of vLLM's context-parallel prefill loop, statement for statement.

Source: vLLM 0.33.0, ``vllm/model_executor/layers/attention/mla_attention.py``,
``MLACommonBaseImpl._context_parallel_compute_prefill_context`` (the ``else`` branch beside
``fused_mla_kv_concat_fn``) and ``_concat_k_nope_k_pe`` with its direct copies. vLLM takes
``q_data_type`` from the prefill metadata; for fp8 prefill that is ``float8_e4m3fn``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def outputs(
    kv_nope: Tensor, k_pe: Tensor, out: Mapping[str, Tensor] | None, *, use_fp8: bool
) -> tuple[Tensor, Tensor]:
    """Check operands against the domain that fused kernels claim, and say where results go.

    The stock tail itself takes more (other head dims, float32) and doesn't call this.

    Parameters
    ----------
    kv_nope, k_pe, use_fp8 : as for ``kv_pack``.
    out : ``{"k": [T, H, 192], "v": [T, H, 128]}`` of the result's dtype, any strides; allocated
        with ``torch.empty`` where ``None``. Without ``use_fp8`` an entry ``v`` isn't looked at.

    Returns
    -------
    k, v : to be written; without ``use_fp8`` v is the view ``kv_nope[..., 128:]``, and not.

    Raises
    ------
    TypeError
        For other dtypes of the operands.
    ValueError
        For other shapes, a second device, or an ``out`` that doesn't fit.

    """
    _check_operands(kv_nope, k_pe, use_fp8=use_fp8)
    dtype = torch.float8_e4m3fn if use_fp8 else kv_nope.dtype
    made: list[Tensor] = []
    for name, columns in (("k", NOPE + ROPE), ("v", V)):
        shape = (*kv_nope.shape[:-1], columns)
        if name == "v" and not use_fp8:
            made.append(kv_nope[..., NOPE:])
        elif out is None:
            made.append(torch.empty(shape, dtype=dtype, device=kv_nope.device))
        else:
            made.append(_given(out, name, shape, dtype, kv_nope.device))
    return made[0], made[1]


def _check_operands(kv_nope: Tensor, k_pe: Tensor, *, use_fp8: bool) -> None:
    if kv_nope.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"kv_nope is {kv_nope.dtype}: expected bfloat16 or float16")
    if k_pe.dtype != kv_nope.dtype and not (use_fp8 and k_pe.dtype == torch.float8_e4m3fn):
        raise TypeError(
            f"k_pe is {k_pe.dtype}: expected {kv_nope.dtype}, or float8_e4m3fn with use_fp8"
        )
    if kv_nope.ndim != len("THN") or kv_nope.shape[-1] != NOPE + V:
        raise ValueError(f"kv_nope is {list(kv_nope.shape)}: expected [T, H, {NOPE + V}]")
    if k_pe.shape != (kv_nope.shape[0], 1, ROPE):
        raise ValueError(f"k_pe is {list(k_pe.shape)}: expected [{kv_nope.shape[0]}, 1, {ROPE}]")
    if k_pe.device != kv_nope.device:
        raise ValueError(f"k_pe is on {k_pe.device}: expected {kv_nope.device}, as kv_nope")


def _given(
    out: Mapping[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if name not in out:
        raise ValueError(f"out holds {sorted(out)}: expected {name!r} too")
    tensor = out[name]
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"out[{name!r}] is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
            f"expected {dtype} {list(shape)} on {device}"
        )
    return tensor
