"""Evidence: what a run leaves behind, as plain frozen values, and the file they make.

The values are standard dataclasses, so that a GPU host needs nothing more to produce them. Reading
somebody's file, exporting the JSON Schema and checking one's own file use pydantic where it is
installed; what is written without it says ``"validated": false``.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equiv import seal
from equiv.errors import BytegateError, UsageError
from equiv.files import write_whole

SCHEMA = "bytegate.equiv"
SCHEMA_VERSION = 1

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Sample:
    """One case as recorded: its line and the xxh3-128 of its inputs and reference outputs."""

    __pydantic_config__ = _STRICT
    case: str
    status: str
    input_hash: str
    output_hash: str


@dataclass(frozen=True)
class Finding:
    """One failure, shrunk.

    Attributes
    ----------
    kind : key of ``equiv.result.FINDINGS``.
    case : the smallest failing case; ``found`` is the one first met, after ``after_cases`` cases of
        its lane.
    detail : in one line: bytes, first place, both elements and what they mean.
    voices : who the oracle says is wrong, or why it says nothing.
    not_shrunk : why the case is no smaller, where it could be.
    raised_in : ``module:function`` of an exception or crash.
    repro : one command that repeats it.
    occurrences : cases of the lane that failed in the same way.

    """

    __pydantic_config__ = _STRICT
    lane: str
    kind: str
    case: str
    found: str
    after_cases: int
    detail: str
    voices: str
    raised_in: str
    repro: str
    occurrences: int
    set_elements: int | None
    """Elements set after a fill of zeros; None where the fill could not be reduced."""
    not_shrunk: str = ""


@dataclass(frozen=True)
class LedgerUse:
    """How often a ledger entry was met.

    ``patterns`` counts distinct input bit patterns by ``"dtype position"``.
    """

    __pydantic_config__ = _STRICT
    id: str
    state: str
    """``"seen"``, ``"gone"`` (declared, eligible cases ran, never met), or ``"not exercised"``."""
    cases: int
    eligible_cases: int
    elements: int
    patterns: dict[str, int]
    reason: str
    reference: str


@dataclass(frozen=True)
class Lane:
    """What one lane did for one candidate.

    Attributes
    ----------
    state : ``"passed"``, ``"failed"`` or ``"not covered"``.
    cases, enumerated, drawn : run; drawn ones are hypothesis's, shrinking not counted.
    equal, refused, declared, undefined : outcomes of the cases that didn't fail.
    kinds : cases by kind; ``least`` what the lane needed of each.
    ranges : least and greatest value of each dimension, and of rows.
    missing : kinds below their least count, or why the lane didn't run.
    left_out : parts of the domain that it doesn't reach on this machine or profile.
    bound : upper bound (95 %) on the failing share of the drawn distribution, 1 - 0.05^(1/n).

    """

    __pydantic_config__ = _STRICT
    lane: str
    state: str
    cases: int
    enumerated: int
    drawn: int
    equal: int
    refused: int
    declared: int
    undefined: int
    oracle_checked: int
    guarded: int
    bytes_compared: int
    seconds: float
    kinds: dict[str, int]
    least: dict[str, int]
    ranges: dict[str, tuple[int, int]]
    median_rows: int
    layouts_differ: dict[str, int]
    missing: list[str]
    left_out: list[str]
    bound: float | None
    findings: list[Finding]
    samples: list[Sample]
    alignment: dict[str, dict[str, int]] = field(default_factory=dict)
    """Cases by where a base or pitch lies, ``"kv_nope base 2"``, and by outcome."""


@dataclass(frozen=True)
class Candidate:
    """One candidate's lanes.

    Attributes
    ----------
    state : ``"passed"``, ``"failed"`` or ``"not covered"``, with ``reason``.
    guard : how its outputs were guarded: ``"dispatch"``, ``"out"`` or ``"malloc"``.
    proof : what shows that the named kernel ran, and for stock that no fused one did.
    source_sha256 : digest of the file, or of the package's folder, that somebody's own kernel came
        from; empty for the pair's candidates, whose sources the environment has.

    """

    __pydantic_config__ = _STRICT
    name: str
    state: str
    reason: str
    guard: str
    proof: dict[str, Any]
    lanes: list[Lane]
    ledger: list[LedgerUse]
    crashes: int
    hangs: int
    source_sha256: str = ""


@dataclass(frozen=True)
class EquivEvidence:
    """``equiv.json``.

    Attributes
    ----------
    verdict : ``"PASS"``, ``"FAIL"``, ``"NOT COVERED"``.
    distribution : what the drawn cases are drawn from, for the bound.
    not_covered : by name, everything that could not run here.

    """

    __pydantic_config__ = _STRICT
    verdict: str
    exit_code: int
    pair: str
    profile: str
    device: str
    seed: int
    lanes: list[str]
    candidates: list[Candidate]
    reference_ledger: list[LedgerUse]
    not_covered: list[str]
    distribution: str
    environment: dict[str, Any]
    started: str
    seconds: float
    command: str
    schema: str = SCHEMA
    schema_version: int = SCHEMA_VERSION
    validated: bool = field(default=False)
    content_sha256: str = ""


@dataclass(frozen=True)
class FaultRow:
    """One planted fault: caught or missed, by which lane, after how many cases.

    ``twin`` is ``"clean"`` where the twin passed the same case and a campaign of its own.
    """

    __pydantic_config__ = _STRICT
    id: str
    title: str
    outcome: str
    lane: str
    cases: int
    smallest: str
    kind: str
    detail: str
    twin: str
    seconds: float
    candidate: str


@dataclass(frozen=True)
class FaultsEvidence:
    """``faults.json``: the planted faults, and the false alarms of clean kernels."""

    __pydantic_config__ = _STRICT
    verdict: str
    exit_code: int
    pair: str
    profile: str
    device: str
    seed: int
    faults: list[FaultRow]
    false_alarms: dict[str, Any]
    environment: dict[str, Any]
    started: str
    seconds: float
    command: str
    resumed: list[str] = field(default_factory=list)
    """What an earlier run, which was ended, had done and kept: numbers, and ``false alarms``."""
    schema: str = "bytegate.faults"
    schema_version: int = SCHEMA_VERSION
    validated: bool = field(default=False)
    content_sha256: str = ""


VERDICTS = {"PASS": 0, "FAIL": 1, "NOT COVERED": 4, "INVALID": 4}
STATES = ("passed", "failed", "not covered")


def contradictions(made: Any) -> list[str]:
    """Say what in evidence can't be true together: verdicts and exit codes, counts and sums."""
    own = getattr(made, "contradictions", None)  # evidence of another kind has rules of its own
    found: list[str] = own() if own is not None else _contradictions(made)
    return found


def _contradictions(made: Any) -> list[str]:
    wrong = []
    if VERDICTS.get(made.verdict) != made.exit_code:
        wrong.append(f"verdict {made.verdict!r} with exit_code {made.exit_code}")
    if isinstance(made, FaultsEvidence):
        missed = [r.id for r in made.faults if r.outcome == "missed"]
        if made.verdict == "PASS" and (missed or made.false_alarms.get("alarms")):
            wrong.append(f"verdict PASS with missed faults {', '.join(missed)} or false alarms")
        return wrong
    if isinstance(made, LoopEvidence):
        return wrong + _loop_contradictions(made)
    failed = False
    for c in made.candidates:
        failed = failed or c.state == "failed"
        if c.state not in STATES:
            wrong.append(f"candidates.{c.name}.state {c.state!r}")
        for x in c.lanes:
            wrong += [f"candidates.{c.name}.lanes.{w}" for w in _lane_contradictions(x)]
        if c.state == "passed" and any(x.state != "passed" for x in c.lanes):
            wrong.append(f"candidates.{c.name} passed, and a lane of it didn't")
    if made.verdict == "PASS" and failed:
        wrong.append("verdict PASS with a candidate that failed")
    return wrong


def _loop_contradictions(made: LoopEvidence) -> list[str]:
    wrong = [f"lanes.{w}" for x in made.lanes for w in _lane_contradictions(x)]
    states = {x.state for x in made.lanes}
    if made.verdict == "PASS" and states != {"passed"}:
        wrong.append("verdict PASS with a lane that didn't pass")
    if made.verdict == "PASS" and not made.patches and not made.untouched.get("untouched"):
        wrong.append("verdict PASS on a loop that isn't vLLM's own")
    return wrong


def _lane_contradictions(x: Lane) -> list[str]:
    wrong = []
    if x.state not in STATES:
        wrong.append(f"{x.lane}.state {x.state!r}")
    counts = (x.cases, x.enumerated, x.drawn, x.equal, x.refused, x.declared, x.undefined)
    if min(*counts, x.bytes_compared, x.oracle_checked, x.guarded) < 0:
        wrong.append(f"{x.lane}: a count below 0")
    if x.cases != x.enumerated + x.drawn:
        wrong.append(f"{x.lane}: cases {x.cases}, enumerated and drawn {x.enumerated + x.drawn}")
    passing = x.equal + x.refused + x.declared + x.undefined
    if passing > x.cases or (not x.findings and passing != x.cases):
        wrong.append(f"{x.lane}: {passing} outcomes that pass of {x.cases} cases")
    if bool(x.findings) != (x.state == "failed"):
        wrong.append(f"{x.lane}: state {x.state!r} with {len(x.findings)} findings")
    return wrong


def _adapter(kind: type) -> Any:
    try:
        import pydantic
    except ImportError:
        return None
    return pydantic.TypeAdapter(kind)


def json_schema(kind: type = EquivEvidence) -> dict[str, Any]:
    """Return the JSON Schema of an evidence file.

    Raises
    ------
    UsageError : pydantic isn't installed.

    """
    adapter = _adapter(kind)
    if adapter is None:
        msg = "the JSON Schema needs pydantic: pip install 'bytegate[report]'"
        raise UsageError(msg)
    schema: dict[str, Any] = adapter.json_schema()
    return schema


def check_folder(folder: Path) -> None:
    """Make the folder, and check that it can be written.

    Raises
    ------
    UsageError : it can't.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as e:
        msg = f"can't write to the folder {folder}: {e.strerror}; give --out another one"
        raise UsageError(msg) from None


def write(path: Path, evidence: Any) -> None:
    """Write evidence to a file whole or not at all, checked by pydantic where it is installed."""
    wrong = contradictions(evidence)
    if wrong:
        raise BytegateError(f"refusing to write evidence that contradicts itself: {wrong[0]}")
    adapter = _adapter(type(evidence))
    value = dataclasses.replace(evidence, validated=adapter is not None)
    text = json.dumps(dataclasses.asdict(value), indent=1, allow_nan=False)
    if adapter is not None:
        adapter.validate_json(text, strict=False)
    write_text(path, seal.sealed(text))


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_whole(path, str.encode(text))


def read(path: Path, kind: type = EquivEvidence) -> Any:
    """Read and check an evidence file.

    Raises
    ------
    UsageError : unreadable, damaged, of another schema, or pydantic isn't installed.

    """
    adapter = _adapter(kind)
    if adapter is None:
        msg = "reading evidence needs pydantic: pip install 'bytegate[report]'"
        raise UsageError(msg)
    try:
        raw = seal.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        msg = f"can't read the evidence {path}: {e}"
        raise UsageError(msg) from None
    wanted = kind.__dataclass_fields__["schema"].default  # type: ignore[attr-defined]
    found = (raw.get("schema"), raw.get("schema_version")) if isinstance(raw, dict) else None
    if found != (wanted, SCHEMA_VERSION):
        msg = f"{path} is of schema {found}, expected {wanted} version {SCHEMA_VERSION}"
        raise UsageError(msg)
    try:
        made = adapter.validate_json(json.dumps(raw), strict=True)
    except ValueError as e:
        first = str(e).splitlines()
        msg = f"the evidence {path} is damaged: {' '.join(x.strip() for x in first[:3])}"
        raise UsageError(msg) from None
    against = contradictions(made)
    if against:
        raise UsageError(f"the evidence {path} contradicts itself: {'; '.join(against[:3])}")
    if damage := seal.broken(raw):
        raise UsageError(f"the evidence {path} is damaged: {damage}")
    return made


def read_any(path: Path) -> Any:
    """Read ``equiv.json``, ``faults.json`` or ``loop.json``, by its own word for which it is.

    Raises
    ------
    UsageError : as ``read``.

    """
    try:
        raw = seal.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        msg = f"can't read the evidence {path}: {e}"
        raise UsageError(msg) from None
    kinds = {"bytegate.faults": FaultsEvidence, "bytegate.loop": LoopEvidence}
    name = raw.get("schema") if isinstance(raw, dict) else None
    return read(path, kinds.get(str(name), EquivEvidence))


@dataclass(frozen=True)
class LoopEvidence:
    """``loop.json``: vLLM's own loop, with and without a pack, against a dense reference.

    Attributes
    ----------
    pack : the pack under test, by name or ``module:function``.
    pack_sha256 : digest of the file or folder that somebody's own pack came from.
    patches : ``module:function`` values that changed vLLM before the run.
    untouched : whether vLLM's loop and what it calls were the wheel's own (``kvroute.untouched``).
    stand_ins : what replaced a thing that the device lacks.
    worst_share : the largest share of its bound against the reference that any result used.
    share_gpu : GPUs that groups of more ranks shared in lane ``nccl``; 0 where each had its own.

    """

    __pydantic_config__ = _STRICT
    verdict: str
    exit_code: int
    pack: str
    patches: list[str]
    profile: str
    device: str
    seed: int
    lanes: list[Lane]
    untouched: dict[str, Any]
    stand_ins: list[str]
    worst_share: float
    not_covered: list[str]
    distribution: str
    environment: dict[str, Any]
    started: str
    seconds: float
    command: str
    schema: str = "bytegate.loop"
    schema_version: int = SCHEMA_VERSION
    pack_sha256: str = ""
    share_gpu: int = 0
    validated: bool = field(default=False)
    content_sha256: str = ""
