"""What a case exercises, by its plan: for the lanes' least counts."""

from __future__ import annotations

import itertools
from typing import Any

from equiv.loop import world
from equiv.loop.case import VLLM_ROWS, LoopCase


def planned(case: LoopCase, made: world.World | None) -> list[Any]:
    """Return the rank's context chunks; none where a changed vLLM made no plan."""
    if made is None or len(made.metadata) <= case.rank:
        return []
    context = made.metadata[case.rank].prefill.chunked_context
    return list(getattr(context, "chunks", ()))


def refusal_declared(case: LoopCase, made: world.World) -> bool:
    """Whether vLLM is known to refuse the case: padded heads on one side of a merge."""
    return bool(case.pad) and any(chunk.is_continuation for chunk in planned(case, made))


def kinds_of(case: LoopCase, made: world.World) -> tuple[str, ...]:
    """Name what a case exercises."""
    context = made.metadata[case.rank].prefill.chunked_context
    chunks = context.chunks
    found = {
        f"D={case.ranks}",
        f"H={case.heads}",
        f"dtype={case.dtype}",
        "I=1"
        if case.interleave == 1
        else "I=page"
        if case.interleave == case.page
        else "I=between",
    }
    starts = [start for chunk in chunks for start in chunk.local_starts]
    continuing = [chunk for chunk in chunks if chunk.is_continuation]
    several = len(chunks) > 1
    for name, holds in (
        ("continuation", bool(continuing)),
        ("no context", bool(context.empty_token_slices)),
        ("one chunk, returned as it is", not several and not context.empty_token_slices),
        ("one chunk beside a request without context", not several and context.empty_token_slices),
        ("several chunks", several),
        (
            "a chunk of vLLM's own size",
            any(chunk.num_context_tokens == VLLM_ROWS for chunk in chunks),
        ),
        ("start inside a page", any(start % case.page for start in starts)),
        ("tail of one and all of the next", any(_whole_next(case, c) for c in continuing)),
        ("ends at its chunk's end", _ends_at_chunk(chunks)),
        ("fp8 cache", case.cache == "fp8"),
        ("fp8 prefill", bool(case.fp8)),
        ("fp8 projection", case.proj == "fp8" and bool(case.fp8)),
        (f"k_scale={case.k_scale}", case.cache == "fp8"),
        ("uneven ranks", any(c % (case.ranks * case.interleave) for c in case.contexts)),
        ("padded heads", refusal_declared(case, made)),
    ):
        if holds:
            found.add(name)
    return tuple(sorted(found))


def _whole_next(case: LoopCase, chunk: Any) -> bool:
    if chunk.num_requests < 2:  # noqa: PLR2004
        return False
    second = chunk.request_slice.start + 1
    return bool(int(chunk.seq_lens[1]) == case.contexts[second])


def _ends_at_chunk(chunks: list[Any]) -> bool:
    return any(
        a.request_slice.stop == b.request_slice.start and not b.is_continuation
        for a, b in itertools.pairwise(chunks)
    )
