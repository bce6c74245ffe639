"""How many context chunks a request crosses: vLLM's rules, in plain integers.

Source: vLLM 0.33.0, ``MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size``,
``align_mla_chunked_context_workspace_size``, ``plan_mla_context_chunks`` and
``build_mla_chunked_context_metadata``. Tests compare every function here with vLLM's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_ROWS = 65536
"""vLLM's cap on its own choice of workspace, before alignment."""


@dataclass(frozen=True)
class Layout:
    """What decides the plan.

    Attributes
    ----------
    page : tokens of a cache page (``block_size``).
    ranks, interleave : D and I of decode context parallelism; 1 and 1 without.
    workspace : rows of the workspace, aligned; ``rows / ranks`` of them hold a rank's share.

    """

    page: int
    ranks: int
    interleave: int
    workspace: int

    @property
    def split(self) -> int:
        """Tokens by which a split request advances: ``lcm(page, D * I)`` under DCP."""
        if self.ranks == 1:
            return self.page
        return math.lcm(self.page, self.ranks * self.interleave)

    def padded(self, tokens: int) -> int:
        """Rows that a rank needs for the first ``tokens`` of a context."""
        if self.ranks == 1:
            return tokens
        return -(-tokens // (self.ranks * self.interleave)) * self.interleave


@dataclass(frozen=True)
class Piece:
    """A part of one request's context in a chunk: request, first token, tokens."""

    request: int
    start: int
    length: int


def workspace_rows(
    *,
    page: int,
    ranks: int,
    interleave: int,
    max_model_len: int,
    max_num_seqs: int,
    wanted: int | None = None,
) -> int:
    """Return the workspace's rows: vLLM's choice, or ``wanted`` ones aligned as vLLM does."""
    rows = wanted
    if rows is None:
        rows = min(max(8 * max_model_len, 4 * max_num_seqs * page), MOST_ROWS)
    unit = page if ranks == 1 else math.lcm(page, ranks * interleave)
    return -(-max(rows, unit) // unit) * unit


def plan(contexts: Sequence[int], layout: Layout) -> list[list[Piece]]:
    """Pack the contexts of one batch into chunks, in batch order.

    Requests without context are skipped. A chunk whose first piece starts above 0 is a
    continuation; every other piece starts at 0.

    Raises
    ------
    ValueError
        When the workspace can't hold one aligned piece.

    """
    budget = layout.workspace // layout.ranks
    most = layout.workspace // layout.split * layout.split
    if most == 0 or layout.padded(layout.split) > budget:
        raise ValueError(f"workspace of {layout.workspace} rows holds no piece of {layout.split}")
    chunks: list[list[Piece]] = []
    current: list[Piece] = []
    used = 0

    def close() -> None:
        nonlocal current, used
        if current:
            chunks.append(current)
        current, used = [], 0

    for request, context in enumerate(contexts):
        if context == 0:
            close()
            continue
        start = 0
        while start < context:
            left = context - start
            rows = layout.padded(context) - layout.padded(start)
            if used + rows <= budget:
                current.append(Piece(request, start, left))
                used += rows
                break
            length = _split(layout, start, left, budget - used, most)
            if length:
                current.append(Piece(request, start, length))
                start += length
            close()
    close()
    return chunks


def _split(layout: Layout, start: int, left: int, available: int, most: int) -> int:
    """Return the longest aligned piece that fits into ``available`` rows; it leaves some over."""
    length = min(most, (left - 1) // layout.split * layout.split)
    while length and layout.padded(start + length) - layout.padded(start) > available:
        length -= layout.split
    return length


def steps(tokens: int, budget: int) -> list[tuple[int, int]]:
    """Cut a prompt that is alone in the engine: ``(context, new tokens)`` of each step."""
    return [(at, min(budget, tokens - at)) for at in range(0, tokens, budget)]


@dataclass(frozen=True)
class Predicted:
    """What one rank must count for a prompt that is alone in the engine.

    Attributes
    ----------
    calls, chunks, continuations, context_tokens : as in ``kvroute.tally``, all layers together.
    exposed : first position whose hidden state has a context behind it; tokens after it are
        exposed targets.
    first_merged : first position whose context takes a continuation, or ``None``.

    """

    calls: int
    chunks: int
    continuations: int
    context_tokens: int
    exposed: int
    first_merged: int | None


def predict(tokens: int, budget: int, layout: Layout, layers: int, decode: int = 1) -> Predicted:
    """Predict a rank's counts for a prompt of ``tokens`` at ``--max-num-batched-tokens budget``.

    A last step of at most ``decode`` tokens runs as decode and never reaches the loop.
    """
    calls = chunks = continuations = context_tokens = 0
    merged: int | None = None
    for context, new in steps(tokens, budget):
        if context == 0 or new <= decode:
            continue
        made = plan([context], layout)
        again = sum(piece[0].start > 0 for piece in made)
        if again and merged is None:
            merged = context
        calls += 1
        chunks += len(made)
        continuations += again
        context_tokens += context
    return Predicted(
        calls * layers,
        chunks * layers,
        continuations * layers,
        context_tokens * layers,
        min(budget, tokens),
        merged,
    )
