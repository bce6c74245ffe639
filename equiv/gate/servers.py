"""The server layer's stored arrays: found by their digests, and its verdict derived again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiv.errors import UsageError
from equiv.gate.collect import Piece

MOST_STORES = 3
"""Folders that one comparison was made from, at the most, where they have to be found."""
RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""How far a number that was derived again may lie from the recorded one: another machine sums in
another order, and no figure of a verdict is so close to a limit."""
DERIVED = (
    *("verdict", "exit_code", "decided", "claim", "margin_nats", "margin_stated", "runs"),
    *("identity", "pooled_perplexity", "statistics", "texts", "not_covered", "warnings"),
    *("inputs_sha256", "subject", "top1"),
)
"""Fields of ``ppl.json`` that follow from the arrays."""


@dataclass(frozen=True)
class Arrays:
    """What was found of the arrays of one ``ppl.json``.

    Attributes
    ----------
    folders : the stores; empty where they aren't here.
    problem : why what is here can't be what it was made from.
    differ : fields that come out otherwise; empty where all do as recorded.

    """

    folders: tuple[Path, ...] = ()
    problem: str = ""
    differ: tuple[str, ...] = ()


def check(piece: Piece, stores: Sequence[Path]) -> Arrays:
    """Find the arrays of an evidence file, check their digests, and derive its verdict again."""
    own = piece.path.parent
    beside = [s for s in stores if s.resolve() == own.resolve()]
    try:
        folders = _matching(piece.made.inputs_sha256, [*beside, *stores])
        if folders is None:
            if beside:
                return Arrays(
                    problem=f"{piece.name} wasn't made from the arrays beside it: their digests "
                    "are others, or some are missing"
                )
            return Arrays()
        return Arrays(folders, differ=tuple(_differences(piece.made, derived(piece.made, folders))))
    except UsageError as e:
        return Arrays(problem=str(e))


def derived(made: Any, folders: Sequence[Path]) -> Any:
    """Compare stored arrays again, under the claim and margin that were stated."""
    from ppl.judge import compare_stored

    margin = made.margin_nats if made.margin_stated else None
    return compare_stored(list(folders), claim=made.claim, margin=margin)


def _matching(wanted: str, stores: Sequence[Path]) -> tuple[Path, ...] | None:
    """Return the fewest stores whose arrays have the digest together."""
    from ppl.evidence import digest
    from ppl.store import Store

    digests: dict[Path, list[str]] = {}
    for store in dict.fromkeys(stores):
        digests[store] = [r.array_sha256 for r in Store(store).records()]
    for count in range(1, min(MOST_STORES, len(digests)) + 1):
        for chosen in itertools.combinations(digests, count):
            if digest([d for s in chosen for d in digests[s]]) == wanted:
                return chosen
    return None


def _differences(recorded: Any, again: Any) -> Iterator[str]:
    one, two = recorded.model_dump(mode="json"), again.model_dump(mode="json")
    for name in DERIVED:
        yield from _differ(one.get(name), two.get(name), name)


def _differ(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _differ(a.get(key), b.get(key), f"{where}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differ(x, y, f"{where}.{i}")
    elif _numbers(a, b):
        if not math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            yield f"{where} is {a!r}, from the arrays {b!r}"
    elif a != b:
        yield f"{where} is {_short(a)}, from the arrays {_short(b)}"


def _numbers(a: Any, b: Any) -> bool:
    real = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return real and (isinstance(a, float) or isinstance(b, float))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - of a line
