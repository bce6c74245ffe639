"""Emulated fp8 prefill: what a run must have seen of it, and what it says of itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_run import _quick, fake, go, texts  # noqa: F401 - fixtures

from equiv import document
from equiv.gate.collect import Piece
from equiv.gate.facts import texts_sentence
from ppl import emulation, evidence, judge, outputs, report, runner
from ppl.errors import PplError, Stale
from ppl.evidence import PplEvidence
from ppl.observe import Difference
from ppl.options import Options
from ppl.pace import Pace
from ppl.store import Store

Start = Callable[..., str]


@pytest.fixture
def emulated(fake: Start, texts: Path, tmp_path: Path) -> PplEvidence:  # noqa: F811
    urls = fake(route="stock", fp8="yes"), fake(route="fused", fp8="yes")
    return go(*urls, texts, tmp_path / "out", emulate_fp8=True)


def test_an_emulating_pair_is_identical_and_says_what_it_is(
    emulated: PplEvidence, tmp_path: Path
) -> None:
    made, out = emulated, tmp_path / "out"
    assert made.verdict == "IDENTICAL"
    assert emulation.WARNING in made.decided.reasons
    assert made.warnings[0] == emulation.WARNING
    assert not any("fp8" in x for x in made.not_covered)
    assert made.run is not None
    assert made.run.emulates_fp8
    for record in Store(out).records():
        counted = record.observed.counters or {}
        assert counted == record.observed.planned
        assert counted["fp8_calls"] == counted["calls"] != (0, 0)
        assert counted["fp8_packs"] == counted["packs"]
        assert (counted["fp8_packs"] == (0, 0)) == (record.arm == "stock")
    outputs.leave(out, made, judge.stored([out]))
    for name in ("ppl.json", "ppl.md", "ppl.html"):
        text = (out / name).read_text(encoding="utf-8")
        assert "EMULATED: fp8 prefill" in text, name
        assert "FAKE_FP8_EMULATED" in text, name
    piece = Piece(out / "ppl.json", "ppl.json", "", "servers", made)
    assert texts_sentence(piece).startswith("fp8 prefill EMULATED, IDENTICAL")


def test_a_comparison_of_what_it_left_says_the_same(emulated: PplEvidence, tmp_path: Path) -> None:
    again = judge.compare_stored([tmp_path / "out"])
    assert again.verdict == emulated.verdict
    assert again.decided == emulated.decided
    assert again.warnings == emulated.warnings


@pytest.mark.parametrize("name", ["warnings", "decided"])
def test_evidence_that_hides_it_contradicts_itself(name: str, emulated: PplEvidence) -> None:
    assert evidence.contradictions(emulated) == []
    bare = emulated.decided.model_copy(update={"reasons": ("every token",)})
    changed = {"warnings": [], "decided": bare}[name]
    (wrong,) = evidence.contradictions(emulated.model_copy(update={name: changed}))
    assert "don't say so" in wrong


def test_an_ordinary_run_beside_it_is_seen_whichever_is_first(
    emulated: PplEvidence,
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    assert emulated.only_emulated
    other = tmp_path / "other"
    other.mkdir()
    for path in texts.glob("*.txt"):
        text = path.read_text(encoding="utf-8")
        (other / f"another-{path.name}").write_text(f"Another. {text}", encoding="utf-8")
    plain = go(fake(route="stock"), fake(route="fused"), other, tmp_path / "plain")
    assert not plain.only_emulated
    folders = [tmp_path / "out", tmp_path / "plain"]
    for order in (folders, folders[::-1]):
        both = judge.compare_stored(order)
        assert both.verdict == "IDENTICAL"
        assert "EMULATED" in both.marks
        assert not both.only_emulated


def test_an_ordinary_run_names_the_fp8_pack_as_not_covered(
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    made = go(fake(route="stock"), fake(route="fused"), texts, tmp_path / "out")
    (line,) = [x for x in made.not_covered if "fp8" in x]
    assert line.startswith("the fp8 pack in a served model: packs converted bfloat16 alone")
    said = document.markdown(report.blocks(made))
    assert f"NOT COVERED: {line}" in said
    assert "EMULATED" not in said
    assert all(
        "fp8_packs" not in (r.observed.counters or {}) for r in Store(tmp_path / "out").records()
    )


@pytest.mark.parametrize(
    ("asked", "stock", "fused", "says"),
    [
        (True, "yes", "", "fused: it doesn't emulate fp8 prefill, which was asked for"),
        (True, "", "yes", "only the fused server emulates fp8 prefill"),
        (True, "", "", "stock: it doesn't emulate fp8 prefill"),
        (True, "yes", "one rank", "fused: its ranks differ in emulating fp8 prefill"),
        (True, "bf16 calls", "yes", "stock, warm-up: the fp8 branch of the tail wasn't reached"),
        (True, "yes", "bf16 packs", "fused, warm-up: the fp8 pack wasn't reached"),
        (False, "yes", "yes", "it emulates fp8 prefill (FAKE_FP8_EMULATED), which wasn't asked"),
        (False, "yes", "", "only the stock server emulates fp8 prefill"),
    ],
)
def test_servers_that_emulate_something_else_are_invalid(
    asked: bool,  # noqa: FBT001
    stock: str,
    fused: str,
    says: str,
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    urls = fake(route="stock", fp8=stock), fake(route="fused", fp8=fused)
    made = go(*urls, texts, tmp_path / "out", emulate_fp8=asked)
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert any(says in r for r in made.decided.reasons), made.decided.reasons
    assert any(x.startswith(emulation.MARK) for x in made.decided.reasons) == asked


def test_without_dev_mode_it_is_unproven(
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    urls = (fake(route=r, fp8="yes", dev=False) for r in ("stock", "fused"))
    words = ("--max-num-batched-tokens", "512", "--dcp", "2")
    made = go(*urls, texts, tmp_path / "out", emulate_fp8=True, arguments=words)
    assert made.verdict == "INVALID"
    assert any("is unproven: only /collective_rpc" in r for r in made.decided.reasons)


def test_a_burst_in_bf16_is_invalid(fake: Start, texts: Path, tmp_path: Path) -> None:  # noqa: F811
    urls = fake(route="stock", fp8="yes"), fake(route="fused", fp8="yes")
    made = go(*urls, texts, tmp_path / "out", emulate_fp8=True, burst=True, bursts=1)
    assert made.verdict == "IDENTICAL"
    seen = {0: {"calls": 4, "fp8_calls": 4, "packs": 4, "fp8_packs": 3}}
    apart = Difference("", seen, None, None, None, None)
    (why,) = emulation.unreached(apart, packs=True)
    assert "3 of 4 packs of rank 0" in why
    assert emulation.unreached(apart, packs=False) == []


def test_a_run_does_not_go_on_without_it(
    emulated: PplEvidence,
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    assert emulated.run is not None
    stock, fused = (f.url for f in emulated.run.servers)
    options = Options(
        stock=stock, fused=fused, texts=(str(texts),), workspace=1024, out=tmp_path / "out"
    )
    with (
        (tmp_path / "progress").open("a", encoding="utf-8") as log,
        pytest.raises(Stale, match="emulate_fp8_prefill"),
    ):
        runner.run(options, Pace(log))
    written = json.loads((tmp_path / "out" / "ppl.json").read_text(encoding="utf-8"))
    written["warnings"] = []
    (tmp_path / "out" / "ppl.json").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(PplError, match="don't say so"):
        evidence.read(tmp_path / "out" / "ppl.json")
