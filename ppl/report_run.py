"""What a report says of the run itself: servers, launches, texts, time, the burst."""

from __future__ import annotations

import math

from equiv.document import Table, counted
from ppl import emulation, sharing
from ppl.facts import EMULATED_BY, Burst, RunFacts

Fact = tuple[str, str | tuple[str]]
Titled = tuple[str, Table]


def facts(run: RunFacts) -> list[Fact]:
    """Return how the scores were made."""
    found: list[Fact] = []
    if run.method:
        found.append(("scores by", run.method))
    if run.tokenizer:
        found.append(("token ids from", run.tokenizer))
    if run.emulates_fp8:
        found.append(("fp8 prefill", f"{emulation.MARK}: {_backends(run)}"))
    if run.shares_gpu:
        found.append(("GPUs", sharing.line(s.facts for s in run.servers)))
    if run.order:
        found.append(("order", run.order))
    if run.configuration is not None:
        c = run.configuration
        layout = f"pages of {c.page}, {counted(c.ranks, 'rank')}, interleave {c.interleave}"
        found.append(("scheduler", f"{c.budget:,} tokens a chunk, {layout}"))
    tokens = sum(t.scored_tokens for t in run.timing)
    requests_s = math.fsum(t.requests_s for t in run.timing)
    wall_s = math.fsum(t.wall_s for t in run.timing)
    if tokens and requests_s > 0 and wall_s > 0:
        between = max(0.0, 1 - requests_s / wall_s)
        speed = f"{tokens / requests_s:,.0f} tokens/s of the servers"
        sessions = counted(len(run.timing), "session")
        found.append(("speed", f"{speed}, {between:.1%} of {sessions} between requests"))
    if run.retries:
        found.append(("sent again", ", ".join(f"{what}: {n}" for what, n in run.retries.items())))
    if run.burst is not None:
        found.append(("all texts at once", _burst(run.burst)))
    return found


def _backends(run: RunFacts) -> str:
    names = sorted({str(s.facts.get(EMULATED_BY)) for s in run.servers})
    return f"attention in the model's dtype, by {', '.join(names) or 'no server that was seen'}"


def _burst(burst: Burst) -> str:
    launches = "1 launch" if burst.launches == 1 else f"{burst.launches} launches"
    words = (
        f"{burst.word}, {burst.identical_texts} of {counted(burst.texts, 'text')} bit-identical "
        f"over {launches} of {counted(burst.bursts, 'burst')}"
    )
    if burst.mean_nats is not None and burst.interval_nats is not None:
        low, high = burst.interval_nats
        words += f", mean {burst.mean_nats:.3g} nats, 90 % [{low:.3g}, {high:.3g}]"
    if burst.margin_nats is not None:
        words += f", margin {burst.margin_nats:.3g}"
    if burst.within_nats is not None and burst.across_nats is not None:
        pairs = (("A/A", burst.within_nats), ("A/B", burst.across_nats))
        words += "; mean |d| of two bursts, " + ", ".join(
            f"{what} {low:.3g} to {high:.3g}" for what, (low, high) in pairs
        )
    return words


def tables(run: RunFacts) -> list[Titled]:
    """Return servers, launches and texts."""
    found = []
    if run.servers:
        found.append(("Servers", _servers(run)))
    if run.instances:
        found.append(("Launches", _launches(run)))
    if run.texts:
        found.append(("Where the texts are from", _texts(run)))
    return found


def _servers(run: RunFacts) -> Table:
    untouched = {True: "yes", False: "NO", None: "not seen"}
    rows = tuple(
        (
            s.arm,
            "launched here" if s.launched else s.url,
            s.route or "not seen",
            s.channel or "none",
            ", ".join(f"{k} {v}" for k, v in s.versions.items()) or "not told",
            untouched[s.untouched],
            ", ".join(s.stated) or "-",
        )
        for s in run.servers
    )
    columns = ("arm", "address", "route", "seen by", "versions", "loop untouched", "only stated")
    return Table(columns, rows)


def _launches(run: RunFacts) -> Table:
    rows = tuple(
        (
            i.arm,
            str(i.launch),
            str(i.number),
            i.why,
            "-" if i.up_s is None else f"{i.up_s:.1f}",
        )
        for i in run.instances
    )
    return Table(("arm", "launch", "process", "why", "up after, s"), rows, ("up after, s",))


def _texts(run: RunFacts) -> Table:
    rows = tuple((t.text, t.title, t.source, f"{t.tokens:,}", t.sha256[:16]) for t in run.texts)
    return Table(("text", "title", "source", "tokens", "SHA-256"), rows, ("tokens",))
