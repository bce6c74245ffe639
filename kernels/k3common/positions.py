"""Positions, rotary tables and scales of a case, as pure functions of its point.

The table's cosines and sines are multiples of 2^-8. A product with a bf16 or fp16 element is then
exact in float32, and a rotation rounds once, whether or not a compiler fuses multiply and add:
otherwise bytes would depend on the compiler.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from k3insert.stock import ROPE

ROWS = 4096
"""Positions of the table."""
STEP = 1.0 / 256
SCALES: dict[str, tuple[float, ...]] = {
    "one": (1.0, 1.0, 1.0, 1.0),
    "power": (0.5, 4.0, 2.0, 16.0),
    "odd": (1.3333334, 0.58823532, 2.7182817, 23.529411),
}
"""Inverses of the scales of q, k, v and the cache: K3's for an unscaled checkpoint, powers of two,
and numbers whose product has to be rounded."""


def positions(tokens: int) -> NDArray[np.int64]:
    """Return int64 ``[tokens]``: all over the table, from its last row on."""
    token = np.arange(tokens, dtype=np.int64)
    return (ROWS - 1 + 1031 * token) % ROWS


@lru_cache(maxsize=1)
def table() -> NDArray[np.float32]:
    """Return float32 ``[ROWS, 64]``: 32 cosines and 32 sines, base 10,000, rounded to ``STEP``."""
    frequency = 10_000.0 ** (-np.arange(ROPE // 2) / (ROPE // 2))
    angle = np.arange(ROWS)[:, None] * frequency
    both = np.concatenate((np.cos(angle), np.sin(angle)), axis=1)
    made: NDArray[np.float32] = (np.round(both / STEP) * STEP).astype(np.float32)
    return made


Kept: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A tensor that all calls are given, and a copy that none is."""


def kept(tokens: int, kind: str, device: torch.device, scaled: str | None) -> dict[str, Kept]:
    """Return what calls share beside the operands: positions, table and inverse scales, by name."""
    scaling = () if scaled is None else _scales_on(scaled, device)
    made = {f"scale {i}": s for i, s in enumerate(scaling)}
    if kind != "off":
        made |= {"positions": _positions_on(tokens, device), "table": _table_on(device)}
    return made


def on_device(
    tokens: int, kind: str, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return positions and table, or two ``None`` for the kind ``"off"``.

    They are kept, as ``k3insert.slots.tensor`` keeps mappings: a watched call allocates none.
    """
    if kind == "off":
        return None, None
    return _positions_on(tokens, device)[0], _table_on(device)[0]


def scales(kind: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the inverse scales of q, k, v and the cache, float32 ``[1]`` each; kept as well."""
    return tuple(seen for seen, _ in _scales_on(kind, device))


def _twice(made: torch.Tensor) -> Kept:
    return made, made.clone()


@lru_cache(maxsize=64)
def _positions_on(tokens: int, device: torch.device) -> Kept:
    return _twice(torch.from_numpy(positions(tokens)).to(device))


@lru_cache(maxsize=8)
def _table_on(device: torch.device) -> Kept:
    return _twice(torch.from_numpy(table()).to(device))


@lru_cache(maxsize=16)
def _scales_on(kind: str, device: torch.device) -> tuple[Kept, ...]:
    made = (torch.tensor([s], dtype=torch.float32, device=device) for s in SCALES[kind])
    return tuple(map(_twice, made))
