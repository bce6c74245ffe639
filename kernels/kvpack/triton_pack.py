"""Our own fused pack, a Triton kernel: one pass over the operands, for CUDA.

    k[..., :128] = f(kv_nope[..., :128]);  k[..., 128:] = f(k_pe);  v = f(kv_nope[..., 128:])

``f`` is the hardware's conversion to ``float8_e4m3fn`` with ``use_fp8``, and nothing otherwise. It
rounds to nearest even and **saturates**: overflow and inf become ``7E`` or ``FE``, as in vLLM's op,
and a NaN becomes ``7F`` whatever its sign (``cvt.rn.satfinite.e4m3x2``, PTX ISA).

On a CPU it runs under Triton's interpreter, which converts wrongly: to
``oracle.encode_e4m3_as_interpreter``, exactly. There it proves layout and indexing.

A program packs some (token, head) rows: it loads everything, and then stores everything. It moves
what it must, 832 bytes a row in fp8 and 640 in 16 bits, and device memory bounds it: on an H200 the
bandwidth of a copy, a little more in fp8, where 5 bytes in 13 are written, and a little less in 16
bits, where 3 in 5 are, and writes are dearer than reads (``docs/results/pack-h200.md``).

- Offsets are 64-bit. No alignment is promised to the compiler: Triton specialises on the pointers
  and strides of the call, so a misaligned operand is slow and right.
- Operands are read past L1 (``.cg``): nothing but k_pe is read twice, and that by neighbours.
- From compute capability 9.0 on it is a programmatic dependent launch: it is set up while its
  predecessor ends, and waits for that before its first access (``griddepcontrol.wait``). After its
  loads it lets a successor be set up; one that is launched so must wait in the same way, and any
  other starts when this kernel has ended.

Importing this module imports Triton, or raises ``Unavailable``.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpack.spec import Unavailable
from kvpack.stock import outputs

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise Unavailable(f"Triton does not import ({error}): install triton 3.6 or later") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

LARGE_ROWS = 1 << 18
"""Rows beyond which a launch takes so long that its start and end don't matter."""
_INTERPRETED_ROWS = 512  # a program costs milliseconds in the interpreter, however small
_INT32_ROWS = 2**31 - _INTERPRETED_ROWS
_FP8_CAPABILITY = (8, 9)
_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
_launches = 0


@triton.jit
def _pack(
    kv_ptr,
    pe_ptr,
    k_ptr,
    v_ptr,
    rows,
    heads,
    kv_token,
    kv_head,
    pe_token,
    ROWS: tl.constexpr,
    INDEX: tl.constexpr,
    WRITE_V: tl.constexpr,
    WAIT: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    token = row // heads
    head = (row - token * heads).to(tl.int64)
    token = token.to(tl.int64)
    row = row.to(tl.int64)[:, None]
    half = tl.arange(0, 128)[None, :]
    rope = tl.arange(0, 64)[None, :]
    source = kv_ptr + (token * kv_token + head * kv_head)[:, None]
    if WAIT:
        tl.extra.cuda.gdc_wait()
    k_nope = tl.load(source + half, mask=inside, cache_modifier=".cg")
    if WRITE_V:
        value = tl.load(source + 128 + half, mask=inside, cache_modifier=".cg")
    k_pe = tl.load(pe_ptr + (token * pe_token)[:, None] + rope, mask=inside, cache_modifier=".cg")
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    key = k_ptr + row * 192
    out = k_ptr.dtype.element_ty
    tl.store(key + half, k_nope.to(out), mask=inside)
    tl.store(key + 128 + rope, k_pe.to(out), mask=inside)
    if WRITE_V:
        tl.store(v_ptr + row * 128 + half, value.to(out), mask=inside)


@dataclass(frozen=True)
class Shape:
    """How a launch is cut up: rows of a program, its warps, and whether it triggers early.

    Chosen on an H200 out of 97 combinations. Programs of one warp can't trigger early without loss.
    """

    rows: int
    warps: int
    trigger: bool


_LARGE_FP8 = Shape(4, 1, trigger=False)
_OTHER = Shape(16, 8, trigger=True)


def shape(rows: int, *, use_fp8: bool) -> Shape:
    """Return how ``rows`` (token, head) rows are cut up on CUDA."""
    return _LARGE_FP8 if use_fp8 and rows > LARGE_ROWS else _OTHER


def load(device: str, library: str | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``kv_pack``; the kernel is compiled by its first calls.

    Parameters
    ----------
    device : ``"cuda"``, with or without an index, or ``"cpu"`` for the interpreter.
    library : must be ``None``: this candidate has none.

    Raises
    ------
    Unavailable
        With a ``library``; on a CPU without the interpreter; on CUDA with it, without a device, or
        on one that has no fp8 conversion.

    """
    if library is not None:
        raise Unavailable(f"triton takes no library, got {library}: leave the option out")
    if torch.device(device).type == "cpu":
        if not interpreted():
            raise Unavailable("triton on a CPU needs TRITON_INTERPRET=1 before it is imported")
        return kv_pack
    if interpreted():
        raise Unavailable("triton is interpreted in this process: unset TRITON_INTERPRET for CUDA")
    if not torch.cuda.is_available():
        raise Unavailable("triton on cuda needs a CUDA device, and torch sees none")
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise Unavailable(f"compute capability {capability}: expected 8.9, for the fp8 conversion")
    return kv_pack


def interpreted() -> bool:
    """Tell whether kernels of this process are interpreted: decided when this was imported."""
    return not isinstance(_pack, triton.JITFunction)


def launches() -> int:
    """Count the launches of the kernel so far, in this process; an empty case has none."""
    return _launches


def kv_pack(
    kv_nope: Tensor,
    k_pe: Tensor,
    use_fp8: bool,  # noqa: FBT001
    *,
    out: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Pack with one kernel.

    Parameters
    ----------
    kv_nope : ``[T, H, 256]``, bfloat16 or float16, last stride 1; any other strides and alignment.
    k_pe : ``[T, 1, 64]``, last stride 1, the same dtype, or ``float8_e4m3fn`` with ``use_fp8``:
        then its bytes pass through.
    use_fp8 : convert to ``float8_e4m3fn``, saturating.
    out : ``{"k": [T, H, 192], "v": [T, H, 128]}`` to write, contiguous, of the result's dtype;
        allocated with ``torch.empty`` where not given. Without ``use_fp8``, ``v`` may be absent.

    Returns
    -------
    k : ``[T, H, 192]``, contiguous.
    v : ``[T, H, 128]``: the view ``kv_nope[..., 128:]``, or with ``use_fp8`` contiguous.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched, for dtypes, shapes, strides, devices or outputs other than
        these.

    """
    k, v = outputs(kv_nope, k_pe, out, use_fp8=use_fp8)
    _check(kv_nope, k_pe, k, v, use_fp8=use_fp8)
    tokens, heads, _ = kv_nope.shape
    if tokens * heads:
        _launch(kv_nope, k_pe, k, v, use_fp8=use_fp8)
    return k, v


def _check(kv_nope: Tensor, k_pe: Tensor, k: Tensor, v: Tensor, *, use_fp8: bool) -> None:
    for name, operand in (("kv_nope", kv_nope), ("k_pe", k_pe)):
        if operand.stride(2) != 1 and operand.numel():
            raise ValueError(f"{name} has last stride {operand.stride(2)}: expected 1")
    for name, output in (("k", k), ("v", v))[: 1 + use_fp8]:
        if not output.is_contiguous():
            raise ValueError(f"out[{name!r}] has strides {output.stride()}: expected contiguous")
    if kv_nope.device.type != ("cpu" if interpreted() else "cuda"):
        where = "a CPU, under TRITON_INTERPRET=1" if interpreted() else "CUDA"
        raise ValueError(f"kv_nope is on {kv_nope.device}: expected {where}")


def _launch(kv_nope: Tensor, k_pe: Tensor, k: Tensor, v: Tensor, *, use_fp8: bool) -> None:
    global _launches  # noqa: PLW0603  # a process-wide count is what it is
    tokens, heads, _ = kv_nope.shape
    rows = tokens * heads
    on_device = torch.cuda.device(kv_nope.device) if kv_nope.is_cuda else contextlib.nullcontext()
    wait = kv_nope.is_cuda and _waits(kv_nope.device)
    cut = shape(rows, use_fp8=use_fp8)
    if interpreted():
        block = min(_INTERPRETED_ROWS, triton.next_power_of_2(rows))
        cut = Shape(block, 1, trigger=False)
    with on_device:
        _pack[(triton.cdiv(rows, cut.rows),)](
            kv_nope,
            k_pe,
            k,
            v,
            rows,
            heads,
            kv_nope.stride(0),
            kv_nope.stride(1),
            k_pe.stride(0),
            ROWS=cut.rows,
            INDEX=tl.int32 if rows < _INT32_ROWS else tl.int64,
            WRITE_V=use_fp8,
            WAIT=wait,
            TRIGGER=wait and cut.trigger,
            num_warps=cut.warps,
            **({"launch_pdl": True} if wait else {}),
        )
    _launches += 1


@functools.cache
def _waits(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch."""
    return torch.cuda.get_device_capability(device) >= _DEPENDENT_LAUNCH_CAPABILITY
