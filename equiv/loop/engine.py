"""The lane ``engine``: ragged batches through vLLM's scheduler and engine, each call both ways.

Ranks, each an engine of its own in a process of its own (``external_launcher``), with the small
model, decode context parallelism on gloo and a small workspace. The scheduler cuts and mixes the
requests as it likes: prefills with and without context beside decodes, and tokens are generated.
The route ``both`` runs each loop call with the pack and without it on the same cache and compares
them byte for byte. All ranks must see the same tokens.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from equiv import apart, evidence
from equiv.loop import isolate
from equiv.loop.campaign import Options, campaign_command, finding_of, lane_of
from equiv.patience import stretched
from equiv.stopping import Stop

GROUPS = {"dev": (2,), "gate": (2, 4), "nightly": (2, 4)}
"""Ranks of a group, by profile; the small model has four heads."""
BUDGET = 128
"""Scheduler tokens of a step: prompts of a few hundred are cut several times."""
WORKSPACE = 192
MAX_LENGTH = 1024
BATCHES = {"dev": 4, "gate": 24, "nightly": 200}
"""Batches of up to 6 requests, by profile."""
TIMEOUT_S = 240.0
PEERS_S = 10.0
"""How long the others may live once a rank has died."""
GROUP = "BYTEGATE_ENGINE_GROUP"
"""Variable that tells ranks the name of their group."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has it


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
    from kvroute.serve import small_model
    from kvroute.tally import TALLY

    _name_shared_memory(os.environ[GROUP])
    engine = LLM(
        str(small_model(int(os.environ["WORLD_SIZE"]))),
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        decode_context_parallel_size=int(os.environ["WORLD_SIZE"]),
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


def _name_shared_memory(group: str) -> None:
    """Give vLLM's shared memory a name of this group's own.

    vLLM takes it from the address that ranks meet at. With ``external_launcher`` that is the same
    for every engine on the machine, and what a killed one left behind makes all later ones fail.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    plain = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda one: f"{group}{plain(one)}".replace("/", "")  # a name may hold none
    )


def launch(
    batches: int,
    seed: int,
    route: str,
    *,
    ranks: int = 2,
    patches: tuple[str, ...] = (),
    stop: Stop | None = None,
) -> list[dict[str, Any]]:
    """Run all ranks on a route, with patches as of ``bytegate loop``; return what each left.

    Raises
    ------
    RuntimeError
        When a rank fails or isn't done in time; with the last lines that it printed.
    Stopped
        ``stop`` was set.

    """
    from kvroute import settings
    from kvroute.process import free_port
    from kvroute.serve import CPU_ENVIRONMENT

    group = f"bytegate-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            GROUP: group,
            **CPU_ENVIRONMENT,
            settings.ROUTE: route,
            settings.WORKSPACE: str(WORKSPACE),
            settings.PATCH: ",".join(patches),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        try:
            for rank in range(ranks):
                log: IO[bytes] = Path(folder, f"{rank}.log").open("wb")  # noqa: SIM115 - open while it runs
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, "-m", __spec__.name, str(batches), str(seed)]
                command.append(str(Path(folder, f"{rank}.json")))
                process = subprocess.Popen(  # noqa: S603
                    command,
                    env={**os.environ, **shared, **own, **apart.with_command()},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # Ctrl-C is the command's alone, which ends the ranks
                )
                started.append((process, log))
            _wait([process for process, _ in started], stop or Stop())
        finally:  # also when it is stopped: a rank that waits for its peers would stay
            late = [process for process, _ in started if process.poll() is None]
            for process, sink in started:
                process.kill()
                process.wait()
                sink.close()
            for left in SHARED_MEMORY.glob(f"*{group}*"):
                left.unlink(missing_ok=True)
        for rank, (process, _) in enumerate(started):
            if process.returncode != 0 and process not in late:
                text = Path(folder, f"{rank}.log").read_text(encoding="utf-8", errors="replace")
                last = (text.strip().splitlines() or ["it printed nothing"])[-1]
                raise RuntimeError(f"rank {rank} ended with {process.returncode}: {last}")
        if late:
            limit = stretched(TIMEOUT_S)
            raise RuntimeError(f"the ranks weren't done in {limit:.0f} s, and were killed")
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], stop: Stop) -> None:
    """Wait until all ranks have ended, or their time has."""
    end = time.monotonic() + stretched(TIMEOUT_S)
    while any(rank.poll() is None for rank in ranks):
        stop.check()
        now = time.monotonic()
        if any(rank.poll() for rank in ranks):
            end = min(end, now + PEERS_S)  # its peers wait for it in vain
        if now > end:
            break
        time.sleep(0.05)
    for rank in ranks:
        isolate.told(rank.poll(), stop)


@dataclass
class _Group:
    """What the ranks of one group did."""

    ranks: int
    tally: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    kind: str = "divergence"
    missing: str = ""


def lane(options: Options) -> evidence.Lane:
    """Run the lane: batches through the engine, each loop call with the pack and without it."""
    start = time.monotonic()
    batches = BATCHES[options.profile.name]
    groups = [_run(size, batches, options) for size in GROUPS[options.profile.name]]
    compared, unequal, continuations, empty, several = (
        sum(int(g.tally.get(name, 0)) for g in groups)
        for name in ("compared", "unequal", "continuations", "empty", "chunks")
    )
    kinds = {
        **{f"D={g.ranks}": int(g.tally.get("compared", 0)) for g in groups},
        "batch": sum(batches for g in groups if g.tally),
        "loop calls both ways": compared,
        "continuation": continuations,
        "no context": empty,
        "several chunks": several - sum(int(g.tally.get("calls", 0)) for g in groups),
    }
    least = {
        **{f"D={g.ranks}": 4 * batches for g in groups},
        "continuation": batches,
        "no context": 1,
    }
    findings = [_finding(g, batches, options) for g in groups if g.problem]
    missing = [f"D={g.ranks}: {g.missing}" for g in groups if g.missing]
    if not findings and not missing:
        missing = [f"{k}: {kinds[k]} of {n}" for k, n in least.items() if kinds[k] < n]
    left = sorted({2, 4} - {g.ranks for g in groups})
    return lane_of(
        "engine",
        start,
        cases=compared,
        drawn=compared,
        equal=compared - max(unequal, bool(findings and compared)),
        kinds=kinds,
        least=least,
        missing=missing,
        left_out=[f"D = {', '.join(map(str, left))} (profile gate)"] if left else [],
        findings=findings,
    )


def _run(size: int, batches: int, options: Options) -> _Group:
    """Run one group. Ranks that die are a finding only where they live with vLLM as it is."""
    group = _Group(size)
    if not _installed():
        group.missing = "vLLM would not load the plugin: install this project beside it"
        return group
    own = options.name != "fused"
    route = f"both:{options.name}" if own else "both"
    try:
        found = launch(
            batches,
            options.seed,
            route,
            ranks=size,
            patches=options.patches,
            stop=options.stop,
        )
    except RuntimeError as error:
        if not own and not options.patches:
            group.missing = str(error)
            return group
        try:
            launch(1, options.seed, "both", ranks=size, stop=options.stop)
        except RuntimeError:
            group.missing = f"also without what was asked for: {error}"
            return group
        group.problem, group.kind = str(error), "raised"
        return group
    group.tally = found[0]["tally"]
    group.problem = _problem(found)
    return group


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


def _finding(group: _Group, batches: int, options: Options) -> evidence.Finding:
    return finding_of(
        "engine",
        group.kind,
        case=f"engine, D={group.ranks}, seed {options.seed}, {batches} batches",
        repro=campaign_command(options, ("engine",)),
        after_cases=int(group.tally.get("compared", 0)),
        detail=group.problem,
    )


if __name__ == "__main__":
    apart.tie()
    serve_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
