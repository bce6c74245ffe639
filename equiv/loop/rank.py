"""What one real rank's process does: take its device, meet the others, run cases until told to end.

``equiv.loop.ranks`` starts these processes and hears their results.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from equiv.errors import BytegateError
from equiv.loop import isolate, payload, world
from equiv.loop.campaign import Options
from equiv.loop.case import LoopCase, parse
from equiv.loop.result import EQUAL, Result
from equiv.loop.run import pack_keyword, run
from equiv.loop.spy import digest
from kvroute.shared import as_a_host

START_S = 300.0
"""After so long a group that comes up is given up, or is at its first case, before which compilers
may run."""


@dataclass(frozen=True)
class Backend:
    """What brings the ranks' rows.

    Attributes
    ----------
    lane : whose cases they are.
    name : torch.distributed's name for it.
    cuda : whether rank r computes on ``cuda:r``; else all are on the CPU.
    shared : CUDA devices that larger groups share: rank r then computes on ``cuda:(r % shared)``; 0
        where each rank has a device of its own.

    """

    lane: str
    name: str
    cuda: bool = False
    shared: int = 0

    def device(self, rank: int) -> str:
        """Return the device of a rank."""
        if not self.cuda:
            return "cpu"
        return f"cuda:{rank % self.shared if self.shared else rank}"

    def shares(self, size: int) -> bool:
        """Whether a group of this size has fewer devices than ranks."""
        return 0 < self.shared < size


@dataclass(frozen=True)
class Rank:
    """What a rank's process is told."""

    rank: int
    size: int
    store: Path
    backend: Backend
    options: Options
    forked: bool


def serve(me: Rank, end: Connection, inherited: Sequence[Connection]) -> None:
    """Run cases as one rank until told to end, or until nobody is there to tell."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this process
    for other in inherited:
        other.close()
    try:
        pack = meet(me)
    except BaseException as error:  # noqa: BLE001 - told to the parent: this group doesn't run
        end.send(Result("ranks", f"rank {me.rank}: {_line(error)}"))
        return
    end.send(Result(EQUAL))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while line := end.recv():
            case = parse(line).with_(rank=me.rank, device=me.backend.device(me.rank))
            end.send(_one(case, pack))
        _part()
        return
    os._exit(1)  # nobody listens any more, and peers may be inside a collective


def meet(me: Rank) -> Callable[..., Any]:
    """Take this rank's device, find the others, and return the pack."""
    import torch
    import torch.distributed as dist

    if not me.forked:
        options = isolate.again(me.options)
    elif me.backend.cuda and torch.cuda._is_in_bad_fork():  # noqa: SLF001 - there is no public way
        raise BytegateError("CUDA was in use before the fork, so it can't be used after it")
    else:
        options = me.options
    if me.backend.shares(me.size):
        as_a_host(me.rank)  # NCCL refuses two ranks of one host on one device
    device = torch.device(me.backend.device(me.rank))
    given: dict[str, Any] = {}
    if me.backend.cuda:
        torch.cuda.set_device(device)  # kernels that name no device run on the current one
        given["device_id"] = device  # NCCL then connects now, and on this device
    dist.init_process_group(
        me.backend.name,
        init_method=f"file://{me.store}",
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=START_S),  # whoever waits for a rank's answer gives up earlier
        **given,
    )
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's, on vLLM's collective
    count = torch.ones(1, device=device)
    dist.all_reduce(count)
    if int(count.item()) != me.size:
        raise BytegateError(f"{int(count.item())} of {me.size} ranks met")
    return options.pack


def _part() -> None:
    """Leave the group; NCCL wants its devices idle then."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.destroy_process_group()


def _one(case: LoopCase, pack: Callable[..., Any]) -> Result:
    """Run a case served, and then on real ranks with and without the pack."""
    served = run(case, pack)
    if served.status != EQUAL:
        return served
    try:
        detail, status = _gathered(case, pack, served)
    except Exception as error:  # noqa: BLE001 - a collective that fails, or times out, is a finding
        return Result("ranks", f"rank {case.rank}, on real ranks: {_line(error)}")
    return replace(served, status=status, detail=detail) if status else served


def _gathered(case: LoopCase, pack: Callable[..., Any], served: Result) -> tuple[str, str]:
    """Return what is wrong with the real ranks' bytes, and its kind; both empty where nothing."""
    import torch.distributed as dist

    made = world.build(case, payload.make(case))
    context = made.metadata[case.rank].prefill.chunked_context
    gather = functools.partial(dist.all_gather_into_tensor, group=None)
    gathers = 0

    def counted(gathered: Any, local: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(gathered, local)

    context.dcp_manager._kv_gather = counted  # noqa: SLF001 - where vLLM keeps its collective
    for keyword, chosen in ((None, None), (pack_keyword(), pack)):
        made.poison()
        gathers = 0
        found = digest(*made.call(keyword, chosen))
        route = f"rank {case.rank}, {'with the pack' if chosen else 'without it'}"
        if gathers != served.chunks:
            return f"{route}: {gathers} collectives for {served.chunks} context chunks", "not_run"
        if found != served.output_hash:
            return f"{route}: real ranks give other bytes than served ones", "collective"
    return "", ""


def _line(error: BaseException) -> str:
    """Say an exception in one line."""
    words = " ".join((str(error).splitlines() or [""])[0].split())[:200]
    return f"{type(error).__name__}: {words}"
