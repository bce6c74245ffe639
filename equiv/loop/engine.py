"""The lane ``engine``: ragged batches through vLLM's scheduler and engine, each call both ways.

Two ranks, each an engine of its own in a process of its own (``external_launcher``), with the small
model, decode context parallelism on gloo and a small workspace. The scheduler cuts and mixes the
requests as it likes: prefills with and without context beside decodes, and tokens are generated.
The route ``both`` runs each loop call with the pack and without it on the same cache and compares
them byte for byte. Both ranks must see the same tokens.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from equiv import evidence
from equiv.loop.campaign import Options

RANKS = 2
BUDGET = 128
"""Scheduler tokens of a step: prompts of a few hundred are cut several times."""
WORKSPACE = 192
MAX_LENGTH = 1024
BATCHES = {"dev": 4, "gate": 24, "nightly": 200}
"""Batches of up to 6 requests, by profile."""
TIMEOUT_S = 240.0


def prompts(seed: int, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Draw one batch: token ids of 1 to 6 prompts, and how many tokens each generates."""
    rng = np.random.Generator(np.random.Philox(seed))
    count = int(rng.integers(1, 7))
    lengths = np.minimum(1 + rng.geometric(1 / 300, count), MAX_LENGTH - 16)
    ids = [[int(i) for i in rng.integers(2, vocabulary, n)] for n in lengths]
    return ids, [int(n) for n in rng.integers(1, 7, count)]


def serve_rank(batches: int, seed: int, result: Path) -> None:
    """Run one rank's engine; what its loop counted and generated goes to ``result``."""
    from vllm import LLM, SamplingParams

    from kvroute import model
    from kvroute.tally import TALLY

    engine = LLM(
        str(model.make(model.default_folder())),
        tensor_parallel_size=RANKS,
        decode_context_parallel_size=RANKS,
        distributed_executor_backend="external_launcher",
        max_model_len=MAX_LENGTH,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        attention_config={"backend": "CPU_MLA"},
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    tokens = []
    for batch in range(batches):
        ids, wanted = prompts(seed + batch, model.VOCABULARY)
        answers = engine.generate(
            [{"prompt_token_ids": one} for one in ids],
            [
                SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
                for n in wanted
            ],
            use_tqdm=False,
        )
        tokens.append([list(answer.outputs[0].token_ids) for answer in answers])
    found = {"tally": TALLY.snapshot(), "tokens": tokens}
    result.write_text(json.dumps(found), encoding="utf-8")


def launch(batches: int, seed: int, route: str) -> list[dict[str, Any]]:
    """Run all ranks and return what each left.

    Raises
    ------
    RuntimeError
        When a rank fails or isn't done in time; with the last lines that it printed.

    """
    from kvroute import settings
    from kvroute.process import free_port
    from kvroute.serve import CPU_ENVIRONMENT

    with tempfile.TemporaryDirectory() as folder:
        shared = {
            **CPU_ENVIRONMENT,
            settings.ROUTE: route,
            settings.WORKSPACE: str(WORKSPACE),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        ranks = []
        for rank in range(RANKS):
            log = Path(folder, f"{rank}.log").open("wb")  # noqa: SIM115 - open while it runs
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", __spec__.name, str(batches), str(seed)]
            command.append(str(Path(folder, f"{rank}.json")))
            process = subprocess.Popen(  # noqa: S603
                command,
                env={**os.environ, **shared, **own},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            ranks.append((process, log))
        end = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process, _ in ranks:
                process.wait(max(1.0, end - time.monotonic()))
        for process, log in ranks:
            process.kill()
            process.wait()
            log.close()
        for rank, (process, _) in enumerate(ranks):
            if process.returncode != 0:
                text = Path(folder, f"{rank}.log").read_text(encoding="utf-8", errors="replace")
                last = " | ".join(text.strip().splitlines()[-3:])
                raise RuntimeError(f"rank {rank} ended with {process.returncode}: {last}")
        files = [Path(folder, f"{rank}.json") for rank in range(RANKS)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def lane(options: Options) -> evidence.Lane:
    """Run the lane: batches through the engine on the route ``both``."""
    start = time.monotonic()
    batches = BATCHES[options.profile.name]
    findings: list[evidence.Finding] = []
    missing: list[str] = []
    counted: dict[str, Any] = {}
    try:
        ranks = launch(batches, options.seed, "both") if _installed() else []
        counted = ranks[0]["tally"] if ranks else {}
        detail = _problem(ranks)
        if detail:
            findings.append(_finding(detail, batches, options))
    except RuntimeError as error:
        missing.append(str(error))
    kinds = {
        "batch": batches if counted else 0,
        "loop calls both ways": int(counted.get("compared", 0)),
        "continuation": int(counted.get("continuations", 0)),
        "no context": int(counted.get("empty", 0)),
        "several chunks": int(counted.get("chunks", 0)) - int(counted.get("calls", 0)),
    }
    least = {"loop calls both ways": 4 * batches, "continuation": batches, "no context": 1}
    if not _installed():
        missing.insert(0, "vLLM would not load the plugin: install this project beside it")
    if not findings and not missing:
        missing = [f"{k}: {kinds[k]} of {n}" for k, n in least.items() if kinds[k] < n]
    return evidence.Lane(
        lane="engine",
        state="failed" if findings else "not covered" if missing else "passed",
        cases=kinds["loop calls both ways"],
        enumerated=0,
        drawn=kinds["loop calls both ways"],
        equal=kinds["loop calls both ways"] - int(counted.get("unequal", 0)),
        refused=0,
        declared=0,
        undefined=0,
        oracle_checked=0,
        guarded=0,
        bytes_compared=0,
        seconds=round(time.monotonic() - start, 3),
        kinds=kinds,
        least=least,
        ranges={},
        median_rows=0,
        layouts_differ={},
        missing=missing,
        left_out=["other groups than D = 2, other packs than the fused one"],
        bound=None,
        findings=findings,
        samples=[],
    )


def _installed() -> bool:
    """Whether vLLM's processes would load the plugin; a checkout on the path isn't enough."""
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(entry.name == "bytegate" for entry in entries)


def _problem(ranks: list[dict[str, Any]]) -> str:
    for rank, found in enumerate(ranks):
        tally = found["tally"]
        if tally["unequal"]:
            return (
                f"rank {rank}: {tally['unequal']} of {tally['compared']} loop calls gave other "
                "bytes with the pack"
            )
        if found["tokens"] != ranks[0]["tokens"]:
            return f"ranks 0 and {rank} generated other tokens"
    return ""


def _finding(detail: str, batches: int, options: Options) -> evidence.Finding:
    return evidence.Finding(
        lane="engine",
        kind="divergence",
        case=f"engine, seed {options.seed}, {batches} batches",
        found="",
        after_cases=0,
        detail=detail,
        voices="",
        raised_in="",
        repro=f"bytegate loop --lane engine --seed {options.seed}",
        occurrences=1,
        set_elements=None,
    )


if __name__ == "__main__":
    serve_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
