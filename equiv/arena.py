"""Guarded memory in which operands and outputs lie.

Operands are strided views into one buffer. Everything in it that no element covers (bands on
both sides, gaps between rows) carries a colour, and is compared with a pristine copy after the
call, together with the elements: so an input that changed and a write out of bounds both show.
Outputs come from a second buffer, poisoned with the colour before they are handed out; the run
with the complementary colour tells an unwritten byte from one that happens to look right.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from equiv.case import View
from equiv.dtypes import DTYPES, DType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from equiv.pairs import Operand

COLOURS = (0xA5, 0x5A)
"""Complementary bytes. Neither is a NaN, zero or common value of a dtype that outputs have."""

BAND = 16 * 1024
"""Guard bytes on each side of an operand or output: more than one 16-row block of keys writes."""

BASE = 512
"""Alignment of every base before its offset: what CUDA's caching allocator gives."""

SPARSE_BYTES = 1 << 30
"""On a CPU, operands that span more lie in an unreserved mapping; only rows are touched."""

MAP_NORESERVE = 0x4000

SPARE_BYTES = 1 << 28
"""Outputs up to this get as much memory again for a candidate's scratch; larger ones an eighth."""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_SOLID = {c: bytes([c]) * (BAND + BASE + BAND) for c in COLOURS}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous uint8 tensors on one device hold the same bytes."""
    if a.device.type == "cpu":
        return a.numel() == b.numel() and not _libc.memcmp(a.data_ptr(), b.data_ptr(), a.numel())
    return bool(torch.equal(a, b))


def dense_pitches(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the pitches, in elements, of a row-major operand."""
    pitches, step = [], 1
    for extent in reversed(shape):
        pitches.append(step)
        step *= max(extent, 1)
    return tuple(reversed(pitches))


def span_elements(shape: Sequence[int], pitches: Sequence[int]) -> int:
    """Return the distance from the first to just past the last element, in elements."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * p for n, p in zip(shape, pitches, strict=True))


def has_gaps(shape: Sequence[int], pitches: Sequence[int]) -> bool:
    """Whether some byte of the span belongs to no element."""
    return span_elements(shape, pitches) > math.prod(shape)


def overlaps(shape: Sequence[int], pitches: Sequence[int]) -> bool:
    """Whether some byte of the span may belong to several elements."""
    reach = 1
    for pitch, extent in sorted((p, n) for n, p in zip(shape, pitches, strict=True) if n > 1):
        if pitch < reach:
            return True
        reach += (extent - 1) * pitch
    return False


def is_aligned(operand: Operand, view: View | None) -> bool:
    """Whether the base and every pitch in use are multiples of the operand's alignment."""
    if view is None:
        return True
    itemsize = DTYPES[operand.dtype].itemsize
    outer = list(zip(operand.shape, view.pitches, strict=True))[:-1]
    bytes_ = [p * itemsize for n, p in outer if n > 1]
    return all(x % operand.align_bytes == 0 for x in (view.offset_bytes, *bytes_))


@dataclass(frozen=True)
class Placed:
    """One operand in the buffer: where its first element lies, and what it spans."""

    operand: Operand
    dtype: DType
    pitches: tuple[int, ...]
    start: int
    span_bytes: int
    gaps: bool
    overlaps: bool

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Shape of the elements that are written: the operand's, or its span where it overlaps."""
        if self.overlaps:
            return (self.span_bytes // self.dtype.itemsize,)
        return self.operand.shape

    def logical(self, storage: NDArray[Any]) -> NDArray[Any]:
        """Return the operand's elements, in its shape, of what was written."""
        if not self.overlaps:
            return storage
        steps = tuple(p * self.dtype.itemsize for p in self.pitches)
        return np.lib.stride_tricks.as_strided(storage, self.operand.shape, steps)


class Arena:
    """The buffer of a case's inputs on one device, and its pristine copy.

    Parameters
    ----------
    device : ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self.placed: list[Placed] = []
        self.used = 0
        self.sparse = False

    def _reserve(self, size: int) -> None:
        held = self._buffers[0].numel() if self._buffers else 0
        if self.sparse or held < size or held > max(8 * size, 1 << 28):
            self._buffers = None
            if self.sparse:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
                region = mmap.mmap(-1, size, flags=flags)
                buffer = torch.frombuffer(region, dtype=torch.uint8)
                self._buffers = (buffer, buffer)
                return
            more = size >> 2 if size <= SPARE_BYTES else 0
            room = size + more + BASE
            self._buffers = (self._aligned(room), self._aligned(room))

    def _aligned(self, size: int) -> torch.Tensor:
        with torch.inference_mode(mode=False):
            raw = torch.empty(size + BASE, dtype=torch.uint8, device=self.device)
        return raw[-raw.data_ptr() % BASE :][:size]

    @property
    def buffer(self) -> torch.Tensor:
        """The bytes that the candidate sees."""
        assert self._buffers is not None
        return self._buffers[0]

    @property
    def pristine(self) -> torch.Tensor:
        """What they must still be afterwards."""
        assert self._buffers is not None
        return self._buffers[1]

    def place(self, operands: Sequence[Operand], views: Mapping[str, View]) -> None:
        """Lay the operands out; the old contents are gone."""
        self.placed = []
        at = 0
        for operand in operands:
            dtype = DTYPES[operand.dtype]
            view = views.get(operand.name) or View(dense_pitches(operand.shape))
            at = -(-(at + BAND) // BASE) * BASE + view.offset_bytes
            span = span_elements(operand.shape, view.pitches) * dtype.itemsize
            twice = overlaps(operand.shape, view.pitches)
            gaps = not twice and has_gaps(operand.shape, view.pitches)
            self.placed.append(Placed(operand, dtype, view.pitches, at, span, gaps, twice))
            at += span + BAND
        self.used = at
        self.sparse = self.device.type == "cpu" and at > SPARSE_BYTES
        self._reserve(at)

    def _typed(self, source: torch.Tensor, p: Placed, dtype: torch.dtype) -> torch.Tensor:
        base = source[p.start : p.start + max(p.span_bytes, p.dtype.itemsize)]
        if p.start % p.dtype.itemsize:
            msg = f"offset {p.start} isn't a multiple of the element size"
            raise ValueError(msg)
        return torch.as_strided(base.view(dtype), p.operand.shape, p.pitches)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the operands as the caller would hold them."""
        return {p.operand.name: self._typed(self.buffer, p, p.dtype.torch()) for p in self.placed}

    def _integers(self, source: torch.Tensor, p: Placed) -> torch.Tensor:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.dtype.itemsize]
        return self._typed(source, p, kind)

    def _write(self, p: Placed, storage: NDArray[Any]) -> None:
        kind = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[p.dtype.itemsize]
        values = torch.from_numpy(np.ascontiguousarray(storage).view(kind).reshape(storage.shape))
        if p.overlaps:
            self.pristine[p.start : p.start + p.span_bytes].copy_(values.view(torch.uint8))
        else:
            self._integers(self.pristine, p).copy_(values)

    def paint(
        self, colour: int, storage: Mapping[str, NDArray[Any]], *, again: bool = False
    ) -> None:
        """Write elements (``Placed.storage_shape``), and the colour elsewhere, to both copies.

        With ``again`` these elements were the last to be painted, and what a call may have written
        over comes from the pristine copy: only bands and gaps change. A sparse buffer has no copy.
        """
        at = 0
        for p in self.placed:
            if not self.sparse:
                self.pristine[at : p.start].fill_(colour)
                if p.gaps:
                    self.pristine[p.start : p.start + p.span_bytes].fill_(colour)
            lost = p.gaps or (self.sparse and p.operand.mutable)
            if (lost or not again) and p.span_bytes:
                self._write(p, storage[p.operand.name])
            at = p.start + p.span_bytes
        if not self.sparse:
            self.pristine[at : self.used].fill_(colour)
            self.buffer[: self.used].copy_(self.pristine[: self.used])

    def read(self, source: torch.Tensor, name: str) -> NDArray[Any]:
        """Return an operand's elements as an array of bits in its shape."""
        p = next(p for p in self.placed if p.operand.name == name)
        array: NDArray[Any] = self._integers(source, p).cpu().contiguous().numpy()
        return array.view(p.dtype.bits)

    def changed(self, bits: Mapping[str, NDArray[Any]]) -> list[tuple[str, int]]:
        """Return what changed: ``(operand or "band before/after ...", byte)``, the first of each.

        Operands that the op may write are read as outputs, not here.
        """
        if self.sparse:
            return [
                (p.operand.name, 0)
                for p in self.placed
                if not p.operand.mutable
                and not np.array_equal(self.read(self.buffer, p.operand.name), bits[p.operand.name])
            ]
        if same_bytes(self.buffer[: self.used], self.pristine[: self.used]):
            return []
        found: list[tuple[str, int]] = []
        begin = 0
        for n, p in enumerate(self.placed):
            name, end = p.operand.name, p.start + p.span_bytes
            # What lies between two operands belongs to the nearer one's band, all of it.
            stop = self.used if n + 1 == len(self.placed) else end + BAND
            before, after = self._different(begin, p.start), self._different(end, stop)
            begin = stop
            if len(before):
                found.append((f"band before {name}", int(before[-1]) - p.start))
            written = p.operand.mutable and not p.gaps  # may be billions of bytes: none to look at
            span = slice(p.start, end)
            if not written and not same_bytes(self.buffer[span], self.pristine[span]):
                found += self._inside(p, bits[name])
            if len(after):
                found.append((f"band after {name}", int(after[0]) - p.start))
        return found

    def _different(self, begin: int, end: int) -> torch.Tensor:
        """Return the places from begin to end at which the buffer isn't what it was."""
        a, b = self.buffer[begin:end], self.pristine[begin:end]
        return begin + (a != b).nonzero()[:, 0].cpu()

    def _inside(self, p: Placed, bits: NDArray[Any]) -> list[tuple[str, int]]:
        """Return what changed within an operand's span: its elements, its gaps."""
        found = []
        name = p.operand.name
        elements = self.read(self.buffer, name)
        different = elements != bits
        if different.any() and not p.operand.mutable:
            index = np.unravel_index(int(np.argmax(different)), different.shape)
            at = sum(int(i) * s for i, s in zip(index, p.pitches, strict=True))
            bit = int(elements[index]) ^ int(bits[index])
            low = (bit & -bit).bit_length() - 1  # of a little-endian element
            found.append((name, at * p.dtype.itemsize + low // 8))
        if p.gaps:
            span = slice(p.start, p.start + p.span_bytes)
            kept = self.pristine[span].clone()
            self._integers(self.pristine, p).copy_(self._integers(self.buffer, p))
            gap = (self.buffer[span] != self.pristine[span]).nonzero()[:, 0]
            self.pristine[span].copy_(kept)
            if len(gap):
                found.append((f"gap of {name}", int(gap[0])))
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view into this buffer."""
        if self._buffers is None or tensor.device != self.buffer.device:
            return False
        begin = self.buffer.data_ptr()
        return begin <= tensor.data_ptr() < begin + self.buffer.numel()


@dataclass(frozen=True)
class Served:
    """One allocation served from the output buffer."""

    start: int
    size: int


class OutputArena:
    """Poisoned, banded memory for what a candidate allocates.

    Attributes
    ----------
    room : its size in bytes since ``begin``.

    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._buffer: torch.Tensor | None = None
        self.served: list[Served] = []
        self._at = self.room = 0
        self.colour = COLOURS[0]

    def begin(self, colour: int, room: int) -> None:
        """Forget what was served; make room for ``room`` bytes of outputs and for scratch."""
        spare = room if room <= SPARE_BYTES else room // 8
        size = self.room = room + spare + 16 * (BAND + BASE)
        held = self._buffer.numel() if self._buffer is not None else 0
        if held < size or held > max(8 * size, 1 << 28):
            self._buffer = None
            with torch.inference_mode(mode=False):  # it outlives the mode that a case may run in
                more = size >> 2 if size <= SPARE_BYTES else 0
                raw = torch.empty(size + more + BASE, dtype=torch.uint8, device=self.device)
            self._buffer = raw[-raw.data_ptr() % BASE :]
        self.colour = colour
        self.served = []
        self._at = 0
        if self.device.type == "cuda" and self._buffer is not None:
            # At once and beforehand: no fill may come between a producer and the candidate.
            self._buffer[:size].fill_(colour)

    def serve(
        self, shape: Sequence[int], pitches: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return poisoned memory with bands, or None where there is no room left."""
        assert self._buffer is not None
        size = span_elements(shape, pitches) * dtype.itemsize
        start = -(-(self._at + BAND) // BASE) * BASE
        end = start + size + BAND
        if end > self.room:
            return None
        if self.device.type != "cuda":
            self._buffer[self._at : end].fill_(self.colour)
        self._at = end
        self.served.append(Served(start, size))
        base = self._buffer[start : start + max(size, dtype.itemsize)].view(dtype)
        return torch.as_strided(base, tuple(shape), tuple(pitches))

    def overrun(self) -> tuple[int, int] | None:
        """Return (which allocation, byte relative to its end or start) of a write out of bounds."""
        assert self._buffer is not None
        at = 0
        for i, s in enumerate(self.served):
            for begin, end, origin, nearest in (
                (at, s.start, s.start, -1),
                (s.start + s.size, s.start + s.size + BAND, s.start + s.size, 0),
            ):
                band = self._buffer[begin:end]
                if not self._untouched(band):
                    wrong = (band != self.colour).nonzero()[:, 0]
                    return i, begin + int(wrong[nearest]) - origin
            at = s.start + s.size + BAND
        return None

    def _untouched(self, band: torch.Tensor) -> bool:
        if self.device.type == "cpu" and band.numel() <= len(_SOLID[self.colour]):
            return not _libc.memcmp(band.data_ptr(), _SOLID[self.colour], band.numel())
        return bool((band == self.colour).all())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory served since ``begin``."""
        if self._buffer is None or tensor.device != self._buffer.device:
            return False
        at = tensor.data_ptr() - self._buffer.data_ptr()
        return any(s.start <= at < s.start + max(s.size, 1) for s in self.served)
