"""Judge a case: what the oracle says of the reference, what the ledger declares, what is left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from equiv import compare
from equiv.arena import COLOURS
from equiv.dtypes import DTYPES
from equiv.ledger import elements_covered, variant_covered
from equiv.result import LedgerHit, Result
from equiv.snapshots import unsigned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from equiv.compare import Difference
    from equiv.execute import CaseRun
    from equiv.ledger import Entry
    from equiv.pairs import Operand, Output
    from equiv.snapshots import Snapshot

LARGE_BYTES = 1 << 28
"""Outputs above this are compared on the device alone: no hash, and the oracle sees windows."""

CHUNK_ELEMENTS = 1 << 24
"""Output elements of a large case that are looked through at a time, where they differ."""

ORACLE_WINDOW = 64
"""Leading rows of the first dimension in each window that the oracle checks of a large case."""


class Judge:
    """Judges one case from its inputs, the reference's outputs and the candidate's.

    Parameters
    ----------
    run : the case, with its operands placed and its reference run.

    """

    def __init__(self, run: CaseRun) -> None:
        self.run = run

    # -- the oracle ------------------------------------------------------------------

    def windows(self) -> list[slice]:
        """Return the leading indices that the oracle checks: all, or windows of a large case."""
        t = int(self.run.point[next(iter(self.run.pair.dims))])
        if self.run.room <= LARGE_BYTES:
            return [slice(0, t)]
        if not self.shared_leading():
            return []
        starts = {0, max(0, t - ORACLE_WINDOW)}
        for o in self.run.outputs.values():
            per = int(np.prod(o.shape[1:], dtype=np.int64)) * DTYPES[o.dtype].itemsize
            for mark in (1 << 31, 1 << 32):
                if mark // max(per, 1) < t:
                    starts.add(max(0, mark // per - ORACLE_WINDOW // 2))
        return [slice(s, min(s + ORACLE_WINDOW, t)) for s in sorted(starts)]

    def ask_oracle(
        self,
    ) -> tuple[Mapping[str, NDArray[Any]] | None, tuple[LedgerHit, ...], Difference | None]:
        """Compare the reference with the oracle: its outputs, what is declared, what isn't."""
        hits: list[LedgerHit] = []
        departure = None
        whole = None
        for w in self.windows():
            everything = self.run.room <= LARGE_BYTES
            inputs, point = (self.run.bits, self.run.point) if everything else self.part(w)
            voice = self.run.pair.oracle(inputs, point)
            if voice is None:
                return None, (), None
            whole = voice
            for name, right in voice.items():
                stock = self.run.expected[name] if everything else self.run.expected[name][w]
                bits = unsigned(stock)
                mask = compare.differing(right, bits)
                if mask is None:
                    continue
                left = self.declare(
                    name, inputs, point, right, bits, mask, self.run.x.oracle_entries, hits
                )
                if left.any() and departure is None:
                    start = 0 if everything else w.start
                    output = self._output(name)
                    departure = compare.summarise(output, right, bits, left, start)
        return whole, tuple(hits), departure

    def declare(
        self,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        point: Mapping[str, Any],
        expected: NDArray[Any],
        actual: NDArray[Any],
        mask: NDArray[np.bool_],
        entries: Sequence[Entry],
        hits: list[LedgerHit],
    ) -> NDArray[np.bool_]:
        """Count the differing elements that entries declare; return the mask of the others."""
        entries = [
            e
            for e in entries
            if e.kind == "bytes"
            and e.covers_case(point, aligned=self.run.claim.aligned, mode=self.run.case.mode)
        ]
        left = self._whole(name, inputs, point, expected, actual, mask, entries, hits)
        entries = [e for e in entries if e.variant is None]
        if not entries or not left.any():
            return left
        flat = np.flatnonzero(left)
        at, operand_of = 0, {}
        ids = {}
        for o in self.run.claim.operands:
            size = inputs[o.name].size
            ids[o.name] = np.arange(at, at + size, dtype=np.int64).reshape(inputs[o.name].shape)
            operand_of[o.name] = (at, at + size)
            at += size
        places = self.run.pair.layout(ids, point).get(name)
        if places is None:  # an operand that the op writes, of which the pair doesn't say from what
            return left
        source = np.ascontiguousarray(places).reshape(-1)[flat]
        columns = flat % expected.shape[-1]
        exp, act = expected.reshape(-1)[flat], actual.reshape(-1)[flat]
        for o in self.run.claim.operands:
            lo, hi = operand_of[o.name]
            own = np.flatnonzero((source >= lo) & (source < hi))
            if not len(own):
                continue
            bits = inputs[o.name].reshape(-1)[source[own] - lo]
            for entry, covered in elements_covered(
                entries,
                self.run.pair.classes,
                self.run.pair.models,
                bits,
                o.dtype,
                exp[own],
                act[own],
            ):
                left.reshape(-1)[flat[own[covered]]] = False
                patterns: dict[str, tuple[int, ...]] = {}
                for part in self._parts(name):
                    inside = covered & self._in_part(name, part, columns[own])
                    if inside.any():
                        key = f"{o.dtype} {part}"
                        patterns[key] = tuple(int(x) for x in np.unique(bits[inside]))
                hits.append(LedgerHit(entry.id, int(covered.sum()), patterns))
        return left

    def _whole(
        self,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        point: Mapping[str, Any],
        expected: NDArray[Any],
        actual: NDArray[Any],
        mask: NDArray[np.bool_],
        entries: Sequence[Entry],
        hits: list[LedgerHit],
    ) -> NDArray[np.bool_]:
        """Count what entries with a variant declare; return the mask of the others."""
        left = mask.copy()
        for entry in entries:
            if entry.variant is None:
                continue
            variants = getattr(self.run.pair, "variants", {})  # a pair need not have any
            made = variants[entry.variant](inputs, point).get(name)
            covered = variant_covered(entry, made, expected, actual, left)
            if covered.any():
                hits.append(LedgerHit(entry.id, int(covered.sum())))
                left &= ~covered
        return left

    def _output(self, name: str) -> Output:
        return self.run.outputs.get(name) or _as_output(self.run.claim.operands, name)

    def _parts(self, name: str) -> list[str]:
        return [f"{name}.{p}" for p in self._output(name).parts] or [name]

    def _in_part(self, name: str, part: str, columns: NDArray[Any]) -> NDArray[np.bool_]:
        if part == name:
            return np.ones(len(columns), dtype=bool)
        lo, hi = self._output(name).parts[part.removeprefix(f"{name}.")]
        return np.asarray((columns >= lo) & (columns < hi))

    # -- what went wrong -------------------------------------------------------------

    def undeclared(
        self, expected: Snapshot, actual: Snapshot, hits: list[LedgerHit]
    ) -> Iterator[tuple[str, slice, NDArray[Any], NDArray[Any], NDArray[np.bool_]]]:
        """Yield each part of an output that differs otherwise than the ledger declares.

        Yields
        ------
        Name, part of the first dimension, expected and actual bits of it, mask of what is left.

        """
        for name in sorted(expected):
            for w in self.chunks(name):
                e, a = unsigned(expected[name][w]), unsigned(actual[name][w])
                mask = compare.differing(e, a)
                if mask is None:
                    continue
                inputs, point = self.part(w)
                left = self.declare(name, inputs, point, e, a, mask, self.run.x.entries, hits)
                if left.any():
                    yield name, w, e, a, left

    def all_declared(self, expected: Snapshot, actual: Snapshot, hits: list[LedgerHit]) -> bool:
        """Whether every difference is declared; only then are the hits kept."""
        met: list[LedgerHit] = []
        if not self.run.x.entries or next(self.undeclared(expected, actual, met), None) is not None:
            return False
        hits += met
        return True

    def judge(
        self,
        base: Result,
        seen: list[tuple[Snapshot, Snapshot]],
        oracle: Mapping[str, NDArray[Any]] | None,
    ) -> Result:
        """Say what a difference is that the ledger doesn't declare."""
        expected, actual = seen[0]
        hits: list[LedgerHit] = []
        found: dict[str, Difference] = {}
        status = ""
        for name, w, e, a, left in self.undeclared(expected, actual, hits):
            status = status or self.kind_of(name, w, left, seen)
            for category, mask in compare.by_category(e, a, left, self._output(name).dtype):
                if category not in found:
                    found[category] = compare.summarise(self._output(name), e, a, mask, w.start)
            if len(found) == len(compare.CATEGORIES):
                break
        first, *others = found.values()
        voice = self.silent(oracle, expected)
        name = first.output
        fits = oracle is not None and name in oracle and expected is self.run.expected
        if oracle is not None and fits and oracle[name].shape == self._output(name).shape:
            right = int(oracle[name][first.index])
            voice = compare.voices(first.expected, first.actual, right)
        return replace(
            base,
            status=status,
            detail=first.sentence(),
            difference=first,
            others=tuple(others),
            voices=voice,
            ledger=(*base.ledger, *hits),
        )

    def silent(self, oracle: Mapping[str, NDArray[Any]] | None, expected: Any) -> str:
        """Say why the oracle says nothing of a difference, should it come to that."""
        if oracle is None:
            return f"pair {self.run.pair.name} has no oracle for this case"
        if expected is not self.run.expected:
            return f"not asked: mode {self.run.case.mode} changes the operands after it was"
        return "it has no such output"

    def chunks(self, name: str) -> list[slice]:
        """Return parts of the first dimension in which an output is looked through."""
        shape = self.run.expected[name].shape
        rows = shape[0] if shape else 1
        if self.run.room <= LARGE_BYTES or not self.shared_leading():
            return [slice(0, rows)]
        step = max(1, CHUNK_ELEMENTS // max(1, int(np.prod(shape[1:], dtype=np.int64))))
        return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]

    def shared_leading(self) -> bool:
        """Whether the first dimension of every tensor is the pair's first dimension."""
        shapes = [o.shape for o in self.run.claim.operands]
        shapes += [o.shape for o in self.run.outputs.values()]
        leading = {s[0] for s in shapes if s}
        return leading == {self.run.point[next(iter(self.run.pair.dims))]}

    def part(self, w: slice) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the inputs and the point of a part of the first dimension."""
        first = next(iter(self.run.pair.dims))
        if w.stop - w.start == self.run.point[first] or not self.shared_leading():
            return self.run.bits, self.run.point
        return {n: b[w] for n, b in self.run.bits.items()}, {
            **self.run.point,
            first: w.stop - w.start,
        }

    def kind_of(
        self, name: str, w: slice, left: NDArray[np.bool_], seen: list[tuple[Snapshot, Snapshot]]
    ) -> str:
        """Tell unwritten bytes and instability from a plain divergence."""
        if self.run.room > LARGE_BYTES:  # one colour alone has run
            bytes_ = np.ascontiguousarray(unsigned(seen[0][1][name][w])[left]).view(np.uint8)
            unwritten = bool((bytes_ == self.run.wrong_colours[0]).all())
            return "unwritten" if unwritten else "divergence"
        by_colour = dict(zip(self.run.wrong_colours, seen, strict=True))
        right = next(iter(seen))[0]
        pair = [by_colour.get(c, (right, right)) for c in COLOURS]  # not seen: it was equal
        if any(e is not right for e, _ in pair):
            return "divergence"
        a, b = (
            np.ascontiguousarray(unsigned(actual[name][w])[left]).view(np.uint8)
            for _, actual in pair
        )
        if ((a == COLOURS[0]) & (b == COLOURS[1])).any():
            return "unwritten"
        return "divergence" if np.array_equal(a, b) else "unstable"


def _as_output(operands: Sequence[Operand], name: str) -> Output:
    operand = next(o for o in operands if o.name == name)

    @dataclass(frozen=True)
    class Written:
        name: str
        shape: tuple[int, ...]
        dtype: str
        axes: tuple[str, ...]
        parts: dict[str, tuple[int, int]]

    axes = tuple(f"index {i}" for i in range(len(operand.shape)))
    return Written(name, operand.shape, operand.dtype, axes, {})
