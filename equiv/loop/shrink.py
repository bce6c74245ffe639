"""Make a failing case small, one plain step at a time: fewer requests, shorter, fewer ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from equiv.errors import UsageError
from equiv.loop.case import LoopCase, check


def smallest(
    case: LoopCase,
    fails: Callable[[LoopCase], bool],
    seconds: float,
    *,
    any_dims: bool = True,
) -> LoopCase:
    """Return a failing case from which no single step leads to a smaller failing one.

    Parameters
    ----------
    fails : whether a case fails in the same way.
    seconds : after so many, the smallest one so far is returned.
    any_dims : whether the pack takes small heads and float32; one that doesn't would fail there
        whatever it does elsewhere, and nobody claimed otherwise.

    """
    end = time.monotonic() + seconds
    best, again = case, True
    while again and time.monotonic() < end:
        again = False
        for trial in steps(best):
            if time.monotonic() > end:
                break
            claimed = any_dims or (trial.dims == "real" and trial.dtype != "fp32")
            if weight(trial) < weight(best) and claimed and possible(trial) and fails(trial):
                best, again = trial, True
                break
    return best


def weight(case: LoopCase) -> tuple[int, ...]:
    """Order cases: plan, then batch, then the rest."""
    plain = (
        case.dtype != "fp32",
        case.cache != "auto",
        case.fp8 != 0,
        case.k_scale != "1",
        case.proj != "plain",
    )
    return (
        len(case.requests),
        case.workspace,
        sum(case.contexts),
        case.ranks,
        case.heads,
        sum(query for query, _ in case.requests),
        case.interleave,
        case.page,
        case.rank,
        case.pad,
        sum(plain),
        int(case.dims != "small"),
        case.seed,
    )


def possible(case: LoopCase) -> bool:
    """Whether the values go together."""
    try:
        check(case)
    except UsageError:
        return False
    return True


def steps(case: LoopCase) -> Iterator[LoopCase]:
    """Yield cases one step smaller, the largest steps first."""
    for index in range(len(case.requests)):
        if len(case.requests) > 1:
            yield case.with_(requests=case.requests[:index] + case.requests[index + 1 :])
    for ranks, page, interleave in (
        (2, 16, 1),
        (2, 16, case.interleave),
        (2, case.page, case.interleave),
        (3, case.page, case.interleave),
        (case.ranks, 16, min(case.interleave, 16)),
        (case.ranks, case.page, 1),
    ):
        moved = case.with_(ranks=ranks, page=page, interleave=interleave)
        if moved.page % moved.interleave == 0:
            rank = min(case.rank, ranks - 1)
            yield moved.with_(rank=rank, workspace=moved.alignment)
            rows = -(-case.workspace // moved.alignment) * moved.alignment
            yield moved.with_(rank=rank, workspace=rows)
    yield case.with_(workspace=case.alignment)
    yield case.with_(workspace=max(case.alignment, case.workspace - case.alignment))
    for index, (query, context) in enumerate(case.requests):
        fewer = (0, 1, context // 2, context - case.page, context - case.ranks, context - 1)
        smaller = [(query, value) for value in fewer if 0 <= value < context]
        for value in [*smaller, *([(1, context)] if query > 1 else [])]:
            requests = (*case.requests[:index], value, *case.requests[index + 1 :])
            yield case.with_(requests=requests)
    for change in (
        {"heads": 1},
        {"rank": 0},
        {"dtype": "fp32"},
        {"dtype": "bf16"},
        {"k_scale": "1"},
        {"cache": "auto", "k_scale": "1"},
        {"fp8": 0, "proj": "plain"},
        {"proj": "plain"},
        {"dims": "small"},
        {"pad": 8 if case.pad else 0},
        {"seed": 0},
    ):
        yield case.with_(**change)
