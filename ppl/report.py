"""What a comparison says in words and tables, for a terminal, for Markdown and for the page."""

from __future__ import annotations

import math

from equiv.document import Block, Exact, Facts, Heading, Items, Line, Table, counted
from ppl import report_run
from ppl.evidence import PplEvidence, Statistics, TextResult
from ppl.runs import KINDS, kind, name
from ppl.stats import Tost

Fact = tuple[str, str | tuple[str]]
Titled = tuple[str, Table]


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def blocks(made: PplEvidence, command: str = "") -> list[Block]:
    """Return the report: verdict, what was not covered, figures, tables, and how to repeat it."""
    found: list[Block] = [
        Heading("bytegate ppl", 1, made.verdict),
        Items(made.decided.reasons),
    ]
    if made.warnings or made.not_covered:
        found += [
            Heading("Warnings, and what was not covered"),
            Items((*made.warnings, *(f"NOT COVERED: {x}" for x in made.not_covered))),
        ]
    found += [Heading("Figures"), Facts(tuple(facts(made)))]
    for title, table in (*strata(made), *tables(made)):
        found += [Heading(title), table]
    if command:
        found += [Heading("Repeat it"), Exact((command,))]
    if made.texts:
        found.append(Line("Charts are in ppl.html, and every token in tokens.parquet."))
    return found


# -- figures --------------------------------------------------------------------------


def facts(made: PplEvidence) -> list[Fact]:
    """Return every figure that isn't in a table, with its label."""
    found: list[Fact] = [("claim", f"{made.claim}, exit code {made.exit_code}")]
    if made.subject is not None:
        s = made.subject
        found.append(("model", s.model))
        found += [("arguments", (" ".join(s.arguments),))] if s.arguments else []
        found.append(("routes", ", ".join(f"{a}: {' '.join(r)}" for a, r in s.routes.items())))
        if s.versions:
            found.append(("versions", ", ".join(f"{k} {v}" for k, v in s.versions.items())))
    found.append(("runs", ", ".join(name(r) for r in made.runs)))
    if made.identity is not None:
        i = made.identity
        found += [
            ("bit-identical texts", f"{i.identical_texts:,} of {i.texts:,}"),
            ("bit-identical tokens", f"{i.identical_tokens:,} of {i.tokens:,}"),
            ("exposed tokens", f"{i.exposed_tokens:,}"),
        ]
        if i.largest is not None:
            found.append(("largest difference", _place(made)))
            found.append(("ULPs apart", ", ".join(f"{k}: {n:,}" for k, n in i.ulp.items())))
    if made.pooled_perplexity:
        p = made.pooled_perplexity
        found.append(("perplexity", f"stock {p['stock']:.6f}, fused {p['fused']:.6f}"))
    if made.top1:
        found.append(("top-1 agreement", _agreement(made)))
    if made.statistics is not None:
        found += _statistics(made.statistics, stated=made.margin_stated)
    if made.run is not None:
        found += report_run.facts(made.run)
    return found


def _agreement(made: PplEvidence) -> str:
    rows, exposed = (sum(getattr(t, n) for t in made.top1) for n in ("rows", "exposed_rows"))
    same, of = (sum(getattr(t, n) for t in made.top1) for n in ("agreeing", "exposed_agreeing"))
    margins = [t.largest_margin_nats for t in made.top1 if t.largest_margin_nats is not None]
    flips = f"; the clearest flip by {max(margins):.3g} nats" if margins else ""
    later = sum(t.later_flips for t in made.top1)
    flips += f"; {later:,} rows flip in later fused runs" if later else ""
    return f"{same:,} of {rows:,} rows, {of:,} of {exposed:,} exposed{flips}"


def _place(made: PplEvidence) -> str:
    place = made.identity.largest if made.identity is not None else None
    if place is None:
        return "none"
    far = place.rows_to_chunk_cut
    near = "no chunk cut" if far is None else f"{counted(far, 'row')} from a chunk cut"
    where = "exposed" if place.exposed else "not exposed"
    return f"{place.d_nats:.3g} nats at {place.text} row {place.row:,}, {where}, {near}"


def _statistics(s: Statistics, *, stated: bool) -> list[Fact]:
    e = s.exposed
    origin = "stated" if stated else "default"
    found: list[Fact] = [
        ("margin", f"{e.margin:.3g} nats ({origin}), {s.margin_percent:.3g} % of perplexity"),
        ("mean exposed difference", f"{e.mean:.3g} nats, 90 % [{e.low:.3g}, {e.high:.3g}]"),
        (
            "equivalence",
            f"p {e.p:.3g} over {counted(e.texts, 'text')}; sign flips p {s.p_zero:.3g}",
        ),
        ("detectable shift", _detectable(s)),
    ]
    if e.launches is not None and e.texts > 1:
        parts = f"texts alone ±{e.half_of_texts:.3g}, launches alone ±{e.half_of_launches:.3g} nats"
        found.append(("the interval's parts", parts))
    if s.contrast is not None:
        c = s.contrast
        found.append(("exposed minus unexposed", f"{c.mean:.3g} nats, {_interval(c)}"))
        holm = ", ".join(f"{k} {v:.3g}" for k, v in s.p_zero_holm.items())
        found.append(("no shift, by Holm", f"p {holm}"))
    if s.bootstrap_95 is not None:
        low, high = s.bootstrap_95
        found.append(("bootstrap over texts", f"[{low:.3g}, {high:.3g}] nats, nominal 95 %"))
    if s.leave_one_out:
        low, high = (
            min(t[1] for t in s.leave_one_out.values()),
            max(t[2] for t in s.leave_one_out.values()),
        )
        found.append(
            ("without any one text", f"90 % intervals within [{low:.3g}, {high:.3g}] nats")
        )
    if s.noise is not None:
        n = s.noise
        text = (
            f"A/A at most {max(n.within):.3g}, A/B at least {min(n.across):.3g} nats a token; "
            f"p {n.p:.2g}, never below {n.least_p:.2g} with these launches"
        )
        found.append(("noise floor", text))
    if s.between_launch_error_nats is not None:
        error, degrees = s.between_launch_error_nats
        found.append(
            ("error between launches", f"{error:.3g} nats, {counted(degrees, 'degree')} of freedom")
        )
    if s.token_rate_bound is not None and s.text_rate_bound is not None:
        text = (
            f"below {s.token_rate_bound:.2g} of exposed tokens, as if independent; below "
            f"{s.text_rate_bound:.2g} of texts; one wrong row in 10^6 takes "
            f"{s.tokens_to_see_one_in_a_million:,} exposed tokens to see"
        )
        found.append(("rates not excluded", text))
    return found


def _interval(t: Tost) -> str:
    if not math.isfinite(t.low):
        return "no interval of one text"
    return f"90 % [{t.low:.3g}, {t.high:.3g}]"


def _detectable(s: Statistics) -> str:
    if not s.detectable_nats:
        texts = "one text has no spread" if s.detectable_nats is None else "no spread between texts"
        return f"not defined: {texts}"
    return f"{s.detectable_nats:.3g} nats at 80 % power, two-sided 5 %"


def tiles(made: PplEvidence) -> list[tuple[str, str, str]]:
    """Return what a reviewer asks first: label, figure, what it means."""
    found = []
    if made.identity is not None:
        i = made.identity
        texts = f"{i.identical_texts:,} of {i.texts:,} texts in every run"
        found.append(("bit-identical tokens", f"{i.identical_tokens:,} of {i.tokens:,}", texts))
        found.append(("exposed tokens", f"{i.exposed_tokens:,}", "that the route can touch"))
        if i.largest is not None:
            figure, _, where = _place(made).partition(" at ")
            found.append(("largest difference", figure, f"at {where}"))
    s = made.statistics
    if s is None:
        return found
    e = s.exposed
    found.append(("mean exposed difference", f"{e.mean:.3g} nats", _interval(e)))
    origin = "stated beforehand" if made.margin_stated else "by default"
    found.append(
        ("margin", f"±{e.margin:.3g} nats", f"{s.margin_percent:.3g} % of perplexity, {origin}")
    )
    if s.noise is None:
        found.append(("noise floor", "not measured", "no server was launched again"))
    else:
        n = s.noise
        told = "told apart" if n.distinguishable else "not told apart"
        found.append(
            (
                "noise floor, A/A between launches",
                f"{max(n.within):.3g} nats",
                f"a token; A/B from {min(n.across):.3g}: {told}, p {n.p:.2g}",
            )
        )
    shift, _, why = _detectable(s).partition(": " if not s.detectable_nats else " at ")
    found.append(("minimum detectable shift", shift, why))
    if s.token_rate_bound is not None and s.text_rate_bound is not None:
        rate = f"{s.token_rate_bound:.2g} of tokens"
        small = f"as if independent; {s.text_rate_bound:.2g} of texts; 95 % bounds"
        found.append(("differences not excluded", rate, small))
    if made.pooled_perplexity:
        p = made.pooled_perplexity
        found.append(("perplexity", f"{p['fused']:.6f}", f"stock {p['stock']:.6f}, pooled"))
    return found


# -- tables ---------------------------------------------------------------------------


def strata(made: PplEvidence) -> list[Titled]:
    """Return exposed and unexposed tokens side by side."""
    if not made.texts:
        return []
    rows = []
    for label, mine in (
        ("exposed to the route", [t.exposed for t in made.texts]),
        ("not exposed: a control", [t.unexposed for t in made.texts]),
    ):
        tokens = sum(s.tokens for s in mine)
        differing = sum(s.differing for s in mine)
        means = [s.mean_nats for s in mine if s.mean_nats is not None]
        sizes = [s.mean_abs_nats for s in mine if s.mean_abs_nats is not None]
        rows.append(
            (
                label,
                f"{tokens:,}",
                f"{differing:,}",
                f"{differing / tokens:.3%}" if tokens else "-",
                _nats(_mean(means)),
                _nats(_mean(sizes)),
            )
        )
    columns = ("stratum", "tokens", "differing", "share", "mean nats", "mean |d| nats")
    return [("Strata, by the first run of each arm", Table(columns, tuple(rows), columns[1:]))]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def tables(made: PplEvidence) -> list[Titled]:
    """Return the tables: texts, noise by pair of runs, arg-maxes, and the run's own."""
    of_run = report_run.tables(made.run) if made.run is not None else []
    if not made.texts:
        return of_run
    found = [("Texts", _texts(made)), ("Pairs of runs", _pairs(made))]
    if made.top1:
        found.append(("Top-1 agreement", _top1(made)))
        flips = _flips(made)
        if flips.rows:
            found.append(("Flips with the largest margins", flips))
    return [*found, *of_run]


def _pairs(made: PplEvidence) -> Table:
    sums: dict[tuple[int, int], list[float]] = {}
    for text in made.texts:
        for i, j, distance in text.run_distances:
            sums.setdefault((i, j), []).append(distance)
    rows = []
    for pair, distances in sums.items():
        one, other = (made.runs[k] for k in pair)
        rows.append(
            (
                kind(one, other),
                f"{name(one)}, {name(other)}",
                _nats(_mean(distances)),
                _nats(max(distances)),
            )
        )
    rows.sort(key=lambda r: KINDS.index(r[0]))
    columns = ("kind", "runs", "mean exposed |d| nats", "largest text")
    return Table(columns, tuple(rows), columns[2:])


def _texts(made: PplEvidence) -> Table:
    columns = (
        *("text", "identical", "rows", "exposed", "differing", "mean nats"),
        *("over launches", "range", "stock ppl", "fused ppl"),
    )
    return Table(columns, tuple(_text(t) for t in made.texts), columns[2:])


def _text(t: TextResult) -> tuple[str, ...]:
    spread = t.difference_nats
    return (
        t.text,
        "yes" if t.bit_identical else "no",
        f"{t.rows:,}",
        f"{t.exposed.tokens:,}",
        f"{t.differing:,}",
        _nats(t.exposed.mean_nats),
        "-" if spread is None else _nats(spread[0]),
        "-" if spread is None else f"{spread[1]:.2g} to {spread[2]:.2g}",
        f"{t.stock_perplexity:.4f}",
        f"{t.fused_perplexity:.4f}",
    )


def _top1(made: PplEvidence) -> Table:
    columns = ("text", "rows", "agree", "exposed", "exposed agree", "A/A agree", "largest margin")
    rows = tuple(
        (
            t.text,
            f"{t.rows:,}",
            f"{t.agreeing / t.rows:.4%}",
            f"{t.exposed_rows:,}",
            f"{t.exposed_agreeing / t.exposed_rows:.4%}" if t.exposed_rows else "-",
            "-" if t.noise_agreeing is None else f"{t.noise_agreeing / t.rows:.4%}",
            _nats(t.largest_margin_nats),
        )
        for t in made.top1
    )
    return Table(columns, rows, columns[1:])


FLIPS = 20


def _flips(made: PplEvidence) -> Table:
    every = [(t.text, f) for t in made.top1 for f in t.flips]
    every.sort(key=lambda pair: -(pair[1].stock_margin_nats or 0.0))
    columns = ("text", "row", "exposed", "stock id", "fused id", "stock margin", "fused margin")
    rows = tuple(
        (
            text,
            f"{f.row:,}",
            "yes" if f.exposed else "no",
            str(f.stock_id),
            str(f.fused_id),
            _nats(f.stock_margin_nats),
            _nats(f.fused_margin_nats),
        )
        for text, f in every[:FLIPS]
    )
    return Table(columns, rows, ("row", *columns[3:]))
