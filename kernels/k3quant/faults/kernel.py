"""A working quantisation with cache insert in torch ops, in parts that a fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3common import faults
from k3common.faults import Place, Turn
from k3insert.stock import ENTRY, NOPE, ROPE

Quantise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Quant:
    """The op with its parts: called as ``stock.quantise_and_insert`` is.

    ``scales`` says which of the four scales is for q, k, v and the cache, ``rope`` converts rotary
    columns, ``columns`` are how many of an entry are written.
    """

    stored: Callable[[Tensor], Tensor] = faults.stored
    place: Callable[[Tensor, Tensor], Place] = faults.place
    quantise: Quantise = faults.quantise
    rope: Quantise | None = None
    turned: Turn = faults.turned
    turned_q: Turn | None = None
    scales: tuple[int, int, int, int] = (0, 1, 2, 3)
    columns: int = ENTRY

    def __call__(
        self,
        q: Tensor,
        k_nope: Tensor,
        k_pe: Tensor,
        kv_c: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        scales: tuple[Tensor, ...],
        positions: Tensor | None,
        table: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q8, k8 and v8 and write the cache.

        Raises
        ------
        TypeError
            For other dtypes than bf16 and fp16.

        """
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"q is {q.dtype}: expected bfloat16 or float16")
        q_inv, k_inv, v_inv, cache_inv = (scales[i] for i in self.scales)
        rope = self.turned(k_pe, positions, table)
        q_pe = (self.turned_q or self.turned)(q[..., NOPE:], positions, table)
        q8 = self._row(q[..., :NOPE], q_pe, q_inv)
        k8 = self._row(k_nope, rope, k_inv)
        v8 = torch.empty(v.shape, dtype=torch.float8_e4m3fn, device=v.device)
        v8.copy_(self.quantise(v, v_inv))
        entries = self._row(kv_c[:, None], rope, cache_inv)[:, 0, : self.columns]
        kept = self.stored(slot_mapping)
        faults.insert(kv_cache, self.place(slot_mapping, kv_cache), entries, kept)
        return q8, k8, v8

    def _row(self, left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
        columns = left.shape[-1]
        shape = (*left.shape[:-1], columns + ROPE)
        row = torch.empty(shape, dtype=torch.float8_e4m3fn, device=left.device)
        row[..., :columns] = self.quantise(left, scale)
        row[..., columns:] = (self.rope or self.quantise)(right, scale)
        return row


clean = Quant()
"""The clean twin of all faults."""
