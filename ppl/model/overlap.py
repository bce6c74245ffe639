"""Do training and scored texts share passages? Compared without case and without line breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_BYTES = 200
"""A passage as long as this, of two texts, is no accident."""

_BLOCK = LEAST_BYTES // 2
"""Any passage of ``LEAST_BYTES`` holds a whole block of a grid this fine."""


@dataclass(frozen=True)
class Passage:
    """What a source and a scored text share, ``size`` bytes of it, without its line breaks."""

    text: str
    source: str
    size: int
    begins: str


def plain(data: bytes) -> bytes:
    """Return text in lower case, with one space for whatever white space there is."""
    return b" ".join(data.lower().split())


def shared(sources: Mapping[str, bytes], name: str, text: bytes) -> list[Passage]:
    """Return the passages of at least ``LEAST_BYTES`` that a text shares with any source.

    Every such place of the text is found: sources are indexed in blocks of half that length, and
    the text is looked up at each of its bytes. A place that several sources have is listed once.
    """
    others = {source: plain(data) for source, data in sources.items()}
    index: dict[bytes, list[tuple[str, int]]] = {}
    for source, other in others.items():
        for at in range(0, len(other) - _BLOCK + 1, _BLOCK):
            index.setdefault(other[at : at + _BLOCK], []).append((source, at))
    wanted = plain(text)
    found: list[Passage] = []
    at = 0
    while at <= len(wanted) - _BLOCK:
        places = index.get(wanted[at : at + _BLOCK], ())
        grown = [(*_grow(wanted, at, others[source], there), source) for source, there in places]
        first, last, source = max(grown, key=lambda g: g[1] - g[0], default=(at, at, ""))
        if last - first >= LEAST_BYTES:
            begins = wanted[first : first + 60].decode("utf-8", "replace")
            found.append(Passage(name, source, last - first, begins))
            at = last
        at += 1
    return found


def _grow(a: bytes, i: int, b: bytes, j: int) -> tuple[int, int]:
    """Return where in ``a`` the passage around ``a[i]``, equal to ``b[j]``, begins and ends."""
    first = 0
    while i - first > 0 and j - first > 0 and a[i - first - 1] == b[j - first - 1]:
        first += 1
    last = 0
    while i + last < len(a) and j + last < len(b) and a[i + last] == b[j + last]:
        last += 1
    return i - first, i + last
