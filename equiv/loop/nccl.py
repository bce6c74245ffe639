"""The lane ``nccl``: real ranks on CUDA devices, one each, against the served ones.

Each size of group that the host has devices for runs known batches at the real head sizes with 12
heads a rank, in both 16-bit dtypes with plain and fp8 caches and with forced fp8 prefill, and then
draws of the lanes ``ragged`` and ``fp8``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from equiv import evidence
from equiv.loop import campaign, harmless, ranks
from equiv.loop.campaign import Options
from equiv.loop.case import LoopCase

SIZES = (2, 4, 8)
"""Sizes of group; the host's devices decide which of them run."""
HEADS = 12
"""Heads a rank of the known batches, those of the model that the pack was written for."""
DRAWS = {"dev": 8, "gate": 40, "nightly": 400}
"""Cases drawn from each of the lanes ``ragged`` and ``fp8``, for each size of group."""
BACKEND = ranks.Backend("nccl", "nccl", cuda=True)
VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {"cache": "fp8", "k_scale": "0.07"},
    {"fp8": 1},
    {"cache": "fp8", "k_scale": "3.7", "fp8": 1, "proj": "fp8"},
)
"""What the known batches vary, beside dtype, page and interleave."""
LEFT_OUT = "the gather by symmetric memory, which vLLM takes where multicast spans the group"


def devices() -> int:
    """Return how many CUDA devices are visible; CUDA is not started by asking."""
    import torch

    return int(torch.cuda.device_count())


def lacking() -> str:
    """Say what the lane needs and this host lacks; empty where it can run."""
    have = devices()
    if have >= min(SIZES):
        return ""
    return f"needs {min(SIZES)} CUDA devices, and {_have(have)}"


def _have(count: int) -> str:
    return f"the host has {count} device{'' if count == 1 else 's'}"


def known(options: Options, size: int) -> Iterator[LoopCase]:
    """Enumerate batches with a continuation, and with a request without context, at H = 12."""
    layouts = ((16, 1, "bf16"), (64, 16, "fp16"))
    points = itertools.product(layouts, VARIANTS)
    for seed, ((page, interleave, dtype), variant) in enumerate(points, 1):
        alignment = math.lcm(page, size * interleave)
        workspace = alignment * max(1, 192 // alignment)
        yield LoopCase(
            "nccl",
            size,
            0,
            interleave,
            page,
            HEADS,
            workspace,
            ((3, 5 * workspace // 2), (1, 0), (2, 3), (5, 0)),
            dims="real",
            dtype=dtype,
            device=options.device,
            seed=seed,
        ).with_(**variant)


def kinds(case: LoopCase) -> tuple[str, ...]:
    """Name a case by what the lane is for: its group at the real sizes and 12 heads."""
    if case.dims == "real" and case.heads == HEADS:
        return (f"D={case.ranks} at real sizes and H={HEADS}",)
    return ()


def plan(options: Options) -> ranks.RanksPlan:
    """Return the lane's cases for as many devices as there are."""
    have = devices()
    draws = DRAWS[options.profile.name]
    cases: dict[int, list[LoopCase]] = {}
    counts: dict[int, int] = {}
    least: dict[str, int] = {}
    for size in (size for size in SIZES if size <= have):
        enumerated = list(known(options, size))
        drawn = [
            case
            for lane in ("ragged", "fp8")
            for case in harmless.draw(options, draws, ranks=(size,), lane=lane)
        ]
        cases[size], counts[size] = enumerated + drawn, len(drawn)
        least[f"D={size}"] = len(enumerated) + min(draws, 8)
        least[f"D={size} at real sizes and H={HEADS}"] = len(enumerated)
    least |= {f"H={HEADS}": 8, "continuation": 8, "no context": 8}
    least |= {"fp8 cache": 4, "fp8 prefill": 4, "fp8 projection": 2}
    least |= {"dtype=bf16": 4, "dtype=fp16": 4}
    why = lacking()
    return ranks.RanksPlan(
        cases=cases,
        drawn=counts,
        least={} if why else least,
        kinds=kinds,
        missing=[why] if why else [],
        left_out=[
            *(f"D = {size} on NCCL ranks: {_have(have)}" for size in SIZES if size > have),
            LEFT_OUT,
        ],
    )


def lane(
    options: Options, progress: campaign.Progress = campaign.silent
) -> tuple[evidence.Lane, float]:
    """Run the lane ``nccl``; NOT COVERED on a host with fewer devices than its smallest group."""
    return ranks.run_lane(BACKEND, options, plan(options), progress)
