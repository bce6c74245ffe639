"""The concurrency arm: all texts at once, and what came of it stored once all of it is there.

Where the scheduler cuts a burst depends on arrival times, so nothing is planned but that the route
ran: packs for each context chunk, or none on the stock route.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ppl import client, emulation, preflight, pynccl, scoring
from ppl.client import Scored
from ppl.errors import PplError, Unreachable
from ppl.facts import Arm
from ppl.inputs import Input
from ppl.observe import Difference, difference
from ppl.store import Key, Observed, Store, check

if TYPE_CHECKING:
    from ppl.runner import Session
    from ppl.servers import Server

FOLDER = "burst"
"""Below the run's folder: its results are no part of the run's own."""


def score(session: Session, arm: Arm, launch: int, number: int) -> bool:
    """Score a launch's burst of this number, unless it is stored; False: the server is gone."""
    s = session
    server = s.servers[arm]
    store = Store(s.options.out / FOLDER)
    keys = {i.name: _key(s.key(server, i)) for i in s.items}
    if all(store.find(keys[i.name], arm, launch, number) is not None for i in s.items):
        return True
    assert server.checked is not None
    if pynccl.off(server.checked.snapshot, server.checked.whole):
        s.failed(("all", arm, launch, 0), f"in a burst of all texts: {pynccl.IN_A_BURST}")
        return True
    try:
        before = scoring.settle(server)
        began = time.monotonic()
        done, failed = _send(session, server)
        seconds = time.monotonic() - began
        after = scoring.settle(server)
    except Unreachable:
        return False
    for name, why in failed.items():
        s.failed((name, arm, launch, 0), f"in a burst of all texts: {why}")
    apart, packs = difference(before, after), preflight.packs(after.route)
    wrong = _amiss(apart, packs=packs)
    if not wrong and s.options.emulate_fp8:
        wrong = "; ".join(emulation.unreached(apart, packs=packs))
    if wrong:
        s.failed(("all", arm, launch, 0), f"in a burst of all texts: {wrong}")
        return True
    s.pace.say(f"{arm} launch {launch}: burst {number}, of {len(done)} texts took {seconds:.1f} s")
    for item, scored in done:
        store.put(
            scored.values,
            key=keys[item.name],
            arm=arm,
            launch=launch,
            repeat=number,
            exposed_from=0,
            budget=s.plan_of(item.name).steps[0].tokens,
            observed=Observed(route=after.route),
            request={"method": s.method, "burst": len(s.items)},
            response={"wall_s": round(scored.wall_s, 6), "instance": server.instance.number},
        )
    return True


def _send(session: Session, server: Server) -> tuple[list[tuple[Input, Scored]], dict[str, str]]:
    """Send all texts at once; returns what was scored, and why the others weren't.

    Raises
    ------
    Unreachable : the server went away under it.

    """
    assert server.checked is not None
    assert session.method is not None
    model, method = server.checked.model, session.method

    def one(item: Input) -> Scored:
        found = client.score(server.endpoint, model, item.ids, method)
        check(found.values, len(item.ids), "its log-probs")
        return found

    with ThreadPoolExecutor(len(session.items)) as pool:
        pending = [(i, pool.submit(one, i)) for i in session.items]
    done, failed = [], {}
    for item, future in pending:
        try:
            done.append((item, future.result()))
        except Unreachable:
            raise
        except PplError as e:
            failed[item.name] = str(e)
    return done, failed


def _amiss(apart: Difference, *, packs: bool) -> str:
    """Say what is wrong with a burst's counters; empty where nothing is."""
    if apart.restarted:
        return apart.restarted
    if apart.preemptions:
        return f"preempted {apart.preemptions} times"
    for rank, counts in apart.counts.items():
        chunks, packed = counts.get("chunks", 0), counts.get("packs", 0)
        if not counts.get("calls") or packed != (chunks if packs else 0):
            return f"rank {rank} counted {packed} packs for {chunks} context chunks"
    return ""


def _key(key: Key) -> Key:
    return key.model_copy(update={"arguments": (*key.arguments, "burst=all texts at once")})
