"""vLLM's benchmark client, run against one server at one level of concurrency, and its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from equiv.perf.record import ServingRun
from ppl import counted
from ppl.errors import PplError
from ppl.figures import METRICS
from ppl.load import BLOCK, Load, tokenizer, trace, warm_requests
from ppl.servers import tether

CLIENT_S = 3600


def measure(
    url: str,
    model: Path,
    load: Load,
    folder: Path,
    stem: str,
    progress: Callable[[str], None],
) -> list[ServingRun]:
    """Run the client, and read what it left.

    What a launch that was cut off left under the same names goes first.

    Parameters
    ----------
    stem : arm and launch, such as ``stock-1``.

    Raises
    ------
    PplError : it failed, took too long, or left no results.

    """
    arm, launch = stem.split("-")
    mine = f"{stem}-at-{load.concurrency}"
    requests, warm = trace(load, folder)
    command = client_command(url, load, requests, warm, tokenizer(model, folder), folder, mine)
    results = [folder / f"{mine}-{repeat}.json" for repeat in range(1, load.repeats + 1)]
    for path in results:
        path.unlink(missing_ok=True)
        counted.place(path).unlink(missing_ok=True)
    log = folder / f"{mine}-client.log"
    try:
        with log.open("wb") as sink:
            done = subprocess.run(  # noqa: S603 - our interpreter and vLLM's client
                [*tether(), *command],
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=CLIENT_S,
                check=False,
                # The client draws a prompt from Python's hash of its seed: the same in both arms.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
    except subprocess.TimeoutExpired:
        raise PplError(f"vLLM's benchmark client took over {CLIENT_S:,} s; see {log}") from None
    if done.returncode:
        last = last_line(log.read_text("utf-8", "replace"))
        raise PplError(f"vLLM's benchmark client ended with {done.returncode}: {last}; see {log}")
    made = [
        read(path, arm, int(launch), repeat, load.concurrency)
        for repeat, path in enumerate(results, 1)
    ]
    for run in made:
        rate = run.figures.get("total_token_throughput", 0.0)
        progress(
            f"{arm}, launch {launch}, {load.concurrency} at a time, run {run.repeat}: "
            f"{rate:,.0f} tokens/s{_hits(run.counters)}"
        )
    return made


def last_line(text: str) -> str:
    """Return the last line that a client wrote, before what its libraries say when it ends."""
    said = text.partition("\nnanobind: leaked")[0].strip().splitlines()
    return said[-1] if said else "no output"


def _hits(found: dict[str, int]) -> str:
    queries, hits = found.get("cache_queries", 0), found.get("cache_hits", 0)
    return f", {hits / queries:.1%} of the prompts' tokens from the prefix cache" if hits else ""


def client_command(
    url: str, load: Load, requests: Path, warm: Path, names: Path, folder: Path, stem: str
) -> list[str]:
    """Return the command line of vLLM's benchmark client, by way of ``ppl.vllm_bench``."""
    labels = ("timestamp", "input-length", "output-length", "hash-ids")
    return [
        *(sys.executable, "-m", "ppl.vllm_bench", str(load.repeats)),
        *("--warm", str(warm), "--warm-requests", str(warm_requests(load))),
        *(("--reset",) if load.sessions else ()),
        "--",
        *("--backend", "vllm", "--base-url", url, "--tokenizer", str(names)),
        *("--dataset-name", "timed_trace", "--dataset-path", str(requests), "--no-self-timed"),
        *("--timed-trace-chunk-hash-size", str(BLOCK)),
        *(w for name in labels for w in (f"--timed-trace-label-{name}", name.replace("-", "_"))),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0", "--seed", "0"),
        *("--temperature", "0", "--ignore-eos"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "90,99"),
        *("--disable-tqdm", "--save-result", "--result-dir", str(folder)),
        *("--result-filename", f"{stem}.json"),
    ]


def read(path: Path, arm: str, launch: int, repeat: int, concurrency: int) -> ServingRun:
    """Read one result of the client's, and what the server counted meanwhile.

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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise PplError(f"vLLM's benchmark client left no result in {path}: {e!r}") from None
    kept = {name for name, _, _ in METRICS} & numbers.keys()
    return ServingRun(
        route=arm,
        launch=launch,
        repeat=repeat,
        completed=completed,
        failed=failed,
        figures={name: numbers[name] for name in sorted(kept)},
        concurrency=concurrency,
        wall_s=numbers.get("duration"),
        counters=counted.read(path),
    )
