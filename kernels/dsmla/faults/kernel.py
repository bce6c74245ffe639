"""A working key concat with ``fp8_ds_mla`` insert in torch ops, in parts that a fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3common import arithmetic, faults
from k3common.faults import Place, Turn
from k3insert.stock import NOPE, ROPE


@dataclass(frozen=True)
class Insert:
    """The op with its parts: called as ``stock.concat_and_insert`` is.

    ``rotates_q`` says whether q is rotated in place, ``heads`` how many heads get ``k_pe``.
    """

    stored: Callable[[Tensor], Tensor] = faults.stored
    place: Callable[[Tensor, Tensor], Place] = faults.place
    entries: Callable[[Tensor, Tensor], Tensor] = arithmetic.ds_entries
    turned: Turn = faults.turned
    rotates_q: bool = True
    heads: int | None = None

    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        """Return k, write the cache, and rotate q.

        Raises
        ------
        TypeError
            For other dtypes than bf16 and fp16.

        """
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"q is {q.dtype}: expected bfloat16 or float16")
        rope = self._turned(k_pe, positions, table)
        if positions is not None and self.rotates_q:
            q[..., NOPE:] = self._turned(q[..., NOPE:], positions, table)
        k = torch.empty((*k_nope.shape[:2], NOPE + ROPE), dtype=q.dtype, device=q.device)
        k[..., :NOPE] = k_nope
        k[:, slice(self.heads), NOPE:] = rope
        entries = self.entries(kv_c, rope[:, 0])
        kept = self.stored(slot_mapping)
        faults.insert(kv_cache, self.place(slot_mapping, kv_cache), entries, kept)
        return k

    def _turned(self, x: Tensor, positions: Tensor | None, table: Tensor | None) -> Tensor:
        made = self.turned(x, positions, table)
        return made if made.dtype == x.dtype else arithmetic.narrow(made, x.dtype)


clean = Insert()
"""The clean twin of all faults."""
