"""K17: the operands are read before the kernel that makes them has finished.

Kind: programmatic dependent launch (TRT-LLM 14668). With the attribute set a kernel may start
once its predecessor has said so, and has to wait, ``griddepcontrol.wait``, before it reads what
that writes.

Differs from its clean twin in the wait; both are launched with the attribute. It shows only
directly after a kernel that triggers early and writes late: a kernel launched between the two,
such as one that fills an output, hides it. CUDA only.
"""

from __future__ import annotations

from torch import Tensor

from kvpack.faults import triton_kernel


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack as a dependent launch that doesn't wait."""
    return triton_kernel.launch(kv_nope, k_pe, use_fp8, dependent=True, wait=False)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack as a dependent launch that waits before its first load."""
    return triton_kernel.launch(kv_nope, k_pe, use_fp8, dependent=True, wait=True)
