"""``bytegate equiv``: choose candidates, run them, judge, write the evidence."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equiv import campaign, candidates, environment, evidence, ledger, parallel, partial, worker
from equiv.errors import ExitCode, UsageError
from equiv.lanes import DEFAULT_SMS, LANES, Target
from equiv.ledger import Seen
from equiv.modes import CUDA_MODES
from equiv.pairs import OpPair, load_pair
from equiv.pool import Worker
from equiv.profiles import default_name, profile_of, seed_of
from equiv.stopping import ENDING, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from equiv.stopping import Stop


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; None where the default was left."""

    pair: str = "kvpack"
    candidates: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    profile: str | None = None
    device: str | None = None
    seed: int | None = None
    out: Path = Path("out/equiv")
    ledger: Path | None = None
    library: str | None = None
    command: str = "bytegate equiv"
    replaces: tuple[str, ...] = ()
    """Files of an earlier run in ``out`` that the same command will write after this."""


def find_device(name: str | None) -> str:
    """Return the device to run on: the one asked for, else the GPU where there is one.

    Raises
    ------
    UsageError : unknown, or a GPU was asked for and torch sees none.

    """
    import torch

    if name is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        msg = f"unknown device {name!r}: expected cpu, cuda or cuda:N"
        raise UsageError(msg)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        msg = (
            f"--device {name}: torch {torch.__version__} sees {count} GPUs; "
            "run on a GPU host, or leave --device out"
        )
        raise UsageError(msg)
    return f"cuda:{index or 0}"


def available_memory() -> int:
    """Return the bytes of memory that are free for the taking; 0 where that can't be told."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = next((x for x in text.splitlines() if x.startswith("MemAvailable:")), None)
    return int(found.split()[1]) << 10 if found else 0


def target_of(device: str) -> Target:
    """Describe a device for the lanes."""
    import torch

    if device == "cpu":
        return Target("cpu", DEFAULT_SMS, memory_bytes=available_memory())
    found = torch.cuda.get_device_properties(device)
    return Target(
        device,
        found.multi_processor_count,
        torch.cuda.device_count(),
        found.total_memory,
    )


def check_lanes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the lanes asked for, all by default.

    Raises
    ------
    UsageError : unknown.

    """
    for name in names:
        if name not in LANES:
            msg = f"unknown lane {name!r}: expected one of {', '.join(LANES)}"
            raise UsageError(msg)
    return tuple(dict.fromkeys(names)) or LANES


def check_library(library: str | None) -> None:
    """Check that a library that was given is there.

    Raises
    ------
    UsageError : it isn't.

    """
    if library is not None and not Path(library).is_file():
        raise UsageError(
            f"--library {library}: there is no such file; "
            "give the path of _C_stable_libtorch.abi3.so"
        )


def prepare(request: Request) -> tuple[OpPair, campaign.Options]:
    """Check everything that was asked for before anything runs.

    Raises
    ------
    UsageError : with one line on what can't be used.

    """
    pair = load_pair(request.pair)
    for name in request.candidates:
        candidates.check_name(pair, name)
    lanes = check_lanes(request.lanes)
    profile = profile_of(request.profile or default_name())
    entries = ledger.load(request.ledger)
    ledger.check_names(entries, pair)
    check_library(request.library)
    device = find_device(request.device)
    for name in request.candidates:
        if candidates.is_own(name):
            continue
        devices = pair.candidates[name].devices
        if device.partition(":")[0] not in devices:
            msg = (
                f"candidate {name!r} runs on {', '.join(devices)} alone, and the device is {device}"
            )
            raise UsageError(msg)
    evidence.check_folder(request.out)
    return pair, campaign.Options(
        pair=pair,
        target=target_of(device),
        profile=profile,
        seed=seed_of(profile, request.seed),
        lanes=lanes,
        entries=entries,
        versions=environment.versions(request.library),
        library=request.library,
        ledger=str(request.ledger) if request.ledger else None,
    )


def try_loading(pair: OpPair, options: campaign.Options, names: Iterable[str]) -> None:
    """Load somebody's own candidates once, before others have run for minutes.

    Raises
    ------
    UsageError : one can't be imported.

    """
    for name in names:
        spec = worker.spec_of(pair, name, options.target.device, library=options.library)
        with contextlib.suppress(Stopped), Worker(pair, spec, options.stop):
            pass


def judge(
    found: Sequence[evidence.Candidate],
    asked: Sequence[str],
    reference: Sequence[evidence.LedgerUse],
) -> tuple[str, ExitCode]:
    """Return the verdict and exit code of candidates.

    A failure decides. A lane that lacks its least counts is not covered; so is a candidate that
    was asked for by name and can't run. A default candidate that can't run here is listed, and
    doesn't decide, as long as one candidate ran.
    """
    if any(c.state == "failed" for c in found) or any(u.state == "gone" for u in reference):
        return "FAIL", ExitCode.FAIL
    ran = [c for c in found if c.lanes]
    asked_missing = any(c.name in asked and c.state == "not covered" for c in found)
    if not ran or asked_missing or any(c.state == "not covered" for c in ran):
        return "NOT COVERED", ExitCode.INVALID
    return "PASS", ExitCode.PASS


def run(
    request: Request,
    progress: Callable[[str, str, int, int], None] | None = None,
    stop: Stop | None = None,
) -> evidence.EquivEvidence:
    """Run what was asked for, and write ``equiv.json`` and ``equiv.xml`` to ``request.out``.

    They are written when the run begins, and whenever a lane ends or finds something, as NOT
    COVERED, or FAIL where there is a finding: a run that is killed leaves that.

    Parameters
    ----------
    stop : is set by SIGINT, SIGTERM and SIGHUP, and ends the run: what isn't finished then is not
        covered.

    Raises
    ------
    UsageError : something that was asked for can't be used.

    """
    started, start = datetime.now(UTC), time.monotonic()
    pair, options = prepare(request)
    options = replace(options, stop=stop or options.stop)
    asked = request.candidates
    names = asked or tuple(n for n in pair.candidates if n != "stock")
    names = tuple(dict.fromkeys(names))
    here: dict[str, Any] = {}

    def made_of(found: partial.Found, *, whole: bool) -> evidence.EquivEvidence:
        made = [found[name][0] for name in names]
        reference = reference_ledger([s for _, s in found.values()], made, options, whole=whole)
        verdict, code = judge(made, asked, reference)
        if whole or not here:
            here.update(environment.collect(options.target.device, request.library))
        return evidence.EquivEvidence(
            verdict=verdict,
            exit_code=int(code),
            pair=pair.name,
            profile=options.profile.name,
            device=options.target.device,
            seed=options.seed,
            lanes=list(options.lanes),
            candidates=made,
            reference_ledger=reference,
            not_covered=not_covered(made, options),
            distribution=distribution(options),
            environment=dict(here),
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - start, 3),
            command=request.command,
        )

    def save(found: partial.Found) -> None:
        write(request.out, made_of(found, whole=False))

    so_far = partial.SoFar(names, options.lanes, save)
    with options.stop.on(*ENDING):
        earlier = partial.Earlier(request.out, "equiv.json", "equiv.xml", *request.replaces)
        so_far.write()
        try:
            if len(names) > 1:
                try_loading(pair, options, filter(candidates.is_own, names))
            done = parallel.each(
                names,
                lambda name: campaign.run_candidate(
                    name, options, progress or campaign.silent, so_far.keep
                ),
                at_once=parallel.at_once(options.target),
                stop=options.stop,
            )
        except UsageError:
            if not so_far.began:
                earlier.put_back()
            raise
        made = made_of(
            dict(zip(names, done, strict=True)),
            whole=not options.stop.is_set() or not any(x.missing for c, _ in done for x in c.lanes),
        )
        write(request.out, made)
    return made


def reference_ledger(
    met: Iterable[Mapping[str, Seen]],
    found: Sequence[evidence.Candidate],
    options: campaign.Options,
    *,
    whole: bool,
) -> list[evidence.LedgerUse]:
    """Return the uses of what is declared of the reference itself, over all candidates' cases."""
    seen: dict[str, Seen] = defaultdict(Seen)
    for one in met:
        for entry_id, s in one.items():
            merge(seen[entry_id], s)
    patterns_ran = any(x.lane == "patterns" for c in found for x in c.lanes)
    return [
        campaign.ledger_use(e, seen[e.id], patterns_ran=patterns_ran, whole=whole)
        for e in options.entries
        if e.against == "oracle"
        and e.applies(options.pair.name, "stock", options.target.device, options.versions)
    ]


def write(folder: Path, made: evidence.EquivEvidence) -> None:
    """Write the evidence and its junit form."""
    from equiv import junit

    evidence.write(folder / "equiv.json", made)
    evidence.write_text(folder / "equiv.xml", junit.of_equiv(made))


def merge(into: Seen, other: Seen) -> None:
    """Add one candidate's count of a ledger entry to another's."""
    into.elements += other.elements
    into.cases += other.cases
    into.eligible_cases += other.eligible_cases
    for key, patterns in other.patterns.items():
        into.patterns.setdefault(key, set()).update(patterns)


def not_covered(found: Sequence[evidence.Candidate], options: campaign.Options) -> list[str]:
    """Name everything that could not run here, once."""
    lines = []
    if not options.target.cuda:
        lines.append(f"no GPU: the pair on CUDA, and the modes {', '.join(CUDA_MODES)}")
    for c in found:
        if not c.lanes:
            lines.append(f"candidate {c.name}: {c.reason}")
        for x in c.lanes:
            lines += [f"{c.name}, {x.lane}: {m}" for m in x.missing]
            lines += [f"{c.name}, {x.lane}: {m}" for m in x.left_out]
    left = [lane for lane in LANES if lane not in options.lanes]
    if left:
        lines.append(f"lanes not asked for: {', '.join(left)}")
    return list(dict.fromkeys(lines))


def distribution(options: campaign.Options) -> str:
    """Say what the drawn cases are drawn from."""
    dims = ", ".join(f"{n} {d.minimum}..{d.maximum}" for n, d in options.pair.dims.items())
    axes = ", ".join(
        f"{a} in {{{', '.join(map(str, v))}}}"
        for a, v in options.pair.domain_axes.items()
        if len(options.pair.axes[a]) > 1
    )
    return (
        f"hypothesis's draws at seed {options.seed}: {dims}, about one in eighty near a mark of "
        f"the launch plan, one in eighty log-uniform up to {options.profile.drawn_rows:,} rows, "
        f"one in ten tiny, the others from 1 to 1,070 rows; {axes}; fills of uniform bits, e4m3's "
        "range, special patterns and uniform rows. hypothesis varies what it saw and comes back "
        "to edges, so draws aren't strictly independent; the bound takes them as if they were, "
        "and speaks of this distribution alone"
    )
