"""A working decode query concat with cache insert in torch ops, in parts that a fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3common import arithmetic, faults
from k3common.faults import Place, Turn
from k3insert.stock import ENTRY, LATENT


def entries(kv_c: Tensor, rope: Tensor, kind: str) -> Tensor:
    """Return entries that aren't converted, or of 656 bytes."""
    if kind == "ds_mla":
        return arithmetic.ds_entries(kv_c, rope)
    return torch.cat((kv_c, rope), dim=-1)


@dataclass(frozen=True)
class Decode:
    """The op with its parts: called as ``stock.concat_and_insert`` is.

    ``scales`` says which of the four scales is for the query and for the cache, ``rows`` is how
    many rows (token, head) of the query are written: all, where it is ``None``.
    """

    stored: Callable[[Tensor], Tensor] = faults.stored
    place: Callable[[Tensor, Tensor], Place] = faults.place
    quantise: Callable[[Tensor, Tensor], Tensor] = faults.quantise
    turned: Turn = faults.turned
    turned_q: Turn | None = None
    entries: Callable[[Tensor, Tensor, str], Tensor] = entries
    scales: tuple[int, int] = (0, 3)
    tokens: int | None = None
    swapped: bool = False

    def __call__(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kind: str,
        scales: tuple[Tensor, ...],
        positions: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        """Return mqa_q and write the cache.

        Raises
        ------
        TypeError
            For other dtypes than bf16 and fp16.

        """
        if ql_nope.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"ql_nope is {ql_nope.dtype}: expected bfloat16 or float16")
        fp8 = kind == "fp8"
        dtype = torch.float8_e4m3fn if fp8 else ql_nope.dtype
        mqa_q = torch.empty((*ql_nope.shape[:2], ENTRY), dtype=dtype, device=ql_nope.device)
        q_rope = (self.turned_q or self.turned)(q_pe, positions, table)
        rope = self.turned(k_pe, positions, table)[:, 0]
        if fp8:
            q_inv, cache_inv = (scales[i] for i in self.scales)
            left, right = self.quantise(ql_nope, q_inv), self.quantise(q_rope, q_inv)
            latent, rope = self.quantise(kv_c, cache_inv), self.quantise(rope, cache_inv)
            made = torch.cat((latent.view(torch.uint8), rope.view(torch.uint8)), dim=-1)
        else:
            left, right = ql_nope, self._narrow(q_rope, ql_nope.dtype)
            made = self.entries(kv_c, self._narrow(rope, kv_c.dtype), kind)
        at = LATENT if not self.swapped else ENTRY - LATENT
        some = slice(self.tokens)
        if self.swapped:
            mqa_q[some, :, :at], mqa_q[some, :, at:] = right[some], left[some]
        else:
            mqa_q[some, :, :at], mqa_q[some, :, at:] = left[some], right[some]
        kept = self.stored(slot_mapping)
        faults.insert(kv_cache, self.place(slot_mapping, kv_cache), made, kept)
        return mqa_q

    @staticmethod
    def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if x.dtype == dtype else arithmetic.narrow(x, dtype)


clean = Decode()
"""The clean twin of all faults."""
