"""vLLM's own fused op, from an installed vLLM or from its one library file.

Source: vLLM 0.33.0, ``vllm/models/kimi_k3/nvidia/ops/fused_mla_key_concat_kv_cache.py``
(``fused_mla_kv_concat``, ``fused_mla_kv_concat_quant_fp8``) and ``_fused_mla_kv_concat`` of
``vllm/models/kimi_k3/nvidia/mla.py``, which are repeated here statement for statement: importing
them would import vLLM. The ops live in ``vllm/_C_stable_libtorch.abi3.so``, with the schemas

    fused_kimi_k3_mla_kv_concat(Tensor k_nope, Tensor k_pe, Tensor! k_out) -> ()
    fused_kimi_k3_mla_kv_concat_quant_fp8(
        Tensor k_nope, Tensor k_pe, Tensor v, Tensor! k_fp8, Tensor! v_fp8) -> ()
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvpack.spec import Unavailable
from kvpack.stock import NOPE, V

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LIBRARY = "_C_stable_libtorch.abi3.so"
"""The file of the package ``vllm`` that registers the ops."""
OPS = ("fused_kimi_k3_mla_kv_concat", "fused_kimi_k3_mla_kv_concat_quant_fp8")
"""Their names in ``torch.ops._C``: for a 16-bit and for an fp8 result."""


def load(device: str, library: str | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register the ops and return ``kv_pack``.

    Parameters
    ----------
    device : ``"cuda"``, with or without an index.
    library : path of a ``_C_stable_libtorch.abi3.so``; that of the installed vLLM where ``None``.
        Ops that this process already has, as inside vLLM, are taken as they are then.

    Raises
    ------
    Unavailable
        Not on CUDA, no CUDA, no such file, no vLLM, a library that doesn't load or lacks the ops.

    """
    if torch.device(device).type != "cuda":
        raise Unavailable(f"vLLM's op has a CUDA kernel only, not one for {device}: use cuda")
    if not torch.cuda.is_available():
        raise Unavailable("vLLM's op needs a CUDA device, and torch sees none")
    if library is not None or not _registered():
        path = _find() if library is None else Path(library)
        _register(path)
        if not _registered():
            raise Unavailable(f"{path} has no op _C.{OPS[0]}: expected the file of vLLM 0.33")
    return kv_pack


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack with vLLM's op, which ``load`` must have registered.

    Parameters
    ----------
    kv_nope : ``[T, H, 256]``, bfloat16 or float16, last stride 1. The op takes for granted that
        base, token pitch and head pitch are multiples of 16 bytes: one that isn't costs the
        CUDA context.
    k_pe : ``[T, 1, 64]``, the same dtype, or ``float8_e4m3fn`` with ``use_fp8``; rows aligned to
        16 bytes, or 8 in fp8, taken for granted as well.
    use_fp8 : convert to ``float8_e4m3fn``, saturating.

    Returns
    -------
    k : ``[T, H, 192]``, contiguous.
    v : ``[T, H, 128]``: the view ``kv_nope[..., 128:]``, or with ``use_fp8`` contiguous.

    Raises
    ------
    RuntimeError
        From the op, for other dtypes, head dims, devices or last strides.

    """
    k_nope, v = kv_nope.split([NOPE, V], dim=-1)
    if use_fp8:
        return _concat_quant_fp8(k_nope, k_pe, v)
    return _concat(k_nope, k_pe), v


def _concat(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    k_pe = k_pe.reshape(k_pe.shape[0], k_pe.shape[-1])
    k = _empty_full_key(k_nope, k_pe, k_nope.dtype)
    if k.shape[0]:
        _ops().fused_kimi_k3_mla_kv_concat(k_nope, k_pe, k)
    return k


def _concat_quant_fp8(k_nope: Tensor, k_pe: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k_pe = k_pe.reshape(k_pe.shape[0], k_pe.shape[-1])
    fp8 = torch.float8_e4m3fn
    k_fp8 = _empty_full_key(k_nope, k_pe, fp8)
    v_fp8 = torch.empty(v.shape, dtype=fp8, device=v.device)
    if k_fp8.shape[0]:
        _ops().fused_kimi_k3_mla_kv_concat_quant_fp8(k_nope, k_pe, v, k_fp8, v_fp8)
    return k_fp8, v_fp8


def _empty_full_key(k_nope: Tensor, k_pe: Tensor, dtype: torch.dtype) -> Tensor:
    num_tokens, num_heads, qk_nope_head_dim = k_nope.shape
    return torch.empty(
        (num_tokens, num_heads, qk_nope_head_dim + k_pe.shape[1]),
        dtype=dtype,
        device=k_nope.device,
    )


def _ops() -> Any:  # a namespace filled at run time
    return torch.ops._C  # noqa: SLF001  # vLLM's choice of a name


def _registered() -> bool:
    return all(hasattr(_ops(), name) for name in OPS)


def _find() -> Path:
    spec = importlib.util.find_spec("vllm")  # doesn't import it
    if spec is None or spec.submodule_search_locations is None:
        raise Unavailable(
            f"vLLM is not installed: install vllm 0.33, or give the path of {LIBRARY}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / LIBRARY).exists():
        raise Unavailable(
            f"the vLLM in {folder} has no {LIBRARY}: expected a CUDA build of vllm 0.33"
        )
    return folder / LIBRARY


def _register(path: Path) -> None:
    if not path.is_file():
        raise Unavailable(f"no library {path}: expected the path of a {LIBRARY}")
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        reason = f"{error.__cause__ or error}".partition("\n")[0]
        raise Unavailable(
            f"{path} does not load beside torch {torch.__version__}: {reason}"
        ) from error
