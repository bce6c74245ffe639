"""The disposable process in which cases run.

It owns the device. If it dies, hangs or loses its CUDA context, that is the case's result, and the
pool starts another. Nothing here knows of campaigns or reports.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from equiv import apart
from equiv.errors import BytegateError, DoesNotFit, UsageError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from equiv.case import Case
    from equiv.ledger import Entry
    from equiv.pairs import OpPair
    from equiv.result import Result

PRELOAD = ("equiv.fork_server", "torch", "torch._dynamo", "numpy", "xxhash", "equiv.execute")
"""Modules that the fork server imports once, so that a new worker starts at once."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is for.

    Attributes
    ----------
    pair, candidate, device, library : as on the command line.
    entries : ledger entries that apply.
    environment : variables to set first.
    log : file that takes what the candidate prints, and the traceback of a crash.
    threads : torch's intra-op threads on a CPU.
    paths : entries to put on ``sys.path``.

    """

    pair: str
    candidate: str
    device: str
    library: str | None
    entries: tuple[Entry, ...]
    environment: tuple[tuple[str, str], ...]
    log: str
    threads: int = 1
    paths: tuple[str, ...] = ()


def spec_of(
    pair: OpPair,
    candidate: str,
    device: str,
    *,
    library: str | None = None,
    entries: tuple[Entry, ...] = (),
    threads: int = 1,
) -> WorkerSpec:
    """Return what a worker needs to run a candidate of a pair, with this process's paths."""
    known = pair.candidates.get(candidate)
    on_cpu = known is not None and not device.startswith("cuda")
    return WorkerSpec(
        pair=pair.name,
        candidate=candidate,
        device=device,
        library=library,
        entries=entries,
        environment=tuple(known.cpu_environment.items()) if known and on_cpu else (),
        log="",
        threads=threads,
        paths=tuple(p for p in sys.path if p),
    )


@dataclass(frozen=True)
class Hello:
    """A worker's first message: that it is ready, or why it can't be.

    ``source`` is the digest of somebody's own kernel, see ``equiv.candidates.source_sha256``.
    """

    ready: bool
    source: str = ""
    unavailable: str = ""
    usage: str = ""


@dataclass(frozen=True)
class ProofRequest:
    """Asks for a profile of one call, see ``equiv.proof``."""

    case: Case
    forbidden: tuple[str, ...]


def main(pipe: Connection, spec: WorkerSpec) -> None:
    """Serve cases until the pipe closes."""
    apart.stay()
    os.environ.update(dict(spec.environment))
    with open(spec.log, "ab", buffering=0) as log:  # noqa: PTH123 - a file descriptor is needed
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log.fileno(), all_threads=False)
        for path in spec.paths:
            if path not in sys.path:
                sys.path.insert(0, path)
        executor = _start(pipe, spec)
        if executor is not None:
            _serve(pipe, executor, spec)


def _start(pipe: Connection, spec: WorkerSpec) -> Any:
    try:
        import torch

        from equiv import candidates
        from equiv.execute import Executor
        from equiv.pairs import load_pair

        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        else:
            torch.cuda.set_device(torch.device(spec.device))
            torch.zeros(1, device=spec.device)
        pair = load_pair(spec.pair)
        loaded = candidates.load(pair, spec.candidate, spec.device, spec.library)
        executor = Executor(pair, loaded, spec.device, spec.entries)
    except UsageError as e:
        pipe.send(Hello(ready=False, usage=str(e)))
        return None
    except Exception as e:  # noqa: BLE001 - it is the result
        if type(e).__name__ == "Unavailable":
            pipe.send(Hello(ready=False, unavailable=str(e)))
        else:
            traceback.print_exc()
            pipe.send(
                Hello(ready=False, usage=f"candidate {spec.candidate!r}: {type(e).__name__}: {e}")
            )
        return None
    pipe.send(Hello(ready=True, source=candidates.source_sha256(spec.candidate)))
    return executor


def _serve(pipe: Connection, executor: Any, spec: WorkerSpec) -> None:
    from equiv.proof import prove

    cuda = spec.device.startswith("cuda")
    while True:
        try:
            case = pipe.recv()
        except (EOFError, OSError):
            return
        if case is None:
            return
        answer: Any
        try:
            if isinstance(case, ProofRequest):
                pipe.send(prove(executor, case.case, case.forbidden))
                continue
            answer = executor.run(case)
        except BytegateError as e:
            answer = e
        except Exception as e:  # noqa: BLE001 - it is the result
            answer = _failure(e, executor, case)
        if isinstance(answer, BytegateError):
            answer.spent = executor.spent
        elif cuda:
            answer = _device_health(answer)
        pipe.send(answer)
        if not isinstance(answer, BaseException) and answer.status == "crash":
            pipe.close()
            os._exit(3)


def _failure(error: Exception, executor: Any, case: Case) -> Any:
    """Turn an exception that escaped a case into its result: a lost device, or our own bug."""
    from equiv.result import Result

    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if "CUDA error" in text or type(error).__name__ in {"AcceleratorError", "OutOfMemoryError"}:
        kind = "out_of_memory" if "out of memory" in text else "crash"
        if kind == "crash":
            return Result(
                _lost_or_left(),
                f"{type(error).__name__}: {text}",
                raised_in=executor.loaded.name,
                spent=executor.spent,
            )
        return DoesNotFit(f"case {case} doesn't fit on the device: {text}")
    traceback.print_exc()
    sys.stderr.flush()
    return BytegateError(f"the suite failed on case {case}: {type(error).__name__}: {text}")


def _lost_or_left() -> str:
    """Tell an error that the next call merely picked up from one that cost the CUDA context."""
    import torch

    from equiv.cuda_runtime import take_last_error

    try:
        torch.cuda.synchronize()
        take_last_error()
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception:  # noqa: BLE001 - it is the result
        return "crash"
    return "last_error"


def _device_health(result: Result) -> Result:
    """Synchronise, and look at the last error that CUDA keeps for whoever asks next."""
    import torch

    from equiv.cuda_runtime import take_last_error

    try:
        torch.cuda.synchronize()
    except Exception as e:  # noqa: BLE001 - it is the result
        text = str(e).strip().splitlines()[0]
        return replace(result, status="crash", detail=f"the CUDA context is lost: {text}")
    error = take_last_error()
    if error and not result.failed:
        return replace(result, status="last_error", detail=f"left {error} behind")
    return result
