"""The lanes of the loop: what is enumerated, what hypothesis draws, and how much each needs.

Simple values come first everywhere, so that failing cases shrink towards them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from equiv.loop import case as cases
from equiv.loop.case import DTYPES, SCALES, LoopCase

RANKS = (2, 3, 4, 8)
PAGES = (16, 32, 64)
SHAPES = {"small": (1, 2, 3, 12, 16), "real": (1, 2, 12, 16)}
"""Heads a rank that a lane draws, by head sizes."""
SMALL_ROWS = 1024
"""Workspace rows of drawn cases; one alignment more where that alone is larger."""
SIXTEEN_BIT = ("bf16", "fp16")
MOST_CONTEXT = 4096
"""Context tokens of a drawn case."""
MOST_REQUESTS = 6
QUERIES = (1, 2, 3, 7)
"""Query tokens of a drawn request."""

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Plan:
    """One lane's cases.

    Attributes
    ----------
    explicit : enumerated cases.
    drawn : hypothesis's, or ``None``.
    least : cases needed of each kind; below, the lane is NOT COVERED.
    draws : cases drawn, by profile.
    left_out : what the lane doesn't reach.

    """

    lane: str
    explicit: list[LoopCase]
    drawn: st.SearchStrategy[LoopCase] | None
    least: dict[str, int] = field(default_factory=dict)
    draws: dict[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def edges(case: LoopCase) -> list[int]:
    """Return the context lengths at which something changes, smallest first."""
    d, i, page, ws = case.ranks, case.interleave, case.page, case.workspace
    block = page * d
    near = [0, 1, d - 1, d, d + 1, i - 1, i, i + 1, page - 1, page, page + 1]
    near += [block - 1, block, block + 1, ws - 1, ws, ws + 1, 5 * ws // 2]
    return sorted({n for n in near if n >= 0})


def dtypes(base: LoopCase) -> tuple[str, ...]:
    """Return the model dtypes that a lane draws, simplest first.

    A base in float32 says that the pack takes it; fused kernels take 16-bit floats alone.
    """
    return DTYPES if base.dtype == "fp32" else SIXTEEN_BIT


@lru_cache(maxsize=8)
def plans(groups: tuple[int, ...]) -> st.SearchStrategy[tuple[int, int, int, int]]:
    """Return a strategy of ``(ranks, page, interleave, workspace)``, simple ones first."""
    found = []
    for times in range(1, 5):
        for ranks in groups:
            for page in PAGES:
                for interleave in dict.fromkeys((1, 16, page, 2, page // 2)):
                    alignment = math.lcm(page, ranks * interleave)
                    if times == 1 or times * alignment <= SMALL_ROWS:
                        found.append((ranks, page, interleave, times * alignment))
    return st.sampled_from(found)


# Made once: a strategy that is built anew at every draw costs more than the draw.
_RANK = st.integers(0, 23)  # modulo D, for 24 is a multiple of every D
_HEADS = {dims: st.sampled_from(heads) for dims, heads in SHAPES.items()}
_DTYPE: dict[tuple[str, ...], st.SearchStrategy[str]] = {
    names: st.sampled_from(names) for names in (DTYPES, SIXTEEN_BIT)
}
_REQUESTS = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=MOST_REQUESTS)
_SEED = st.integers(0, 2**31 - 1)


@st.composite
def structures(draw: Draw, base: LoopCase, groups: tuple[int, ...] = RANKS) -> LoopCase:
    """Draw ranks, pages, heads and a workspace."""
    ranks, page, interleave, workspace = draw(plans(groups))
    return base.with_(
        ranks=ranks,
        rank=draw(_RANK) % ranks,
        interleave=interleave,
        page=page,
        heads=draw(_HEADS[base.dims]),
        workspace=workspace,
    )


@st.composite
def batches(draw: Draw, case: LoopCase) -> LoopCase:
    """Draw the requests: contexts at edges or anywhere up to 1.5 workspaces, short queries."""
    known = edges(case)
    most = 3 * case.workspace // 2  # the longest edge is 2.5 workspaces
    # One number a request, 0 to 2^16: an edge, a length, or, one time in six, no context.
    drawn = draw(_REQUESTS)
    kept: list[int] = []
    for value in drawn:
        kind, rest = value % 6, value // 6
        context = 0 if kind == 0 else known[rest % len(known)] if kind < 3 else 1 + rest % most  # noqa: PLR2004
        kept.append(context if sum(kept) + context <= MOST_CONTEXT else 0)
    if not any(kept):
        kept[-1] = min(1 + drawn[-1] % most, MOST_CONTEXT)
    seed = draw(_SEED)
    queries = [QUERIES[(seed >> 2 * index) % len(QUERIES)] for index in range(len(kept))]
    return case.with_(requests=tuple(zip(queries, kept, strict=True)), seed=seed)


@st.composite
def ragged(draw: Draw, base: LoopCase, groups: tuple[int, ...] = RANKS) -> LoopCase:
    """Draw a case with a cache in the model's dtype."""
    dtype = draw(_DTYPE[dtypes(base)])
    case = draw(structures(base.with_(dtype=dtype), groups))
    return draw(batches(case))  # type: ignore[no-any-return]


@st.composite
def quantised(draw: Draw, base: LoopCase, groups: tuple[int, ...] = RANKS) -> LoopCase:
    """Draw a case with an fp8 cache or a forced fp8 prefill, or both."""
    cache, fp8 = draw(st.sampled_from([("fp8", 0), ("fp8", 1), ("auto", 1)]))
    dtype = draw(st.sampled_from(SIXTEEN_BIT if fp8 else dtypes(base)))
    scale = draw(st.sampled_from(SCALES)) if cache == "fp8" else "1"
    proj = draw(st.sampled_from(("plain", "fp8"))) if fp8 else "plain"
    case = base.with_(dtype=dtype, cache=cache, fp8=fp8, k_scale=scale, proj=proj)
    return draw(batches(draw(structures(case, groups))))  # type: ignore[no-any-return]


@st.composite
def padded(draw: Draw, base: LoopCase) -> LoopCase:
    """Draw a case whose backend pads its heads; a continuation is declared refused."""
    case = draw(structures(base.with_(pad=draw(st.sampled_from([8, 64])))))
    return draw(batches(case))  # type: ignore[no-any-return]


def edge_cases(base: LoopCase) -> Iterator[LoopCase]:
    """Enumerate every edge as a context of its own, and known batches, for each D and I.

    Two cases more have a workspace, and with it a chunk, as large as vLLM's own.
    """
    seed = 0
    for ranks in RANKS:
        for page, interleave in ((16, 1), (64, 16), (16, 16), (32, 2)):
            alignment = math.lcm(page, ranks * interleave)
            case = base.with_(
                ranks=ranks,
                interleave=interleave,
                page=page,
                workspace=alignment * max(1, 192 // alignment),
                heads=2,
            )
            batches_: list[tuple[tuple[int, int], ...]] = []
            batches_ += [((2, context),) for context in edges(case) if context]
            ws = case.workspace
            batches_ += [
                ((3, 545), (1, 0), (2, 3), (5, 0)),
                ((2, 0), (3, 5), (1, 0)),
                ((2, ws), (3, ws + 1), (1, 1)),
                ((2, 5 * ws // 2), (3, 7), (2, ws // 2)),
            ]
            for requests in batches_:
                seed += 1
                yield case.with_(requests=requests, rank=seed % ranks, seed=seed)
    for ranks in (2, 8):
        seed += 1
        yield base.with_(
            ranks=ranks,
            rank=seed % ranks,
            interleave=1,
            page=64,
            heads=1,
            workspace=cases.VLLM_ROWS,
            requests=((2, cases.VLLM_ROWS + 1), (1, 3)),
            seed=seed,
        )


LANES = cases.LANES
"""All lanes, in the order in which they run; the last three have modules of their own."""
CPU_ONLY = ("gloo", "engine")
"""Lanes that need the CPU's collectives or server; on a GPU real servers take their place."""
CUDA_ONLY = ("nccl",)
"""Lanes that need CUDA devices, one for each of several ranks unless they are to share them."""
APART = CPU_ONLY + CUDA_ONLY
"""Lanes that start processes of their own, and whose findings are repeated by running them."""


def plan(
    lane: str,
    base: LoopCase,
    *,
    dims: str,
    ranks: tuple[int, ...] = RANKS,
) -> Plan:
    """Return a lane's plan.

    Parameters
    ----------
    base : case whose pack, device and seed the lane's cases take.
    dims : head sizes of every lane but ``real``.
    ranks : sizes of the group that ``ragged`` and ``fp8`` draw.

    """
    base = base.with_(lane=lane, dims=dims)
    each = {f"D={d}": 8 for d in RANKS} | {"I=1": 8, "I=page": 8, "I=between": 8}
    ways = {
        "continuation": 16,
        "no context": 16,
        "one chunk, returned as it is": 8,
        "one chunk beside a request without context": 2,
        "several chunks": 16,
        "start inside a page": 4,
        "tail of one and all of the next": 4,
        "ends at its chunk's end": 4,
        "uneven ranks": 16,
    }
    if lane == "edges":
        least = {**each, **ways, "a chunk of vLLM's own size": 2}
        return Plan(lane, list(edge_cases(base)), None, least)
    if lane == "ragged":
        draws = {"dev": 600, "gate": 3_000, "nightly": 60_000}
        return Plan(lane, [], ragged(base, ranks), {**each, **ways}, draws)
    if lane == "fp8":
        least = {"fp8 cache": 20, "fp8 prefill": 20, "fp8 projection": 8, "continuation": 8}
        least |= {f"k_scale={scale}": 5 for scale in SCALES}
        draws = {"dev": 200, "gate": 1_000, "nightly": 20_000}
        left_out = ("caches of the kind fp8_ds_mla, whose gather is a CUDA op of its own",)
        return Plan(lane, [], quantised(base, ranks), least, draws, left_out)
    if lane == "real":
        draws = {"dev": 40, "gate": 200, "nightly": 4_000}
        real = ragged(base.with_(dims="real"))
        least = {"continuation": 4, "no context": 2, "H=12": 2}
        return Plan(lane, [], real, least, draws)
    draws = {"dev": 60, "gate": 200, "nightly": 2_000}
    return Plan(lane, [], padded(base), {"padded heads": 5}, draws)
