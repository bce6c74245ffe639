"""K08: the operands are assumed contiguous.

Kind: a strided view read as packed (vLLM 21773). k_pe is a slice of a 576-column workspace when
there is one rank, and a kernel that multiplies by its own width reads the latent columns of other
tokens. Both operands are read so here.

Differs from its clean twin in ``read``: pitches follow from the shape.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvpack.faults import kernel
from kvpack.faults.kernel import CLEAN, Block


def _read(x: Tensor, at: Block) -> Tensor:
    _, heads, columns = x.shape
    packed = x.as_strided(x.shape, (heads * columns, columns, 1), x.storage_offset())
    return kernel.read(packed, at)


FAULTY = replace(CLEAN, read=_read)


def kv_pack(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Pack from where dense operands would lie."""
    return FAULTY(kv_nope, k_pe, use_fp8)


def kv_pack_clean(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Run the clean twin; see ``kvpack.faults.kernel``."""
    return CLEAN(kv_nope, k_pe, use_fp8)
