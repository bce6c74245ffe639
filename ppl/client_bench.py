"""What the client costs beside a server's own time: ``python -m ppl.bench client``.

The same texts are scored by turns with a bare request, whose answer is only read, and with all
that a run does: checks, counters before and after, log, result stored. The server is a run's own:
the small model on this machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from ppl import client, scoring, transport
from ppl.inputs import Input
from ppl.options import Options
from ppl.order import Phase
from ppl.pace import Pace
from ppl.phase import Work
from ppl.runner import Session
from ppl.servers import Launched, Server

MOST = 0.05
"""Of the servers' own time."""
ROUNDS = 5
TEXTS = ("alice", "hamlet", "workshop", "britannica")


def main(words: list[str]) -> int:
    """Launch one server, measure, print; 1 where the client costs too much."""
    rounds = int(words[0]) if words else ROUNDS
    transport.no_retry_logs()
    with tempfile.TemporaryDirectory() as folder, Pace() as pace:
        options = Options(texts=TEXTS, out=Path(folder), one_at_a_time=True)
        session = Session(options, pace)
        assert isinstance(session.source, Launched)
        phase = Phase({"stock": 1})
        try:
            session.servers = session.source.get(("stock",), lambda a: session.instance(a, 1))
            work = Work(session, phase)
            work.prepare()
            return _measure(session, work, rounds)
        finally:
            session.close()


def _bare(server: Server, item: Input) -> float:
    """Send a request, read its answer, and return the seconds that took."""
    assert server.checked is not None
    path, body = client.request(server.checked.model, item.ids, "prompt_logprobs")
    began = time.perf_counter()
    server.endpoint.send("POST", path, body)
    return time.perf_counter() - began


def _measure(session: Session, work: Work, rounds: int) -> int:
    server = session.servers["stock"]
    bare: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    own: list[float] = []
    for turn in range(rounds):
        for item in session.items:
            for full in (True, False) if turn % 2 else (False, True):
                scoring.settle(server)
                if not full:
                    bare.setdefault(item.name, []).append(_bare(server, item))
                    continue
                began = time.perf_counter()
                request_s = work.one((item.name, "stock", 1, turn + 1), item)
                whole.setdefault(item.name, []).append(time.perf_counter() - began)
                own.append((whole[item.name][-1] - request_s) / request_s)
    # The least of each: what else runs on the machine only ever adds.
    cost = [min(whole[n]) / min(bare[n]) - 1 for n in bare]
    beside = statistics.median(own)
    tokens = sum(len(i.ids) for i in session.items) * rounds
    sys.stdout.write(
        f"{tokens:,} tokens each way: beside each request the client takes {100 * beside:.1f} % of "
        f"its time (median, at most {100 * MOST:.0f} %); the least against the least of "
        f"bare requests, by text: {', '.join(f'{100 * c:+.1f} %' for c in cost)}\n"
    )
    return int(beside > MOST)
