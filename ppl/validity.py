"""Whether stored results are entitled to be compared: everything amiss, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppl.observe import COUNTERS
from ppl.store import Observed, Record


def by_text(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by text, in the order of names."""
    grouped: dict[str, list[Record]] = {}
    for r in sorted(records, key=lambda r: (r.key.text, r.arm != "stock", r.launch, r.repeat)):
        grouped.setdefault(r.key.text, []).append(r)
    return grouped


def amiss(records: Sequence[Record]) -> tuple[str, ...]:
    """Return what makes a comparison of these results invalid; empty where nothing does."""
    if not records:
        return ("no results are stored: there is nothing to compare",)
    wrong: list[str] = []
    grouped = by_text(records)
    runs = {r.run for r in records}
    wrong += [
        f"no run of {arm} is stored"
        for arm in ("stock", "fused")
        if not any(r.arm == arm for r in records)
    ]
    for text, mine in grouped.items():
        lacking = sorted(runs - {r.run for r in mine})
        if lacking:
            names = ", ".join(_name(run) for run in lacking)
            wrong.append(f"text {text}: no result of {names}")
        wrong += [
            f"text {text}: {what} between runs"
            for what, values in (
                ("ids differ", {r.key.ids_sha256 for r in mine}),
                ("length differs", {r.rows for r in mine}),
                ("plan differs", {(r.exposed_from, r.budget) for r in mine}),
            )
            if len(values) > 1
        ]
        if mine[0].exposed_from >= mine[0].rows:
            wrong.append(f"text {text} never reaches the path under test")
    return (
        *wrong,
        *_one_answer(records),
        *_configurations(records),
        *_routes(records),
        *_unproven(records),
        *_observed(records),
    )


def _one_answer(records: Sequence[Record]) -> list[str]:
    """Name texts of other ids whose values are the same: a server that repeats an answer."""
    known: dict[tuple[str, int], Record] = {}
    wrong = []
    for r in records:
        other = known.setdefault((r.array_sha256, r.rows), r)
        if other.key.ids_sha256 != r.key.ids_sha256 and other.key.text != r.key.text:
            wrong.append(
                f"text {r.key.text}, {_name(r.run)}: the values of text {other.key.text}, whose "
                "ids are others"
            )
    return wrong[:1]


def _name(run: tuple[str, int, int]) -> str:
    return f"{run[0]} launch {run[1]} repeat {run[2]}"


def _configurations(records: Sequence[Record]) -> list[str]:
    wrong = []
    for what in ("model", "arguments", "versions"):
        found = {str(getattr(r.key, what)): r for r in records}
        if len(found) > 1:
            one, other = list(found.values())[:2]
            wrong.append(
                f"{what} differ: {_name(one.run)} of {one.key.text} and {_name(other.run)} of "
                f"{other.key.text}"
            )
    return wrong


def _routes(records: Sequence[Record]) -> list[str]:
    routes = {arm: {r.key.route for r in records if r.arm == arm} for arm in ("stock", "fused")}
    wrong = [
        f"the {arm} arm ran several routes: {', '.join(sorted(names))}"
        for arm, names in routes.items()
        if len(names) > 1
    ]
    both = routes["stock"] & routes["fused"]
    if both:
        wrong.append(f"both arms were asked for the same route, {min(both)}")
    return wrong


def _observed(records: Sequence[Record]) -> list[str]:
    return [
        f"text {r.key.text}, {_name(r.run)}: {x}"
        for r in records
        for x in deviations(r.observed, route=r.key.route, tokens=r.key.tokens, budget=r.budget)
    ]


def deviations(seen: Observed, *, route: str, tokens: int, budget: int) -> list[str]:
    """Say in what a server did something else for one text than was asked and planned."""
    wrong = []
    if seen.route is not None and seen.route != route:
        wrong.append(f"ran the route {seen.route}, asked for {route}")
    if seen.cached_tokens:
        wrong.append(f"{seen.cached_tokens:,} tokens came from a prefix cache")
    if seen.preemptions:
        wrong.append(f"preempted {seen.preemptions} times")
    if seen.requests not in {None, 1}:
        wrong.append(f"the server finished {seen.requests} requests meanwhile, not 1")
    wrong += _counters(seen)
    if seen.scheduler_chunks is not None:
        planned = tuple(min(budget, tokens - at) for at in range(0, tokens, budget))
        if seen.scheduler_chunks != planned:
            wrong.append(
                f"scheduler chunks {_list(seen.scheduler_chunks)}, planned {_list(planned)}"
            )
    return wrong


def _counters(seen: Observed) -> list[str]:
    """Say which counters aren't as planned."""
    planned, counted = seen.planned or {}, seen.counters or {}
    return [
        f"rank {rank} counted {found[rank]:,} {name}, planned {wanted:,}"
        for name, per_rank in planned.items()
        for rank, wanted in enumerate(per_rank)
        if (found := counted.get(name, ())) and rank < len(found) and found[rank] != wanted
    ][:1]


def _unproven(records: Sequence[Record]) -> list[str]:
    """Name arms whose route nothing shows: an unproven route is no evidence."""
    return [
        f"the route of the {arm} arm is unproven: nothing shows which one ran, for {n} of "
        f"{len(mine)} results"
        for arm in ("stock", "fused")
        if (mine := [r for r in records if r.arm == arm])
        and (n := sum(r.observed.route is None for r in mine))
    ]


def _list(values: Sequence[int]) -> str:
    shown = ", ".join(str(v) for v in values[:8])
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"  # noqa: PLR2004 - of a line


def not_covered(records: Sequence[Record]) -> list[str]:
    """Return the self-checks that no record has facts for."""
    lacking = [
        f"{name} of the route: counted for {there} of {len(records)} results"
        for name in COUNTERS
        if (there := sum(name in (r.observed.counters or {}) for r in records)) < len(records)
        and any(r.observed.counters is not None for r in records)
    ]
    return lacking + [
        f"{what}: observed for {there} of {len(records)} results"
        for what, name in (
            ("context chunks and packs", "counters"),
            ("scheduler chunks", "scheduler_chunks"),
            ("cached tokens", "cached_tokens"),
            ("preemptions", "preemptions"),
            ("that no other request was served", "requests"),
        )
        if (there := sum(getattr(r.observed, name) is not None for r in records)) < len(records)
    ]
