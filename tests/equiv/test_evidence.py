"""Evidence files: written whole, read back equal, and refused where damaged."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiv import evidence
from equiv.errors import ExitCode, UsageError
from equiv.evidence import (
    Candidate,
    EquivEvidence,
    FaultRow,
    FaultsEvidence,
    Finding,
    Lane,
    LedgerUse,
    Sample,
)

CASE = "kvpack/inductor/cpu/shapes/T=1,H=1/-/zero.0/eager/kv_nope.0:1"

SAMPLE = Sample(CASE, "equal", "0" * 32, "f" * 32)
FINDING = Finding(
    lane="shapes",
    kind="divergence",
    case=CASE,
    found=CASE,
    after_cases=12,
    detail="k: 1 bytes in 1 of 192 elements",
    voices="the oracle agrees with the reference: the candidate is wrong",
    raised_in="",
    repro=f"bytegate equiv repro {CASE}",
    occurrences=3,
    set_elements=1,
)
LANE = Lane(
    lane="shapes",
    state="failed",
    cases=20,
    enumerated=8,
    drawn=12,
    equal=15,
    refused=1,
    declared=1,
    undefined=0,
    oracle_checked=20,
    guarded=20,
    bytes_compared=1 << 33,
    seconds=1.5,
    kinds={"dtype=bf16": 20},
    least={"dtype=bf16": 20},
    ranges={"T": (0, 16_897)},
    median_rows=400,
    layouts_differ={"v": 3},
    missing=[],
    left_out=["outputs past 2^31 elements"],
    bound=None,
    findings=[FINDING],
    samples=[SAMPLE],
)
USE = LedgerUse("D1", "seen", 4, 5, 900, {"bf16 k.nope": 30_512}, "saturates", "docs/ledger.md#d1")
MADE = EquivEvidence(
    verdict="FAIL",
    exit_code=1,
    pair="kvpack",
    profile="dev",
    device="cpu",
    seed=7,
    lanes=["shapes"],
    candidates=[
        Candidate("inductor", "failed", "", "out", {"candidate_ok": True}, [LANE], [USE], 0, 1),
        Candidate("vllm", "not covered", "needs a GPU", "", {}, [], [], 0, 0),
    ],
    reference_ledger=[],
    not_covered=["candidate vllm: needs a GPU"],
    distribution="hypothesis's draws",
    environment={"versions": {"torch": "2.13.0"}, "libraries": [], "suite": {"commit": None}},
    started="2026-11-30T03:45:30+00:00",
    seconds=12.5,
    command="bytegate equiv",
)
FAULTS = FaultsEvidence(
    verdict="PASS",
    exit_code=0,
    pair="kvpack",
    profile="gate",
    device="cpu",
    seed=0,
    faults=[
        FaultRow(
            "K01", "halves", "caught", "shapes", 3, CASE, "divergence", "k", "clean", 0.5, "a.b:c"
        )
    ],
    false_alarms={"cases": 10, "alarms": [], "candidates": {"stock": 10}},
    environment={},
    started="2026-11-30T03:45:30+00:00",
    seconds=1.0,
    command="bytegate equiv faults",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with sound evidence."""
    evidence.write(tmp_path / "equiv.json", MADE)
    return tmp_path / "equiv.json"


def refused(path: Path, kind: type = EquivEvidence) -> str:
    messages = []
    readers: list[Callable[[Path], Any]] = [lambda p: evidence.read(p, kind), evidence.read_any]
    for read in readers:
        with pytest.raises(UsageError) as e:
            read(path)
        assert e.value.exit_code == ExitCode.USAGE
        messages.append(str(e.value))
    assert messages[0] == messages[1]
    assert len(messages[0].splitlines()) == 1
    assert str(path) in messages[0]
    return messages[0]


def damaged(path: Path, change: Any) -> str:
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")
    return refused(path)


def unsealed(read: Any) -> Any:
    """Return what was read without the digest that writing added."""
    assert len(read.content_sha256) == 64
    return dataclasses.replace(read, content_sha256="")


# -- written and read ---------------------------------------------------------------


@pytest.mark.parametrize("made", [MADE, FAULTS], ids=["equiv", "faults"])
def test_what_is_written_is_read_back_equal(
    tmp_path: Path, made: EquivEvidence | FaultsEvidence
) -> None:
    path = tmp_path / "file.json"
    evidence.write(path, made)
    checked = dataclasses.replace(made, validated=True)
    assert unsealed(evidence.read(path, type(made))) == checked
    assert unsealed(evidence.read_any(path)) == checked


texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    detail=texts,
    environment=st.dictionaries(
        texts, st.one_of(texts, st.none(), st.integers(), st.lists(texts, max_size=2)), max_size=3
    ),
    bound=st.one_of(st.none(), st.floats(0, 1)),
    ranges=st.dictionaries(texts, st.tuples(st.integers(), st.integers()), max_size=2),
)
def test_whatever_it_says_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    detail: str,
    environment: dict[str, Any],
    bound: float | None,
    ranges: dict[str, tuple[int, int]],
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.json"
    finding = dataclasses.replace(FINDING, detail=detail)
    lane = dataclasses.replace(LANE, bound=bound, ranges=ranges, findings=[finding])
    candidate = dataclasses.replace(MADE.candidates[0], lanes=[lane])
    made = dataclasses.replace(MADE, candidates=[candidate], environment=environment)
    evidence.write(path, made)
    assert unsealed(evidence.read(path)) == dataclasses.replace(made, validated=True)


def test_a_file_is_written_whole_or_not_at_all(path: Path) -> None:
    before = path.read_bytes()
    bad = dataclasses.replace(MADE, seconds=math.nan)
    with pytest.raises(ValueError, match="not JSON compliant"):
        evidence.write(path, bad)
    with pytest.raises(TypeError):
        evidence.write_text(path, b"bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_others_may_read_the_file(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o644


def test_without_pydantic_evidence_is_written_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    path = tmp_path / "equiv.json"
    evidence.write(path, MADE)
    assert json.loads(path.read_text(encoding="utf-8"))["validated"] is False
    for use in (lambda: evidence.read(path), evidence.json_schema):
        with pytest.raises(UsageError, match=r"needs pydantic: pip install 'bytegate\[report\]'"):
            use()
    monkeypatch.undo()
    assert unsealed(evidence.read(path)) == MADE


# -- damaged ------------------------------------------------------------------------


def test_an_edit_that_contradicts_nothing_shows_all_the_same(path: Path) -> None:
    def later(raw: dict[str, Any]) -> None:
        raw["seconds"] += 1.0

    assert "isn't what was written: content_sha256" in damaged(path, later)


def test_other_blanks_and_another_order_are_the_same_content(path: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(dict(reversed(raw.items()))), encoding="utf-8")
    assert unsealed(evidence.read(path)).verdict == raw["verdict"]


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert "can't read the evidence" in refused(tmp_path / "none.json")
    assert "can't read the evidence" in refused(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"nonsense"])
def test_no_json(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    assert "can't read the evidence" in refused(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_truncated(path: Path, share: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "can't read the evidence" in refused(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"equiv"'])
def test_no_object(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    assert "is of schema None, expected bytegate.equiv version 1" in refused(path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"schema": "other"}, "('other', 1)"),
        ({"schema_version": 2}, "('bytegate.equiv', 2)"),
        ({"schema_version": "1"}, "('bytegate.equiv', '1')"),
        ({"schema": None}, "(None, 1)"),
    ],
)
def test_another_schema(path: Path, change: dict[str, Any], found: str) -> None:
    assert f"is of schema {found}, expected" in damaged(path, lambda raw: raw.update(change))


def test_another_kind_of_evidence(path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"is of schema .*bytegate.equiv.*, expected bytegate.faults"
    ):
        evidence.read(path, FaultsEvidence)


def at(raw: Any, *names: str | int) -> Any:
    for name in names:
        raw = raw[name]
    return raw


PLACES: list[tuple[str | int, ...]] = [
    (),
    ("candidates", 0),
    ("candidates", 0, "lanes", 0),
    ("candidates", 0, "lanes", 0, "findings", 0),
    ("candidates", 0, "lanes", 0, "samples", 0),
    ("candidates", 0, "ledger", 0),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda p: ".".join(map(str, p)) or "top")
def test_an_extra_field_is_named(path: Path, place: tuple[str | int, ...]) -> None:
    message = damaged(path, lambda raw: at(raw, *place).update(surprise=1))
    assert "is damaged" in message
    assert ".".join(map(str, (*place, "surprise"))) in message


@pytest.mark.parametrize("place", PLACES, ids=lambda p: ".".join(map(str, p)) or "top")
def test_a_missing_field_is_named(path: Path, place: tuple[str | int, ...]) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    name = next(iter(at(raw, *place)))
    message = damaged(path, lambda raw: at(raw, *place).pop(name))
    assert ".".join(map(str, (*place, name))) in message


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("seed",), "many"),
        (("verdict",), 3),
        (("candidates",), {}),
        (("candidates", 0, "lanes", 0, "cases"), 1.5),
        (("candidates", 0, "lanes", 0, "ranges"), {"T": [1]}),
        (("candidates", 0, "lanes", 0, "findings", 0, "detail"), None),
    ],
)
def test_a_value_of_another_type_is_named(
    path: Path, place: tuple[str | int, ...], value: Any
) -> None:
    message = damaged(path, lambda raw: at(raw, *place[:-1]).update({place[-1]: value}))
    assert ".".join(map(str, place)) in message


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("verdict",), "MAYBE"),
        (("exit_code",), 0),
        (("candidates", 0, "state"), "fine"),
        (("candidates", 0, "lanes", 0, "cases"), -1),
        (("candidates", 0, "lanes", 0, "equal"), 999),
        (("seed",), "7"),
    ],
    ids=["verdict", "exit code", "state", "negative", "sum", "text for a number"],
)
def test_what_cannot_be_true_is_refused(
    path: Path, place: tuple[str | int, ...], value: Any
) -> None:
    damaged(path, lambda raw: at(raw, *place[:-1]).update({place[-1]: value}))


@pytest.mark.parametrize(
    "text", [f'{{"seed": {"1" * 5000}}}', "[" * 100_000], ids=["a long number", "deep nesting"]
)
def test_what_the_json_parser_gives_up_on(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    refused(path)


# -- folders and the schema ---------------------------------------------------------


def test_a_folder_is_made(tmp_path: Path) -> None:
    evidence.check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    for folder in (file, file / "below", Path("/proc/bytegate")):
        with pytest.raises(UsageError, match="can't write to the folder") as e:
            evidence.check_folder(folder)
        assert str(folder) in str(e.value)
        assert "give --out another one" in str(e.value)
        assert len(str(e.value).splitlines()) == 1


def test_the_json_schema_is_exported() -> None:
    schema = evidence.json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == {f.name for f in dataclasses.fields(EquivEvidence)}
    assert schema["additionalProperties"] is False
    parts = schema["$defs"]
    assert {"Candidate", "Lane", "Finding", "LedgerUse", "Sample"} <= set(parts)
    assert all(p["additionalProperties"] is False for p in parts.values())
    optional = {"schema", "schema_version", "validated", "content_sha256"}
    assert set(schema["required"]) == set(schema["properties"]) - optional
    assert "FaultRow" in evidence.json_schema(FaultsEvidence)["$defs"]
