"""Cases: pure values from which operands follow, on any device, and their one-line form.

The line has nine fields, split by ``/``, and no character that a shell would change::

    PAIR/CANDIDATE/DEVICE/LANE/POINT/VIEWS/FILL/MODE/SET

    kvpack/inductor/cpu/strides/T=3,H=2,dtype=bf16,fp8=1,pe=same/kv_nope=528.264.1+32/bits.17/eager/-

- POINT: one value for each dimension and axis of the pair.
- VIEWS: for each operand that isn't dense: pitches in elements, then ``+`` and the base's
  offset in bytes from a 512-byte boundary; ``-`` for none.
- FILL: ``kind.seed``, see ``equiv.fills``.
- SET: single elements set after the fill, ``operand.index:hex``, index counted in elements
  of the operand's shape; ``-`` for none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from equiv.errors import UsageError

FIELDS = ("pair", "candidate", "device", "lane", "point", "views", "fill", "mode", "set")


@dataclass(frozen=True, order=True)
class View:
    """How an operand lies in memory.

    Attributes
    ----------
    pitches : distance between neighbours of each dimension, in elements.
    offset_bytes : of the first element, from a 512-byte boundary.

    """

    pitches: tuple[int, ...]
    offset_bytes: int = 0


@dataclass(frozen=True, order=True)
class Fill:
    """What the operands' elements are: a kind of ``equiv.fills.KINDS``, and a seed."""

    kind: str
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One case. Equal cases give equal bytes, whatever the machine."""

    pair: str
    lane: str
    point: tuple[tuple[str, int | str], ...]
    views: tuple[tuple[str, View], ...] = ()
    fill: Fill = field(default_factory=lambda: Fill("bits"))
    mode: str = "eager"
    overrides: tuple[tuple[str, int, int], ...] = ()
    candidate: str = "stock"
    device: str = "cpu"

    def __getitem__(self, name: str) -> int | str:
        """Return the value of a dimension or axis."""
        return dict(self.point)[name]

    def with_(self, **changes: object) -> Case:
        """Return a copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return the one-line form that ``parse`` reads."""
        point = ",".join(f"{k}={v}" for k, v in self.point) or "-"
        views = (
            ",".join(
                f"{name}={'.'.join(map(str, v.pitches))}+{v.offset_bytes}" for name, v in self.views
            )
            or "-"
        )
        overrides = ",".join(f"{n}.{i}:{b:x}" for n, i, b in self.overrides) or "-"
        fill = f"{self.fill.kind}.{self.fill.seed}"
        head = (self.pair, self.candidate, self.device, self.lane)
        return "/".join((*head, point, views, fill, self.mode, overrides))


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _entries(text: str) -> list[str]:
    return [] if text in {"-", ""} else text.split(",")


def _number(text: str) -> int | str:
    return _count(text) if re.fullmatch(r"\d+", text) else text


def _count(text: str) -> int:
    """Read an integer from 0 to 2^63 - 1."""
    if not re.fullmatch(r"\d{1,19}", text) or int(text) >= 1 << 63:
        raise ValueError(f"{text!r} is no integer from 0 to 2^63 - 1")
    return int(text)


def _once(names: list[str]) -> None:
    doubled = [n for n in names if names.count(n) > 1]
    if doubled:
        raise ValueError(f"{doubled[0]!r} stands twice")


def parse(line: str) -> Case:
    """Read a case from its one-line form.

    Raises
    ------
    UsageError : with the field that can't be read.

    """
    parts = line.strip().split("/", 1)
    tail = parts[1].rsplit("/", len(FIELDS) - 2) if len(parts) > 1 else []
    if len(tail) != len(FIELDS) - 1:
        msg = (
            f"can't read the case {line!r}: expected {len(FIELDS)} fields split by '/' "
            f"({'/'.join(FIELDS).upper()}); copy the line that a report printed"
        )
        raise UsageError(msg)
    where = "point"
    try:
        candidate, device, lane, point_text, views_text, fill_text, mode, set_text = tail
        point = []
        for entry in _entries(point_text):
            key, value = entry.split("=")
            point.append((key, _number(value)))
        _once([k for k, _ in point])
        where = "views"
        views = []
        for entry in _entries(views_text):
            key, value = entry.split("=")
            pitches, offset = value.split("+")
            steps = tuple(_count(p) for p in pitches.split(".")) if pitches else ()
            views.append((key, View(steps, _count(offset))))
        _once([k for k, _ in views])
        where = "fill"
        kind, seed_text = fill_text.split(".")
        seed = _count(seed_text)
        where = "set"
        overrides = []
        for entry in _entries(set_text):
            target, bits = entry.split(":")
            operand, index = target.rsplit(".", 1)
            if not re.fullmatch(r"[0-9a-f]{1,16}", bits):
                raise ValueError(f"{bits!r} is no hexadecimal number")
            overrides.append((operand, _count(index), int(bits, 16)))
        where = "names"
        for word in (parts[0], device.replace(":", "_"), lane, kind, mode, *(k for k, _ in point)):
            if not _WORD.match(word):
                raise ValueError(word)
        return Case(
            pair=parts[0],
            candidate=candidate,
            device=device,
            lane=lane,
            point=tuple(point),
            views=tuple(views),
            fill=Fill(kind, seed),
            mode=mode,
            overrides=tuple(overrides),
        )
    except ValueError as e:
        raise UsageError(
            f"can't read the case {line!r}: field {where} is malformed ({e}); "
            "copy the line that a report printed"
        ) from None
