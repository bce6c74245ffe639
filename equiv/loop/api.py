"""``bytegate loop`` and ``bytegate loop repro``: choose, run, judge, write the evidence."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equiv import environment, evidence
from equiv.candidates import source_sha256
from equiv.errors import ExitCode, NotCovered, UsageError
from equiv.loop import campaign, case, isolate, lanes
from equiv.loop.confirm import confirm
from equiv.loop.result import FINDINGS
from equiv.partial import UNFINISHED
from equiv.profiles import default_name, profile_of, seed_of
from equiv.stopping import ENDING, Stop, Stopped


class LoopUnavailable(NotCovered):
    """The loop layer can't run on this machine: NOT COVERED, exit 4."""


@dataclass(frozen=True)
class LoopRequest:
    """What was asked for on the command line; None where the default was left."""

    pack: str = "fused"
    patches: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    profile: str | None = None
    device: str | None = None
    seed: int | None = None
    share_gpu: bool = False
    out: Path = Path("out/loop")
    command: str = "bytegate loop"


DISTRIBUTION = (
    "hypothesis's draws: D in {2, 3, 4, 8}, page in {16, 32, 64}, interleave in {1, 2, 16, page/2, "
    "page}, 1 to 16 heads, workspaces of 1 to 4 alignments, 1 to 6 requests of 1 to 7 query tokens "
    "with contexts at edges (up to 2.5 workspaces) or anywhere up to 1.5; latents and queries "
    "normal. The bound speaks of this distribution alone"
)


MODULES = (
    "vllm._custom_ops",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.v1.attention.backends.mla.prefill.cpu_sdpa",
    "vllm.v1.attention.ops.dcp",
)
"""What the loop needs of vLLM."""


def prepare(device: str | None, patches: Sequence[str]) -> tuple[str, list[str]]:
    """Make this process able to run the loop; the device, and the stand-ins that it needed.

    Raises
    ------
    LoopUnavailable
        Without a vLLM that this suite knows.
    UsageError
        For a device or patch that can't be used.

    """
    from equiv.run import find_device
    from kvroute.errors import RouteError, UnknownVLLM
    from kvroute.settings import resolve

    # Looking for a GPU must not start CUDA in a process that will be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = find_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode asks
    import torch

    # Small matrices gain nothing from threads, and forked processes can't use their parent's.
    torch.set_num_threads(1)
    # The reference's bound takes sums of products to accumulate in float32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        stand_ins = _stand_ins(found)
    except UnknownVLLM as error:
        raise LoopUnavailable(f"the loop layer can't run here: {error}") from None
    try:
        for patch in patches:
            _apply(patch, resolve(patch))
    except RouteError as error:
        raise UsageError(f"--patch: {error}") from None
    return found, stand_ins


def _apply(spec: str, patch: Callable[..., Any]) -> None:
    from kvroute.errors import RouteError

    try:
        patch()
    except RouteError:
        raise
    except Exception as error:
        raise UsageError(f"--patch: {spec}: the patch failed ({error!r})") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep vLLM from saying what it thinks of this machine; a server started later is as it was."""
    name = "VLLM_LOGGING_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _stand_ins(device: str) -> list[str]:
    from kvroute import cpu
    from kvroute.fingerprint import distribution

    distribution()  # says in one line that there is no vLLM, or two
    with _quiet():
        for name in MODULES:  # once, before a lane's time runs or a process is forked
            importlib.import_module(name)
    return cpu.apply_loop() if device == "cpu" else []


def load_pack(name: str, device: str) -> tuple[Callable[..., Any], bool]:
    """Return a pack, and whether it takes heads of other sizes than 128 + 64 and 128.

    Raises
    ------
    UsageError
        When it can't be imported.

    """
    from kvroute import packs
    from kvroute.errors import RouteError
    from kvroute.settings import resolve

    if name == "fused":
        return packs.fused_pack(device.partition(":")[0])[1], device == "cpu"
    try:
        return resolve(name), False
    except RouteError as error:
        raise UsageError(f"--pack: {error}; or leave it out for the fused one") from None


def run_loop(
    request: LoopRequest,
    progress: campaign.Progress = campaign.silent,
    stop: Stop | None = None,
) -> evidence.LoopEvidence:
    """Run the loop layer, and write ``loop.json`` and ``loop.xml`` to ``request.out``.

    They are written when the run begins and whenever a lane ends, with the others as not covered:
    a run that is killed leaves that. SIGINT, SIGTERM and SIGHUP end the run in the same way, and
    ``stop`` has the name of the signal then.

    Raises
    ------
    UsageError
        Something that was asked for can't be used.
    LoopUnavailable
        There is no vLLM here that the suite knows.

    """
    started, start = datetime.now(UTC), time.monotonic()
    for lane in request.lanes:
        if lane not in lanes.LANES:
            raise UsageError(f"unknown lane {lane!r}: expected one of {', '.join(lanes.LANES)}")
    if request.device is not None:
        _check_device(request.lanes, request.device)
    _check_share(request, request.device)
    profile = profile_of(request.profile or default_name())
    evidence.check_folder(request.out)
    device, stand_ins = prepare(request.device, request.patches)
    _check_device(request.lanes, device)
    _check_share(request, device)
    pack, any_dims = load_pack(request.pack, device)
    options = campaign.Options(
        pack=pack,
        name=request.pack,
        device=device,
        profile=profile,
        seed=seed_of(profile, request.seed),
        lanes=tuple(dict.fromkeys(request.lanes))
        or default_lanes(device, _devices(device), share=request.share_gpu),
        patches=request.patches,
        any_dims=any_dims,
        share_gpu=request.share_gpu,
        stop=stop or Stop(),
    )
    from kvroute.untouched import inspect_worker

    ended: dict[str, evidence.Lane] = {}
    worst = 0.0

    def write(unfinished: str = "", here: dict[str, Any] | None = None) -> evidence.LoopEvidence:
        untouched = inspect_worker().to_json()
        done = [
            ended.get(x) or campaign.lane_of(x, time.monotonic(), missing=[unfinished])
            for x in options.lanes
            if unfinished or x in ended
        ]
        verdict, code = judge(done, untouched, request.patches)
        made = evidence.LoopEvidence(
            verdict=verdict,
            exit_code=int(code),
            pack=request.pack,
            pack_sha256=source_sha256(request.pack),
            patches=list(request.patches),
            profile=profile.name,
            device=device,
            seed=options.seed,
            lanes=done,
            untouched=untouched,
            stand_ins=stand_ins,
            worst_share=worst,
            not_covered=not_covered(done, device),
            distribution=DISTRIBUTION,
            environment=here or environment.collect(device, None),
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - start, 3),
            command=request.command,
            share_gpu=_shared(options),
        )
        from equiv import junit

        evidence.write(request.out / "loop.json", made)
        evidence.write_text(request.out / "loop.xml", junit.of_loop(made))
        return made

    def keep(lane: evidence.Lane, share: float) -> None:
        nonlocal worst
        ended[lane.lane] = lane
        worst = max(worst, share)
        write(UNFINISHED, at_first)

    # Asking a GPU what it is would start CUDA, and a process that has it isn't forked.
    at_first = environment.collect("cpu", None) | {"device": {"name": device}}
    write(UNFINISHED, at_first)
    with options.stop.on(*ENDING):  # a signal raises nothing, so none is lost, nor ends a write
        try:
            done, worst = _run_lanes(options, progress, keep)
            ended = {x.lane: x for x in confirm(done, options)}
            options.stop.check()
        except Stopped:
            return write(options.stop.reason)
        return write()


def _check_device(names: Sequence[str], device: str) -> None:
    """Raise ``UsageError`` for a lane that the device doesn't have."""
    for lane in names:
        if lane in lanes.CPU_ONLY and device != "cpu":
            raise UsageError(f"lane {lane!r} runs on the CPU alone: leave --device out")
        if lane in lanes.CUDA_ONLY and device == "cpu":
            raise UsageError(f"lane {lane!r} runs on CUDA devices alone: give --device cuda there")


def _check_share(request: LoopRequest, device: str | None) -> None:
    """Raise ``UsageError`` where ``--share-gpu`` was given and no lane's ranks have GPUs."""
    if request.share_gpu and device == "cpu":
        raise UsageError("--share-gpu: there is no GPU to share on the CPU; give --device cuda")
    if request.share_gpu and request.lanes and "nccl" not in request.lanes:
        raise UsageError("--share-gpu is for the lane nccl alone: add --lane nccl")


def _shared(options: campaign.Options) -> int:
    """Return how many GPUs the ranks of a group shared; 0 where each had its own."""
    from equiv.loop import nccl

    return nccl.backend(options).shared if options.share_gpu else 0


def _devices(device: str) -> int:
    """Return how many devices ranks can have, one each; the CPU's share theirs and count as 0."""
    from equiv.loop import nccl

    return 0 if device == "cpu" else nccl.devices()


def _run_lanes(
    options: campaign.Options,
    progress: campaign.Progress,
    keep: Callable[[evidence.Lane, float], None],
) -> tuple[list[evidence.Lane], float]:
    """Run the lanes: those that start no processes of their own in one that may be lost."""
    served = tuple(lane for lane in options.lanes if lane not in lanes.APART)
    others = tuple(lane for lane in options.lanes if lane in lanes.APART)
    done, worst = isolate.run_lanes(replace(options, lanes=served), progress, keep)
    for name in others:
        more, share = campaign.run_lanes(replace(options, lanes=(name,)), progress)
        done, worst = [*done, *more], max(worst, share)
        keep(more[0], share)
    by_name = {lane.lane: lane for lane in done}
    return [by_name[name] for name in options.lanes if name in by_name], worst


def default_lanes(device: str, devices: int = 0, *, share: bool = False) -> tuple[str, ...]:
    """Return the lanes that a device runs; ``nccl`` where ``devices`` are enough for a group."""
    from equiv.loop import nccl

    left_out: tuple[str, ...] = lanes.CUDA_ONLY if device == "cpu" else lanes.CPU_ONLY
    if devices < nccl.least_devices(share=share):
        left_out += lanes.CUDA_ONLY
    return tuple(lane for lane in lanes.LANES if lane not in left_out)


def judge(
    done: Sequence[evidence.Lane],
    untouched: dict[str, Any],
    patches: Sequence[str],
) -> tuple[str, ExitCode]:
    """Return the verdict and exit code of the lanes.

    A loop that somebody changed, without having been asked to by ``--patch``, is not vLLM's:
    INVALID, whatever its lanes say.
    """
    if not untouched["untouched"] and not patches:
        return "INVALID", ExitCode.INVALID
    if any(lane.state == "failed" for lane in done):
        return "FAIL", ExitCode.FAIL
    if not done or any(lane.state == "not covered" for lane in done):
        return "NOT COVERED", ExitCode.INVALID
    return "PASS", ExitCode.PASS


def not_covered(done: Sequence[evidence.Lane], device: str) -> list[str]:
    """Name what this run didn't reach."""
    from equiv.loop import nccl

    lines = [f"{lane.lane}: {m}" for lane in done for m in (*lane.missing, *lane.left_out)]
    left = [lane for lane in lanes.LANES if lane not in {x.lane for x in done}]
    if left:
        lines.append(f"lanes not run: {', '.join(left)}")
    if device != "cpu" and "nccl" in left and (why := nccl.lacking()):
        lines.append(f"nccl: {why}")
    lines.append(
        "what stands around the loop, compared with no reference here: forward_mha's merge of "
        "context and new tokens, decode, and what MLACommonMetadataBuilder.build hands on"
    )
    if device == "cpu":
        lines.append("no GPU: vLLM's CUDA gathers and merge, its fused ops, and NCCL")
    return lines


@dataclass(frozen=True)
class Reproduced:
    """One case's result in lines."""

    lines: list[str]
    exit_code: ExitCode


def repro(line: str, patches: Sequence[str] = ()) -> Reproduced:
    """Run one case again and tell everything about it.

    Raises
    ------
    UsageError
        The case can't be read, or something that it names can't be had.
    LoopUnavailable
        There is no vLLM here that the suite knows.

    """
    one = case.parse(line)
    device, stand_ins = prepare(one.device, patches)
    pack, _ = load_pack(one.pack, device)
    result = isolate.run_one(one, pack)
    batch = ", ".join(f"{query} + {context}" for query, context in one.requests)
    lines = [
        f"case      {one}",
        f"batch     {batch} (query + context tokens)",
        f"plan      {result.chunks} context chunks; {', '.join(result.kinds) or 'none made'}",
        f"result    {result.status}: {FINDINGS.get(result.status, 'as claimed')}",
    ]
    lines += [f"detail    {result.detail}"] if result.detail else []
    lines += [f"raised in {result.raised_in}"] if result.raised_in else []
    lines += [f"bound     {result.worst:.3f} of it used"] if result.worst else []
    lines += [f"hashes    inputs {result.input_hash}, outputs {result.output_hash}"]
    lines += [f"stand-ins {', '.join(stand_ins)}"] if stand_ins else []
    return Reproduced(lines, ExitCode.FAIL if result.failed else ExitCode.PASS)
