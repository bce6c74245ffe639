"""What a server has counted: its route's counters, and vLLM's own.

Two channels tell the route (docs/route.md): ``/collective_rpc`` where the server is in dev mode and
has kvroute's worker extension, else ``bytegate_*`` on ``/metrics``. Counters only grow, so one
snapshot after each request is enough: a difference that isn't exactly what the request had to cost
is another's request, a restart, or another path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from ppl.errors import BadAnswer
from ppl.facts import EMULATED_BY, SHARED
from ppl.transport import Endpoint

Channel = Literal["collective_rpc", "metrics"]
COUNTERS = ("calls", "chunks", "continuations", "packs", "pack_rows")
"""Counters of both channels, each of one rank."""
RPC_ONLY = ("context_tokens",)
FP8_ONLY = ("fp8_calls", "fp8_packs")
"""Also of ``/collective_rpc``: calls and packs in fp8, planned where fp8 prefill is emulated."""
PYNCCL = "pynccl"
"""Fact of a server whose ranks know it: whether a decode step's reduce-scatter runs."""
FP8_KIND = ">float8_e4m3fn"
"""End of the kind of a pack that converts to fp8."""

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_WANTED = ("bytegate_", "vllm:", "process_start_time_seconds")


@dataclass(frozen=True)
class Sample:
    """One line of ``/metrics``."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> list[Sample]:
    """Return the samples of ``/metrics`` that matter here."""
    found = []
    for line in text.splitlines():
        if not line.startswith(_WANTED) or "_bucket{" in line:
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        found.append(Sample(name, dict(_LABEL.findall(labels or "")), number))
    return found


@dataclass(frozen=True)
class Rank:
    """Counters of one rank, and its routed layers where the channel tells them."""

    counts: dict[str, int]
    layers: int | None


@dataclass(frozen=True)
class Snapshot:
    """A server's counters at one moment.

    Attributes
    ----------
    channel : how the route was told; None where nothing tells it.
    ranks : by rank; empty without a channel.
    routes, switches : of all ranks.
    facts : what else the first rank's tally knows: pack, gather, dcp, world, versions ...
    pids : of the workers; None where they aren't told.
    finished, prompt_tokens, cached, preemptions, running : vLLM's own, summed over engines; None
        where ``/metrics`` lacks them.
    cache : labels of ``vllm:cache_config_info``.
    speculative : whether ``/metrics`` speaks of speculative decoding.
    started : the process's start in seconds since 1970, where it is told.

    """

    channel: Channel | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)
    routes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    pids: tuple[int, ...] | None = None
    finished: int | None = None
    prompt_tokens: int | None = None
    cached: int | None = None
    preemptions: int | None = None
    running: int | None = None
    cache: dict[str, str] = field(default_factory=dict)
    speculative: bool = False
    started: float | None = None

    @property
    def route(self) -> str | None:
        """The one route of all ranks; None where it isn't told, or they differ."""
        return self.routes[0] if len(self.routes) == 1 else None


def observe(endpoint: Endpoint, channel: Channel | None) -> Snapshot:
    """Take a snapshot; ``channel`` is what ``find_channel`` found.

    Raises
    ------
    Unreachable, BadAnswer : the server doesn't answer, or not in a form that is known.

    """
    route: dict[str, Any] = {}
    if channel == "collective_rpc":
        # Both at once: they are most of what a run costs beside its requests.
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(rank_tallies, endpoint)
            found = samples(endpoint.page("/metrics") or "")
            tallies = told.result()
        if tallies is None:
            raise BadAnswer("/collective_rpc no longer tells the route")
        route = _of_tallies(tallies)
    else:
        found = samples(endpoint.page("/metrics") or "")
    if channel == "metrics":
        route = _of_metrics(found)
    return Snapshot(channel=channel, **route, **_vllm(found))


def find_channel(endpoint: Endpoint) -> Channel | None:
    """Return the better of the channels on which the server tells its route."""
    if rank_tallies(endpoint):
        return "collective_rpc"
    found = samples(endpoint.page("/metrics") or "")
    return "metrics" if any(s.name.startswith("bytegate_") for s in found) else None


def rank_tallies(endpoint: Endpoint) -> list[dict[str, Any]] | None:
    """Return the ranks' tallies (``kvroute.tally``); None where dev mode or the extension is off.

    Raises
    ------
    BadAnswer : they aren't in the form that this version knows.

    """
    answer = endpoint.post("/collective_rpc", {"method": "bytegate_route"})
    if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
        return None
    tallies = [t for t in answer["results"] if isinstance(t, dict) and "rank" in t]
    wrong = {t.get("schema") for t in tallies} - {"bytegate.route/1"}
    if wrong:
        raise BadAnswer(f"route counters in the form {wrong.pop()}, expected bytegate.route/1")
    return sorted(tallies, key=lambda t: int(t["rank"]))


def pynccl_of(tallies: Sequence[Mapping[str, Any]]) -> bool | None:
    """Return False where a rank says that its PyNccl is off, True where all say that it is on."""
    told = {t.get(PYNCCL) for t in tallies}
    return False if False in told else True if told == {True} else None


def _of_tallies(tallies: list[dict[str, Any]]) -> dict[str, Any]:
    ranks = {}
    for t in tallies:
        counts = {name: int(t[name]) for name in ("calls", "chunks", "continuations", "pack_rows")}
        counts["packs"] = sum(t["packs"].values())
        counts |= {name: int(t[name]) for name in RPC_ONLY}
        counts["fp8_calls"] = int(t.get("fp8_calls", 0))  # none of an older plugin
        counts["fp8_packs"] = sum(n for k, n in t["packs"].items() if k.endswith(FP8_KIND))
        ranks[int(t["rank"])] = Rank(counts, sum(t["layers"].values()))
    facts = {
        name: tallies[0].get(name)
        for name in (
            *("pack", "gather", "dcp", "world", "workspace_rows", "prefill_backend"),
            *("requested", "vllm", "torch", "applied", "decode_tokens"),
        )
    }
    backends = {t.get(EMULATED_BY) for t in tallies}
    if backends != {None}:
        facts[EMULATED_BY] = ", ".join(sorted(str(b or "one rank none") for b in backends))
    shared = [t.get(SHARED) for t in tallies]
    if any(shared):
        facts[SHARED] = shared[0] if all(x == shared[0] for x in shared) else shared
    works = pynccl_of(tallies)
    if works is not None:
        facts[PYNCCL] = works
    facts["kinds"] = sorted({kind for t in tallies for kind in t["packs"]})
    return {
        "ranks": ranks,
        "routes": tuple(sorted({str(t.get("route")) for t in tallies})),
        "switches": tuple(sorted({str(t["switch"]) for t in tallies if t.get("switch")})),
        "facts": facts,
        "pids": tuple(int(t["pid"]) for t in tallies),
    }


def _of_metrics(found: list[Sample]) -> dict[str, Any]:
    counts: dict[int, dict[str, int]] = {}
    routes, switches = set(), set()
    for s in found:
        name = s.name.removeprefix("bytegate_").removesuffix("_total")
        if s.name == name or name not in COUNTERS:
            continue
        # Rank 0 was once written as an empty label.
        mine = counts.setdefault(int(s.labels.get("rank") or 0), {})
        mine[name] = mine.get(name, 0) + int(s.value)
        routes.add(s.labels.get("route", ""))
        switches.add(s.labels.get("switch", ""))
    return {
        "ranks": {rank: Rank(c, None) for rank, c in counts.items()},
        "routes": tuple(sorted(routes - {""})),
        "switches": tuple(sorted(switches - {""})),
    }


def _vllm(found: list[Sample]) -> dict[str, Any]:
    def total(name: str) -> int | None:
        mine = [s.value for s in found if s.name in {name, f"{name}_total"}]
        return int(sum(mine)) if mine else None

    started = [s.value for s in found if s.name == "process_start_time_seconds"]
    labels = [s.labels for s in found if s.name == "vllm:cache_config_info"]
    cached = total("vllm:prompt_tokens_cached")
    return {
        "finished": total("vllm:request_success"),
        "prompt_tokens": total("vllm:prompt_tokens"),
        "cached": total("vllm:prefix_cache_hits") if cached is None else cached,
        "preemptions": total("vllm:num_preemptions"),
        "running": total("vllm:num_requests_running"),
        "cache": labels[0] if labels else {},
        "speculative": any(s.name.startswith("vllm:spec_decode") for s in found),
        "started": started[0] if started else None,
    }


@dataclass(frozen=True)
class Difference:
    """What happened between two snapshots.

    Attributes
    ----------
    restarted : why the later one is of another process; empty where it is of the same.
    counts : by rank.

    """

    restarted: str
    counts: dict[int, dict[str, int]]
    finished: int | None
    prompt_tokens: int | None
    cached: int | None
    preemptions: int | None


def difference(before: Snapshot, after: Snapshot) -> Difference:
    """Subtract two snapshots of one address."""
    totals = {
        name: None
        if getattr(before, name) is None or getattr(after, name) is None
        else getattr(after, name) - getattr(before, name)
        for name in ("finished", "prompt_tokens", "cached", "preemptions")
    }
    counts = {
        rank: {name: n - before.ranks[rank].counts.get(name, 0) for name, n in mine.counts.items()}
        for rank, mine in after.ranks.items()
        if rank in before.ranks
    }
    return Difference(_restarted(before, after, totals, counts), counts, **totals)


def _restarted(
    before: Snapshot,
    after: Snapshot,
    totals: Mapping[str, int | None],
    counts: Mapping[int, Mapping[str, int]],
) -> str:
    if before.pids is not None and after.pids is not None and before.pids != after.pids:
        return "its workers are other processes"
    if None not in {before.started, after.started} and before.started != after.started:
        return "its process started at another time"
    fell = [name for name, n in totals.items() if n is not None and n < 0]
    fell += [name for mine in counts.values() for name, n in mine.items() if n < 0]
    if fell:
        return f"its counter of {fell[0]} fell"
    if set(before.ranks) != set(after.ranks):
        return "it has other ranks"
    return ""
