"""One request and everything around it: counters before and after, checks, and the result stored.

The plan says what every rank has to count for a text that is alone in the engine; what it did
count is stored with the result, and ``ppl.validity`` holds one against the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ppl import client, preflight
from ppl.client import Method, Scored
from ppl.errors import BadAnswer, PplError, Unreachable
from ppl.facts import EMULATED_BY
from ppl.inputs import Input
from ppl.observe import FP8_ONLY, Difference, Snapshot, difference, observe
from ppl.plan import Configuration, Planned
from ppl.servers import Server
from ppl.store import Floats, Observed, check

SETTLE_S = 5.0
"""Seconds that counters and logs may lag behind an answer."""
IDLE_S = 120.0
"""Seconds that a request which broke off may still run."""
POLL_S = 0.02


ENOUGH = 64
"""Rows."""
MOST_OF_DECIMALS = -100.0
"""Below -128 every float32 is a number of 5 decimals, as far as float32 can tell."""


class Restarted(Exception):
    """The server is another process than before; the message says how that shows."""


@dataclass(frozen=True)
class Result:
    """A scored text and what was observed."""

    scored: Scored
    observed: Observed
    finished: int | None


def settle(server: Server) -> Snapshot:
    """Wait until nothing runs on a server, and take a snapshot."""
    assert server.checked is not None
    end = time.monotonic() + IDLE_S
    while True:
        found = observe(server.endpoint, server.checked.channel)
        if not found.running or time.monotonic() > end:
            server.snapshot = found
            server.steps()
            return found
        time.sleep(POLL_S * 10)


def measure(server: Server, planned: Planned, item: Input, method: Method, best: int = 0) -> Result:
    """Score a text and look at what the server did for it; ``best`` as of ``client.score``.

    Raises
    ------
    BadAnswer : an answer that must not be scored.
    Unreachable : no answer.
    Restarted : the server is another process now; the answer is discarded.

    """
    assert server.checked is not None
    before = server.snapshot or settle(server)
    try:
        scored = client.score(
            server.endpoint,
            server.checked.model,
            item.ids,
            method,
            best=best,
            before_again=lambda: void(settle(server)),
        )
        check(scored.values, len(item.ids), "its log-probs")
        telling(scored.values)
    except Unreachable:
        raise
    except PplError as e:
        _after_a_failure(server, before)
        raise BadAnswer(str(e)) from None
    before = server.snapshot or before
    after, apart = _counted(server, before)
    if apart.restarted:
        raise Restarted(apart.restarted)
    server.snapshot = after
    return Result(scored, _observed(server, after, apart, planned, scored), after.finished)


def telling(values: Floats) -> None:
    """Refuse values in which two routes would look equal though they aren't.

    A row of float32 ends in 8 zero bits, or is a number of 5 decimals, by chance: hardly ever in
    ``ENOUGH`` rows.

    Raises
    ------
    BadAnswer : all the same, or all rounded.

    """
    if len(values) < ENOUGH:
        return
    if not np.ptp(values):
        raise BadAnswer(f"all {len(values):,} rows are {values[0]}: they don't depend on the text")
    why = ""
    if not (values.view(np.uint32) & 0xFF).any():
        why = "have 16 bits or fewer"
    elif values.min() > MOST_OF_DECIMALS and any(
        np.array_equal(values.astype(np.float64).round(n).astype(np.float32), values)
        for n in range(2, 6)
    ):
        why = "are decimals of 5 digits or fewer"
    if why:
        raise BadAnswer(
            f"all rows {why}: something on the way rounds log-probs, which hides differences"
        )


def own(server: Server, item: Input, values: Floats) -> None:
    """Refuse the values of the warm-up, which has other ids.

    Raises
    ------
    BadAnswer : they are the same.

    """
    ids, warm = server.warm
    if ids != item.ids and np.array_equal(warm, values):
        raise BadAnswer("the values of the warm-up, whose ids are others: an answer is repeated")


def void(_: object) -> None:
    """Do nothing with a value."""


def _after_a_failure(server: Server, before: Snapshot) -> None:
    """Look whether a bad answer came from another process than the one that was checked."""
    after = settle(server)
    apart = difference(before, after)
    if apart.restarted:
        raise Restarted(apart.restarted)


def _counted(server: Server, before: Snapshot) -> tuple[Snapshot, Difference]:
    """Take a snapshot that has the request: vLLM counts it just after it has answered."""
    assert server.checked is not None
    end = time.monotonic() + SETTLE_S
    while True:
        after = observe(server.endpoint, server.checked.channel)
        apart = difference(before, after)
        done = apart.finished is None or apart.finished >= 1 or bool(apart.restarted)
        if done or time.monotonic() > end:
            return after, apart
        time.sleep(POLL_S)


def expected(
    planned: Planned, layers: dict[int, int], *, packs: bool, fp8: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return what each rank must count for a text, in the order of ranks.

    Where fp8 prefill is emulated (``fp8``), every call and every pack of it is in fp8.
    """
    ran = [s for s in planned.steps if s.context_chunks]
    context = sum(sum(s.context_chunks) for s in ran)
    chunks = sum(len(s.context_chunks) for s in ran)
    each = {
        "calls": len(ran),
        "chunks": chunks,
        "continuations": planned.continuations,
        "context_tokens": context,
        "packs": chunks if packs else 0,
        "pack_rows": context if packs else 0,
    }
    if fp8:
        each |= {"fp8_calls": each["calls"], "fp8_packs": each["packs"]}
    return {name: tuple(n * layers[r] for r in sorted(layers)) for name, n in each.items()}


def layers_of(snapshot: Snapshot, apart: Difference, planned: Planned) -> dict[int, int] | None:
    """Return the routed layers of each rank: told, or found from the calls of one request."""
    told = {rank: r.layers for rank, r in snapshot.ranks.items()}
    if told and all(n is not None for n in told.values()):
        return {rank: int(n or 0) for rank, n in told.items()}
    steps = sum(bool(s.context_chunks) for s in planned.steps)
    found = {}
    for rank, counts in apart.counts.items():
        calls = counts.get("calls", 0)
        if not steps or not calls or calls % steps:
            return None
        found[rank] = calls // steps
    return found or None


def _observed(
    server: Server, after: Snapshot, apart: Difference, planned: Planned, scored: Scored
) -> Observed:
    if not server.layers:
        # Calls that no number of layers explains must show as what they are.
        server.layers = layers_of(after, apart, planned) or dict.fromkeys(apart.counts, 1)
    wanted = {}
    counted = {}
    if server.layers and apart.counts:
        fp8 = EMULATED_BY in after.facts
        wanted = expected(planned, server.layers, packs=preflight.packs(after.route), fp8=fp8)
        told = sorted({name for counts in apart.counts.values() for name in counts})
        told = [name for name in told if fp8 or name not in FP8_ONLY]
        counted = {
            name: tuple(apart.counts[r].get(name, -1) for r in sorted(apart.counts))
            for name in told
        }
        wanted = {name: value for name, value in wanted.items() if name in counted}
    cached = scored.cached_tokens
    return Observed(
        route=after.route,
        scheduler_chunks=_scheduler_chunks(server, planned),
        cached_tokens=apart.cached if cached is None else cached,
        preemptions=apart.preemptions,
        requests=apart.finished,
        counters=counted or None,
        planned=wanted or None,
    )


def _scheduler_chunks(server: Server, planned: Planned) -> tuple[int, ...] | None:
    """Read the engine's steps for one request from its log; None where there is none to read."""
    end = time.monotonic() + SETTLE_S
    found: list[int] = []
    while True:
        steps = server.steps()
        if steps is None:
            return None
        found += [context for context, _ in steps if context]
        if sum(found) >= planned.tokens or time.monotonic() > end:
            return tuple(found) or None
        time.sleep(POLL_S)


def workspace_seen(snapshot: Snapshot, configuration: Configuration) -> str:
    """Say how the workspace's rows differ from the plan's; empty where they don't, or aren't told.

    Under decode context parallelism vLLM allocates ``rows + rows / D``.
    """
    rows = snapshot.facts.get("workspace_rows")
    if rows is None:
        return ""
    layout = configuration.layout()
    planned = layout.workspace + (layout.workspace // layout.ranks if layout.ranks > 1 else 0)
    return "" if int(rows) == planned else f"workspace of {rows} rows, planned {planned}"
