"""K18: 16-byte loads, whatever the alignment of the base.

Kind: alignment (vLLM 45466). A hint promises the compiler that every row starts on 16 bytes; with
a base 2 bytes off, the load faults and the CUDA context is lost.

Differs from its clean twin in the hint: without it Triton looks at each pointer and pitch at the
call, and compiles narrower loads where they are needed. CUDA only.
"""

from __future__ import annotations

from torch import Tensor

from kvpack.faults import triton_kernel


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack with loads of 16 bytes."""
    return triton_kernel.launch(kv_nope, k_pe, use_fp8, promise_alignment=True)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack with loads as wide as the operands allow."""
    return triton_kernel.launch(kv_nope, k_pe, use_fp8, promise_alignment=False)
