"""Faults that change no byte of any result: only compute-sanitizer sees them.

Each packs rightly (``kvpack.faults.kernel``), and launches one small CUDA kernel beside it, built
by NVRTC through torch. Reads are volatile loads in assembly: the assembler drops an ordinary one
whose value nobody uses.

K19  memcheck: reads the byte past kv_nope's last element. Twin: that element's last byte.
K20  initcheck: reads memory that was just allocated. Twin: after it was written.
K21  racecheck: a warp reads from shared memory what another writes again, the same value, with no
     barrier between. Twin: with the barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvpack.faults.kernel import CLEAN

SOURCE = r"""
extern "C" __global__ void hidden_peek(const char* base, int byte) {
    unsigned int x;
    asm volatile("ld.volatile.global.u8 %0, [%1];" : "=r"(x) : "l"(base + byte) : "memory");
}

extern "C" __global__ void hidden_pass(int* out, int barrier) {
    __shared__ volatile int box[32];
    if (threadIdx.x < 32) box[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x < 32) box[threadIdx.x] = threadIdx.x;
    if (barrier) __syncthreads();
    if (threadIdx.x >= 32) out[threadIdx.x - 32] = box[threadIdx.x - 32];
}
"""
SCRATCH_BYTES = 256


@cache
def _kernel(name: str, device: torch.device) -> Callable[..., Any]:
    with torch.cuda.device(device):
        # Private, but NVRTC comes with every CUDA build of torch, and a compiler with few hosts.
        built: Callable[..., Any] = torch.cuda._compile_kernel(SOURCE, name)  # noqa: SLF001
    return built


def _run(name: str, threads: int, *args: Tensor | int) -> None:
    device = next(a.device for a in args if isinstance(a, Tensor))
    with torch.cuda.device(device):
        _kernel(name, device)(grid=(1, 1, 1), block=(threads, 1, 1), args=list(args))


def _span_bytes(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to just past its last."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def reads_past(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, and read one byte past the end of kv_nope."""
    if kv_nope.numel():
        _run("hidden_peek", 1, kv_nope, _span_bytes(kv_nope))
    return CLEAN(kv_nope, k_pe, use_fp8)


def reads_last(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, and read the last byte of kv_nope."""
    if kv_nope.numel():
        _run("hidden_peek", 1, kv_nope, _span_bytes(kv_nope) - 1)
    return CLEAN(kv_nope, k_pe, use_fp8)


def reads_unwritten(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, and read scratch memory that nothing has written."""
    _run("hidden_peek", 1, torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=kv_nope.device), 0)
    return CLEAN(kv_nope, k_pe, use_fp8)


def reads_written(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, and read scratch memory that was zeroed."""
    _run("hidden_peek", 1, torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=kv_nope.device), 0)
    return CLEAN(kv_nope, k_pe, use_fp8)


def races(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, and pass values between warps without a barrier."""
    _run("hidden_pass", 64, torch.empty(32, dtype=torch.int32, device=kv_nope.device), 0)
    return CLEAN(kv_nope, k_pe, use_fp8)


def waits(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack, and pass values between warps with a barrier."""
    _run("hidden_pass", 64, torch.empty(32, dtype=torch.int32, device=kv_nope.device), 1)
    return CLEAN(kv_nope, k_pe, use_fp8)
