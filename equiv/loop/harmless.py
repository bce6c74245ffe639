"""Changes that must not be flagged: each returns how many cases ran, and what was flagged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random

from hypothesis import find
from hypothesis.errors import NoSuchExample

from equiv.loop import lanes, world
from equiv.loop.campaign import Options
from equiv.loop.case import LoopCase
from equiv.loop.run import run
from equiv.profiles import settings_of

CASES = 100
"""Cases of each change."""

Outcome = tuple[int, list[tuple[str, str]]]
"""Cases run, and kind and case of each that was flagged."""


def same_permutation(options: Options) -> Outcome:
    """Ranks taken in reverse order, in kv_c and in k_pe alike: attention has no order.

    Results move by rounding, so both routes move together and stay inside the bound.
    """
    from kvroute.faults.edit import Edit

    undo = Edit(
        "H1",
        "vllm.model_executor.layers.attention.mla_attention",
        "reorg_kvcache",
        "in enumerate(local_context_lens):",
        "in reversed(list(enumerate(local_context_lens))):",
    ).plant()
    try:
        return _all_pass(options, lambda case: [case])
    finally:
        undo()


def garbage_padding(options: Options) -> Outcome:
    """Large finite numbers instead of NaN in every row that must not be read."""
    kept = world.POISON
    world.POISON = (3.0e4, 0x7E)
    try:
        return _all_pass(options, lambda case: [case])
    finally:
        world.POISON = kept


def another_budget(options: Options) -> Outcome:
    """Cut the same batch into the smallest chunks, and into one twice as large."""

    def budgets(case: LoopCase) -> list[LoopCase]:
        return [
            case.with_(workspace=case.alignment),
            case.with_(workspace=2 * case.workspace),
        ]

    return _all_pass(options, budgets)


def started_again(options: Options) -> Outcome:
    """Run every case twice: the model is deterministic, so are the bytes."""
    cases = draw(options)
    problems = []
    for case in cases:
        first, second = run(case, options.pack), run(case, options.pack)
        if first.output_hash != second.output_hash or first.failed:
            problems.append((first.status, str(case)))
    return len(cases), problems


CHANGES: dict[str, Callable[[Options], Outcome]] = {
    "same permutation of kv_c and k_pe": same_permutation,
    "garbage in padding rows": garbage_padding,
    "another chunk budget": another_budget,
    "the same arm again": started_again,
}
"""The changes that the catalogue says must not be flagged."""


def draw(
    options: Options,
    count: int = CASES,
    ranks: tuple[int, ...] = lanes.RANKS,
    lane: str = "ragged",
) -> list[LoopCase]:
    """Return drawn cases of the lane ``ragged`` or ``fp8``."""
    dtype = "fp32" if options.any_dims else "bf16"
    base = LoopCase(lane, 2, 0, 1, 16, 1, 32, ((1, 1),), dtype=dtype, device=options.device)
    dims = "small" if options.any_dims else "real"
    plan = lanes.plan(lane, base, dims=dims, ranks=ranks)
    found: list[LoopCase] = []

    def see(case: LoopCase) -> bool:
        found.append(case)
        return False

    with contextlib.suppress(NoSuchExample):
        find(
            plan.drawn,  # type: ignore[arg-type]
            see,
            settings=settings_of(options.profile, count),
            random=Random(options.seed + 1),
        )
    return found[:count]


def _all_pass(options: Options, change: Callable[[LoopCase], list[LoopCase]]) -> Outcome:
    problems, count = [], 0
    for case in draw(options):
        for changed in change(case):
            count += 1
            result = run(changed, options.pack)
            if result.failed:
                problems.append((result.status, str(changed)))
    return count, problems
