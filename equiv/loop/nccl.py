"""The lane ``nccl``: real ranks on CUDA devices, one each, against the served ones.

With ``--share-gpu``, ranks of a group that the host has too few devices for share them; NCCL takes
each rank for a host of its own then, and connects them by sockets (``kvroute.shared``).

Each size of group that the host has devices for runs known batches at the real head sizes with 12
heads a rank, in both 16-bit dtypes with plain and fp8 caches and with forced fp8 prefill, and then
draws of the lanes ``ragged`` and ``fp8``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from equiv import evidence
from equiv.document import counted
from equiv.loop import campaign, harmless, ranks
from equiv.loop.campaign import Options
from equiv.loop.case import LoopCase
from equiv.loop.rank import Backend

SIZES = (2, 4, 8)
"""Sizes of group; the host's devices decide which of them run."""
HEADS = 12
"""Heads a rank of the known batches, those of the model that the pack was written for."""
DRAWS = {"dev": 8, "gate": 40, "nightly": 400}
"""Cases drawn from each of the lanes ``ragged`` and ``fp8``, for each size of group."""
BACKEND = Backend("nccl", "nccl", cuda=True)
VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {"cache": "fp8", "k_scale": "0.07"},
    {"fp8": 1},
    {"cache": "fp8", "k_scale": "3.7", "fp8": 1, "proj": "fp8"},
)
"""What the known batches vary, beside dtype, page and interleave."""
WAY_OUT = "with --share-gpu ranks share what there is"
LEFT_OUT = "the gather by symmetric memory, which vLLM takes where multicast spans the group"


def devices() -> int:
    """Return how many CUDA devices are visible; CUDA is not started by asking."""
    import torch

    return int(torch.cuda.device_count())


def least_devices(*, share: bool) -> int:
    """Return how many devices the lane needs: one where ranks may share it."""
    return 1 if share else min(SIZES)


def lacking(*, share: bool = False) -> str:
    """Say what the lane needs and this host lacks; empty where it can run."""
    have, need = devices(), least_devices(share=share)
    if have >= need:
        return ""
    way = f"; {WAY_OUT}" if have and not share else ""
    return f"needs {counted(need, 'CUDA device')}, and the host has {counted(have, 'device')}{way}"


def sharing(options: Options) -> list[int]:
    """Return the sizes of group whose ranks share devices; a smaller group has one each."""
    have = devices()
    return [size for size in SIZES if options.share_gpu and 0 < have < size]


def backend(options: Options) -> Backend:
    """Return what brings the rows, with the devices that ranks share, if they do."""
    return replace(BACKEND, shared=devices()) if sharing(options) else BACKEND


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
    """Return the lane's cases for as many devices as there are, or for all sizes where shared."""
    have, shared = devices(), sharing(options)
    lacks = [size for size in SIZES if size > have and size not in shared]
    draws = DRAWS[options.profile.name]
    cases: dict[int, list[LoopCase]] = {}
    counts: dict[int, int] = {}
    least: dict[str, int] = {}
    for size in (size for size in SIZES if size not in lacks):
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
    why = lacking(share=options.share_gpu)
    return ranks.RanksPlan(
        cases=cases,
        drawn=counts,
        least={} if why else least,
        kinds=kinds,
        missing=[why] if why else [],
        left_out=[
            *(
                f"D = {size} on NCCL ranks: the host has {counted(have, 'device')}"
                for size in lacks
            ),
            *(not_alone(size, have) for size in shared),
            LEFT_OUT,
        ],
    )


def not_alone(size: int, gpus: int) -> str:
    """Say what a group that shares GPUs doesn't show."""
    return (
        f"D = {size}, ranks with a device each (NVLink, peer memory): {size} ranks shared "
        f"{counted(gpus, 'GPU')}, connected by sockets"
    )


def lane(
    options: Options, progress: campaign.Progress = campaign.silent
) -> tuple[evidence.Lane, float]:
    """Run the lane ``nccl``; NOT COVERED on a host with too few devices."""
    return ranks.run_lane(backend(options), options, plan(options), progress)
