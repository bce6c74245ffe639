"""What a terminal shows of a comparison, as blocks that are Markdown as well."""

from __future__ import annotations

import math

from equiv.document import Block, Facts, Heading, Items, Table
from ppl.evidence import PplEvidence, Statistics


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def blocks(made: PplEvidence) -> list[Block]:
    """Return the report: verdict, figures, texts, and what wasn't covered."""
    found: list[Block] = [
        Heading("bytegate ppl", 1, made.verdict),
        Items(made.decided.reasons),
        Facts(tuple(_facts(made))),
    ]
    if made.texts:
        found.append(_texts(made))
    if made.warnings or made.not_covered:
        found += [
            Heading("Warnings, and what was not covered"),
            Items((*made.warnings, *(f"NOT COVERED: {x}" for x in made.not_covered))),
        ]
    return found


def _facts(made: PplEvidence) -> list[tuple[str, str | tuple[str]]]:
    facts: list[tuple[str, str | tuple[str]]] = [
        ("claim", f"{made.claim}, exit code {made.exit_code}"),
        ("runs", ", ".join(f"{a} {launch}.{repeat}" for a, launch, repeat in made.runs)),
    ]
    if made.identity is not None:
        i = made.identity
        facts += [
            ("bit-identical texts", f"{i.identical_texts:,} of {i.texts:,}"),
            ("bit-identical tokens", f"{i.identical_tokens:,} of {i.tokens:,}"),
            ("exposed tokens", f"{i.exposed_tokens:,}"),
        ]
        if i.largest is not None:
            place = i.largest
            where = (
                f"{place.d_nats:.3g} nats at {place.text} row {place.row:,}, "
                f"{place.rows_to_chunk_cut} rows from a chunk cut"
            )
            facts.append(("largest difference", where))
            facts.append(("ULPs apart", ", ".join(f"{k}: {n:,}" for k, n in i.ulp.items())))
    if made.pooled_perplexity:
        p = made.pooled_perplexity
        facts.append(("perplexity", f"stock {p['stock']:.6f}, fused {p['fused']:.6f}"))
    if made.statistics is not None:
        facts += _statistics(made.statistics, stated=made.margin_stated)
    return facts


def _statistics(s: Statistics, *, stated: bool) -> list[tuple[str, str | tuple[str]]]:
    e = s.exposed
    origin = "stated" if stated else "default"
    facts: list[tuple[str, str | tuple[str]]] = [
        ("margin", f"{e.margin:.3g} nats ({origin}), {s.margin_percent:.3g} % of perplexity"),
        ("mean exposed difference", f"{e.mean:.3g} nats, 90 % [{e.low:.3g}, {e.high:.3g}]"),
        ("equivalence", f"p {e.p:.3g} over {e.texts} texts; sign flips p {s.p_zero:.3g}"),
        ("detectable shift", f"{_nats(s.detectable_nats)} nats"),
    ]
    if s.contrast is not None:
        facts.append(("exposed minus unexposed", f"{s.contrast.mean:.3g} nats"))
    if s.bootstrap_95 is not None:
        low, high = s.bootstrap_95
        facts.append(("bootstrap over texts", f"[{low:.3g}, {high:.3g}] nats"))
    if s.noise is not None:
        n = s.noise
        text = (
            f"at most {max(n.within):.3g}, at least {min(n.across):.3g} nats a token; "
            f"p {n.p:.2g}, never below {n.least_p:.2g} with these launches"
        )
        facts.append(("A/A and A/B distances", text))
    if s.token_rate_bound is not None and s.text_rate_bound is not None:
        text = (
            f"below {s.token_rate_bound:.2g} of exposed tokens, as if independent; below "
            f"{s.text_rate_bound:.2g} of texts; one wrong row in 10^6 takes "
            f"{s.tokens_to_see_one_in_a_million:,} exposed tokens to see"
        )
        facts.append(("rates not excluded", text))
    return facts


def _texts(made: PplEvidence) -> Table:
    columns = ("text", "identical", "rows", "exposed", "differing", "mean nats", "stock", "fused")
    rows = tuple(
        (
            t.text,
            "yes" if t.bit_identical else "no",
            f"{t.rows:,}",
            f"{t.exposed.tokens:,}",
            f"{t.differing:,}",
            _nats(t.exposed.mean_nats),
            f"{math.exp(t.stock_nll_nats):.4f}",
            f"{math.exp(t.fused_nll_nats):.4f}",
        )
        for t in made.texts
    )
    return Table(columns, rows, columns[2:])
