"""What each request will cross, from the servers' configuration and the text's length alone.

Row i of a result is the log-probability of token i + 1, computed from the hidden state of position
i. A prompt that is alone in the engine is cut at B, 2B, ..., so the rows from B on have a context
behind them and are exposed to the route; the rows before can't differ by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from kvroute import chunks
from ppl.errors import PplError


class Configuration(BaseModel):
    """What of a server's configuration decides the plan, in vLLM's words.

    Attributes
    ----------
    budget : ``--max-num-batched-tokens``, B.
    page : ``--block-size``.
    ranks, interleave : decode context parallel size, and ``--cp-kv-cache-interleave-size``.
    workspace_rows : a forced workspace; vLLM's own choice where it is None.
    decode_tokens : a last step of at most so many tokens runs as decode, past the route.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int = Field(gt=0)
    page: int = Field(default=16, gt=0)
    ranks: int = Field(default=1, gt=0)
    interleave: int = Field(default=1, gt=0)
    max_model_len: int = Field(gt=0)
    max_num_seqs: int = Field(default=256, gt=0)
    workspace_rows: int | None = Field(default=None, gt=0)
    decode_tokens: int = Field(default=1, ge=0)

    def layout(self) -> chunks.Layout:
        """Return the layout by which contexts are packed."""
        rows = chunks.workspace_rows(
            page=self.page,
            ranks=self.ranks,
            interleave=self.interleave,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            wanted=self.workspace_rows,
        )
        return chunks.Layout(self.page, self.ranks, self.interleave, rows)


class Step(BaseModel):
    """One scheduler chunk; ``context_chunks`` are the tokens of each chunk of its context."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: int
    tokens: int
    context_chunks: tuple[int, ...]
    continuations: int


class Planned(BaseModel):
    """One request.

    Attributes
    ----------
    rows : scored tokens, one fewer than the prompt has.
    exposed_from : first row that the route can touch; ``rows`` where there is none.
    merged_from : first row whose context takes a continuation; ``rows`` where there is none.

    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    tokens: int
    steps: tuple[Step, ...]
    rows: int
    exposed_from: int
    merged_from: int

    @property
    def exposed(self) -> int:
        """Rows that the route can touch."""
        return self.rows - self.exposed_from

    @property
    def continuations(self) -> int:
        """Chunks that are merged into an earlier one, in each layer."""
        return sum(s.continuations for s in self.steps)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Rows with which a scheduler chunk begins, but for the first."""
        return tuple(s.context for s in self.steps[1:])


def request(text: str, tokens: int, configuration: Configuration) -> Planned:
    """Plan one request at concurrency 1.

    Raises
    ------
    PplError : fewer than two tokens, or more than the server takes, or a workspace too small.

    """
    most = configuration.max_model_len - 1
    if not 1 < tokens <= most:
        raise PplError(f"text {text} has {tokens:,} tokens; this server takes 2 to {most:,}")
    layout = configuration.layout()
    steps = []
    exposed = merged = tokens - 1
    for context, new in chunks.steps(tokens, configuration.budget):
        runs = context > 0 and new > configuration.decode_tokens
        try:
            made = chunks.plan([context], layout) if runs else []
        except ValueError as e:
            raise PplError(f"text {text}: {e}") from None
        again = sum(c[0].start > 0 for c in made)
        steps.append(
            Step(
                context=context,
                tokens=new,
                context_chunks=tuple(sum(p.length for p in c) for c in made),
                continuations=again,
            )
        )
        if made:
            exposed = min(exposed, context)
        if again:
            merged = min(merged, context)
    return Planned(
        text=text,
        tokens=tokens,
        steps=tuple(steps),
        rows=tokens - 1,
        exposed_from=exposed,
        merged_from=merged,
    )


class Plan(BaseModel):
    """All requests of a run, and what the set as a whole doesn't reach."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    configuration: Configuration
    requests: tuple[Planned, ...]
    warnings: tuple[str, ...]


def plan(lengths: Mapping[str, int], configuration: Configuration) -> Plan:
    """Plan a set of texts, given the tokens of each.

    Raises
    ------
    PplError : no texts, or one that never reaches the path under test.

    """
    if not lengths:
        raise PplError("no texts: there is nothing to score")
    made = tuple(request(name, n, configuration) for name, n in lengths.items())
    short = [p for p in made if p.exposed == 0]
    if short:
        names = ", ".join(f"{p.text} ({p.tokens:,} tokens)" for p in short)
        raise PplError(
            f"never reaches the path under test: {names}; expected more than "
            f"{configuration.budget + configuration.decode_tokens:,} tokens, or a smaller "
            "--max-num-batched-tokens"
        )
    warnings = []
    if not any(p.continuations for p in made):
        warnings.append(
            "NO CONTINUATION: no context of these texts is split, so the merge of a context's "
            "chunks is not tested; add a longer text or force a smaller workspace"
        )
    return Plan(configuration=configuration, requests=made, warnings=tuple(warnings))
