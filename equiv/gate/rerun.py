"""Recorded cases of the kernel layer, run again: their hashes, and whether they pass or fail.

Inputs follow from the case alone, so their hash must come out anywhere. Outputs are the stock ops':
theirs is compared where the device is of the same kind and torch (for the loop vLLM as well) of the
same version; elsewhere it isn't covered. ``rerun_loop`` does the same for the loop.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from equiv import environment
from equiv.case import Case, parse
from equiv.document import counted
from equiv.errors import BytegateError, UsageError
from equiv.gate.collect import Piece
from equiv.result import NOT_ALONE, PASSING, Result

Told = tuple[str, Literal["holds", "differs", "not covered"], str]
"""What was looked at, how it came out, and details."""

SECONDS = 120.0
"""After which no further case of a file is started."""
FAULTS = "planted faults, on their smallest cases"


def rerun(piece: Piece, pick: random.Random, count: int, library: str | None) -> Iterator[Told]:
    """Run a random sample of a file's cases again."""
    from equiv.gate import rerun_loop

    if not count:
        yield "recorded cases", "not covered", "none was asked for (--cases 0)"
        if piece.layer == "kernel":
            yield from sources((c.name, c.source_sha256) for c in piece.made.candidates)
        elif piece.layer == "loop":
            yield from sources([(piece.made.pack, piece.made.pack_sha256)])
    elif piece.layer == "kernel":
        lanes = [x for c in piece.made.candidates for x in c.lanes]
        yield from sources((c.name, c.source_sha256) for c in piece.made.candidates)
        yield from _kernel(piece, some([s for x in lanes for s in x.samples], pick, count), library)
        found = some([f for x in lanes for f in x.findings], pick, count)
        yield from _findings(piece, found, library)
    elif piece.layer == "kernel_faults":
        rows = [r for r in piece.made.faults if r.outcome == "caught" and r.smallest]
        yield from _faults(piece, some(rows, pick, count), library)
    elif piece.layer == "loop":
        yield from rerun_loop.loop(piece, pick, count)
    else:
        yield from rerun_loop.faults(piece, pick, count)


def some(items: list[Any], pick: random.Random, count: int) -> list[Any]:
    """Pick so many of some items, all where there are fewer."""
    return pick.sample(items, min(count, len(items)))


@dataclass
class Tally:
    """What came of cases that ran again; ``elsewhere`` says why outputs can't be compared."""

    elsewhere: str
    inputs: int = 0
    outputs: int = 0
    passes: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    """Candidates that can't be had here, so that stock ran alone."""

    def add(self, sample: Any, result: Any, *, outputs: bool, passes: bool) -> None:
        """Compare one result with what was recorded.

        ``outputs`` and ``passes`` say whether those are to be compared at all.
        """
        line = sample.case
        if passes and not self.elsewhere:
            self.passes += 1
            if result.failed:
                what = f"{sample.status} was recorded, and it fails: {result.detail}"
                self.wrong.append(f"{line}: {what}")
                return
        if not result.input_hash:
            self.left.append(f"{line}: {result.status}, so there is no hash")
            return
        self.inputs += 1
        if result.input_hash != sample.input_hash:
            what = f"inputs are {result.input_hash}, recorded {sample.input_hash}"
            self.wrong.append(f"{line}: {what}")
        elif outputs and not self.elsewhere:
            self.outputs += 1
            if result.output_hash != sample.output_hash:
                what = f"outputs are {result.output_hash}, recorded {sample.output_hash}"
                self.wrong.append(f"{line}: {what}")

    def told(self) -> Iterator[Told]:
        """Yield what came of it."""
        for line in self.wrong:
            yield "a recorded case", "differs", line
        if self.inputs and not self.wrong:
            yield "inputs of recorded cases", "holds", f"{self.inputs} of a random sample"
        if self.outputs and not self.wrong:
            text = f"{self.outputs} of them; with its candidate {self.passes} passed again"
            yield "stock's outputs in recorded cases", "holds", text
        if self.elsewhere:
            yield "stock's outputs in recorded cases", "not covered", self.elsewhere
        if self.absent:
            text = f"{', '.join(sorted(self.absent))} can't be had here: stock ran alone"
            yield "candidates of recorded cases", "not covered", text
        if self.left:
            text = f"{counted(len(self.left), 'case')} not compared: {self.left[0]}"
            yield "recorded cases", "not covered", text


# -- whether outputs can be compared -------------------------------------------------------


def _part(found: Mapping[str, Any], part: str, name: str) -> str:
    inner = found.get(part)
    value = inner.get(name) if isinstance(inner, dict) else None
    return str(value).split(" (")[0]


def elsewhere(there: Mapping[str, Any], device: str, names: Iterable[str] = ("torch",)) -> str:
    """Say why outputs made there can't be compared with outputs made here; empty where they can."""
    here = environment.collect(device, None)
    made_on = "cuda" if _part(there, "device", "name").startswith("cuda") else "cpu"
    if made_on != device.partition(":")[0]:
        return f"made on {made_on}, and this is {device}"
    where = ("device", "model") if made_on == "cuda" else ("cpu", "torch_capability")
    kinds = [_part(e, *where) for e in (there, here)]
    if kinds[0] != kinds[1]:
        return f"made on {kinds[0]}, and this is {kinds[1]}"
    for name in names:
        versions = [_part(e, "versions", name) for e in (there, here)]
        if versions[0] != versions[1]:
            return f"made with {name} {versions[0]}, and here is {versions[1]}"
    return ""


def device_here(recorded: str) -> str:
    """Return the device to run a case on: of the recorded kind where there is one."""
    import torch

    return "cuda:0" if recorded.startswith("cuda") and torch.cuda.is_available() else "cpu"


# -- the kernel layer ----------------------------------------------------------------------


def _kernel(piece: Piece, samples: list[Any], library: str | None) -> Iterator[Told]:
    if not samples:
        yield "recorded cases", "not covered", "none has a hash"
        return
    device = device_here(piece.made.device)
    tally = Tally(elsewhere(piece.environment, device))
    own_ledger = "--ledger" in shlex.split(piece.made.command)
    start = time.monotonic()
    for s in samples:
        if time.monotonic() - start > SECONDS:
            tally.left.append(f"{s.case}: not started after {SECONDS:.0f} s")
            continue
        try:
            case, whole = _case(s.case, device)
            result, as_recorded = _run(case, library)
        except BytegateError as e:
            tally.left.append(f"{s.case}: {e}")
            continue
        if case is not None and not as_recorded:
            tally.absent.add(case.candidate)
        tally.add(s, result, outputs=whole, passes=whole and as_recorded and not own_ledger)
    yield from tally.told()


def sources(named: Iterable[tuple[str, str]]) -> Iterator[Told]:
    """Compare the sources of somebody's own kernels, by name, with their recorded digests."""
    from equiv.candidates import source_sha256

    for name, recorded in named:
        if not recorded:
            continue
        here, what = source_sha256(name), f"the source of {name}"
        if not here:
            yield what, "not covered", "it isn't here"
        elif here != recorded:
            yield what, "differs", f"it is {here[:12]} here, and {recorded[:12]} is recorded"
        else:
            yield what, "holds", here[:12]


def other_device(piece: Piece) -> str:
    """Say why a file's cases can't run on the device that they ran on; empty where they can."""
    device, recorded = device_here(piece.made.device), str(piece.made.device)
    same = device.partition(":")[0] == recorded.partition(":")[0]
    return "" if same else f"made on {recorded}, and this is {device}"


def _findings(piece: Piece, rows: list[Any], library: str | None) -> Iterator[Told]:
    """Run the cases of findings again: each must fail again, where its candidate can be had."""
    why = other_device(piece)
    if "--ledger" in shlex.split(piece.made.command):
        why = why or "judged by a ledger that isn't the suite's (--ledger)"
    if rows and why:
        yield "findings", "not covered", f"{counted(len(rows), 'finding')}: {why}"
    again = Again()
    for f in () if why else rows:
        if again.late(f.case) or again.not_alone(f, NOT_ALONE):
            continue
        try:
            result, as_recorded = _run(_case(f.case, device_here(piece.made.device))[0], library)
        except BytegateError as e:
            again.left.append(f"{f.case}: {e}")
            continue
        if not as_recorded:
            again.left.append(f"{f.case}: its candidate can't be had here")
        elif result.status in PASSING:
            again.wrong.append(f.case)
        else:
            again.failed += 1
    yield from again.told("findings", "a finding", "its case passes")


@dataclass
class Again:
    """What came of cases that have to fail again."""

    failed: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def late(self, line: str) -> bool:
        """Whether it is too late to start another case."""
        if time.monotonic() - self.start <= SECONDS:
            return False
        self.left.append(f"{line}: not started after {SECONDS:.0f} s")
        return True

    def not_alone(self, finding: Any, words: str) -> bool:
        """Whether a finding says of itself that its case alone doesn't show it."""
        if words not in finding.detail:
            return False
        self.left.append(f"{finding.case}: it showed {words}")
        return True

    def told(self, many: str, one: str, passes: str) -> Iterator[Told]:
        """Yield what came of it."""
        for line in self.wrong:
            yield one, "differs", f"{passes}: {line}"
        if self.failed:
            yield many, "holds", f"{self.failed} of the picked fail again"
        if self.left:
            text = f"{counted(len(self.left), 'case')} not repeated: {self.left[0]}"
            yield many, "not covered", text


def _case(line: str, device: str) -> tuple[Case | None, bool]:
    """Return a recorded case to run here, and whether its outputs are those recorded."""
    from equiv.modes import CUDA_MODES

    case = parse(line)
    if case.device == device or (case.device.startswith("cuda") and device.startswith("cuda")):
        return case, True
    if case.mode in CUDA_MODES:  # its inputs change from replay to replay
        return None, False
    return case.with_(device=device), False


def _run(case: Case | None, library: str | None) -> tuple[Result, bool]:
    """Run a case, with its candidate where that can be had here, else stock against itself."""
    from equiv import candidates, ledger
    from equiv.pairs import load_pair
    from equiv.pool import Unavailable, Worker
    from equiv.worker import spec_of

    if case is None:
        return Result("undefined"), False
    pair = load_pair(case.pair)
    versions = environment.versions(library)
    for name in dict.fromkeys((case.candidate, "stock")):
        known = pair.candidates.get(name)
        if known is not None and case.device.partition(":")[0] not in known.devices:
            continue
        one = case.with_(candidate=name)
        entries = ledger.applying(ledger.load(), pair.name, name, case.device, versions)
        try:
            candidates.check_name(pair, name)
            spec = spec_of(pair, name, case.device, library=library, entries=entries)
            with Worker(pair, spec) as worker:
                return worker.run(one), name == case.candidate
        except (Unavailable, UsageError):
            continue
    raise UsageError(f"neither {case.candidate} nor stock can run here")


def _faults(piece: Piece, rows: list[Any], library: str | None) -> Iterator[Told]:
    why = other_device(piece)
    if why:
        yield FAULTS, "not covered", why
    again = Again()
    for r in () if why else rows:
        if again.late(r.smallest):
            continue
        try:
            result, as_recorded = _run(
                _case(r.smallest, device_here(piece.made.device))[0], library
            )
        except BytegateError as e:
            again.left.append(f"fault {r.id}: {e}")
            continue
        if not as_recorded:
            again.left.append(f"fault {r.id}: {r.candidate} can't be had here")
        elif result.status in PASSING:
            again.wrong.append(f"fault {r.id}, {r.smallest}")
        else:
            again.failed += 1
    yield from again.told(FAULTS, "a planted fault", "its smallest case passes")
