"""``gate.json``: the verdict, on what it rests, and the digests of every file that was read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from equiv import seal
from equiv.errors import BytegateError, ExitCode, UsageError
from equiv.evidence import write_text
from equiv.gate.policy import Policy

Word = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT COVERED", "INVALID"]
State = Literal["passed", "failed", "inconclusive", "not covered", "invalid"]

CODES: dict[str, ExitCode] = {
    "PASS": ExitCode.PASS,
    "FAIL": ExitCode.FAIL,
    "INCONCLUSIVE": ExitCode.INCONCLUSIVE,
    "NOT COVERED": ExitCode.INVALID,
    "INVALID": ExitCode.INVALID,
}


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Cell(_Frozen):
    """One layer on one device.

    Attributes
    ----------
    layer : a key of ``equiv.gate.collect.LAYERS``.
    device : ``"cpu"``, ``"gpu MODEL"``; without evidence also ``"gpu"`` and ``"any device"``.
    required : whether the policy's verdict rests on it.
    reasons : why it didn't pass.
    remarks : what it leaves out, and what a reader has to know besides.
    files : of its evidence.

    """

    layer: str
    device: str
    state: State
    required: bool
    reasons: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class File(_Frozen):
    """A file that was read: from where ``gate.json`` lies, and the SHA-256 of its bytes."""

    name: str
    path: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    layer: str


class GateEvidence(_Frozen):
    """``gate.json``.

    Attributes
    ----------
    problems : files that can't be judged, and what disagrees; with any of them nothing is judged.
    commit : that made the evidence; empty where none is stated.
    suite : the bytegate that judged.
    ran : the commands that this gate ran, and their exit codes; empty with ``--from``.

    """

    schema_name: Literal["bytegate.gate"] = Field(default="bytegate.gate", alias="schema")
    schema_version: Literal[1] = 1
    verdict: Word
    exit_code: int
    reasons: tuple[str, ...]
    cells: tuple[Cell, ...]
    problems: tuple[str, ...]
    not_covered: tuple[str, ...]
    notes: tuple[str, ...]
    policy: Policy
    policy_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    commit: str
    commit_wanted: str | None = None
    dirty: bool
    files: tuple[File, ...]
    arrays: tuple[str, ...]
    ran: tuple[tuple[str, int], ...]
    suite: dict[str, JsonValue]
    started: str
    seconds: float
    command: str
    content_sha256: str = ""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        populate_by_name=True,
        serialize_by_alias=True,
    )


def verdict_of(cells: tuple[Cell, ...], problems: tuple[str, ...]) -> Word:
    """Return the word for cells: a failure says the most, and what is required must be there.

    Files that can't be judged together give no verdict on anything. A cell that failed, is invalid
    or inconclusive decides wherever it is; one that isn't covered decides where it is required.
    """
    if problems:
        return "INVALID"
    states = [c.state for c in cells]
    for state, word in (
        ("failed", "FAIL"),
        ("invalid", "INVALID"),
        ("inconclusive", "INCONCLUSIVE"),
    ):
        if state in states:
            return word  # type: ignore[return-value]
    if not any(c.state == "passed" for c in cells):
        return "NOT COVERED"
    if any(c.required and c.state == "not covered" for c in cells):
        return "NOT COVERED"
    return "PASS"


def contradictions(made: GateEvidence) -> list[str]:
    """Say what in a verdict can't be true together."""
    wrong = []
    if made.exit_code != CODES[made.verdict]:
        wrong.append(f"verdict {made.verdict} with exit_code {made.exit_code}")
    word = verdict_of(made.cells, made.problems)
    if made.verdict != word:
        wrong.append(f"verdict {made.verdict}, and its cells make it {word}")
    if made.policy_sha256 != made.policy.sha256():
        wrong.append("policy_sha256, and the policy in it has another digest")
    twice = [w for w, n in Counter((c.layer, c.device) for c in made.cells).items() if n > 1]
    wrong += [f"{layer} on {device} has two cells" for layer, device in twice]
    names = {f.name for f in made.files}
    wrong += [
        f"{c.layer} on {c.device} {c.state} without a file of evidence"
        for c in made.cells
        if c.state != "not covered" and not names & set(c.files)
    ]
    return wrong


def write(path: Path, made: GateEvidence) -> None:
    """Write the verdict whole or not at all, with its digest in it."""
    wrong = contradictions(made)
    if wrong:
        raise BytegateError(f"refusing to write a verdict that contradicts itself: {wrong[0]}")
    write_text(path, seal.sealed(made.model_dump_json()))


def read(path: Path) -> GateEvidence:
    """Read and check a verdict.

    Raises
    ------
    UsageError : unreadable, damaged, or it contradicts itself.

    """
    try:
        data = path.read_bytes()
        raw: Any = seal.loads(data)
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"can't read the verdict {path}: {e}") from None
    try:
        made = GateEvidence.model_validate_json(data)
    except ValidationError as e:
        one = e.errors()[0]
        where = ".".join(str(x) for x in one["loc"])
        raise UsageError(f"the verdict {path} is damaged: {where}: {one['msg']}") from None
    damage = seal.broken(raw) if made.content_sha256 else f"it lacks {seal.FIELD}"
    if damage:
        raise UsageError(f"the verdict {path} is damaged: {damage}")
    wrong = contradictions(made)
    if wrong:
        raise UsageError(f"the verdict {path} contradicts itself: {'; '.join(wrong[:3])}")
    return made


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``gate.json``."""
    return GateEvidence.model_json_schema()
