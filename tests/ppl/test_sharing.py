"""Servers whose ranks share GPUs: what a run says of itself, and which aren't a pair."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_vllm
from fake_vllm import Options as Fake
from test_kill import finish, start
from test_run import _quick, fake, go, texts  # noqa: F401 - fixtures

from equiv import document
from equiv.command import run_app
from equiv.gate.collect import Piece
from equiv.gate.facts import texts_sentence
from kvroute import serve
from ppl import dcp, dcp_evidence, evidence, judge, outputs, ready, report, servers, sharing
from ppl.cli import ppl_app
from ppl.errors import PplError
from ppl.evidence import PplEvidence
from ppl.facts import ARMS, SHARED, Instance, ServerFacts
from ppl.observe import Snapshot
from ppl.options import Options
from ppl.servers import Attached, Launched

Start = Callable[..., str]
LINE = "collectives between GPUs: 2 ranks on 1 GPU, connected by sockets"
ONE, TWO = {"ranks": 2, "gpus": 1}, {"ranks": 4, "gpus": 2}


@pytest.fixture
def shared(fake: Start, texts: Path, tmp_path: Path) -> PplEvidence:  # noqa: F811
    return go(*(fake(route=r, shared="yes") for r in ("stock", "fused")), texts, tmp_path / "out")


# -- a run ----------------------------------------------------------------------------


def test_a_pair_that_shares_is_identical_and_says_what_it_is(
    shared: PplEvidence, tmp_path: Path
) -> None:
    made, out = shared, tmp_path / "out"
    assert (made.verdict, made.exit_code) == ("IDENTICAL", 0)
    assert sharing.WARNING in made.decided.reasons
    assert made.warnings[0] == sharing.WARNING
    assert [x for x in made.not_covered if "GPU" in x] == [f"{arm}: {LINE}" for arm in ARMS]
    outputs.leave(out, made, judge.stored([out]))
    for name in ("ppl.json", "ppl.md", "ppl.html"):
        text = (out / name).read_text(encoding="utf-8")
        assert "SHARED GPU: a server" in text, name
        assert LINE in text, name
        if name != "ppl.json":
            assert "SHARED GPU: 2 ranks on 1 GPU, connected by sockets" in text, name
    piece = Piece(out / "ppl.json", "ppl.json", "", "servers", made)
    assert texts_sentence(piece).startswith("SHARED GPU, IDENTICAL")


def test_a_comparison_of_what_it_left_says_the_same(shared: PplEvidence, tmp_path: Path) -> None:
    again = judge.compare_stored([tmp_path / "out"])
    assert (again.verdict, again.decided) == (shared.verdict, shared.decided)
    assert (again.warnings, again.not_covered) == (shared.warnings, shared.not_covered)


@pytest.mark.parametrize("name", ["warnings", "decided"])
def test_evidence_that_hides_it_contradicts_itself(
    name: str, shared: PplEvidence, tmp_path: Path
) -> None:
    bare = shared.decided.model_copy(update={"reasons": ("every token",)})
    changed = {"warnings": [], "decided": bare}[name]
    (wrong,) = evidence.contradictions(shared.model_copy(update={name: changed}))
    assert wrong.startswith("ranks shared a GPU, and the ")
    assert "don't say so" in wrong
    path = tmp_path / "out" / "ppl.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written["warnings"] = []
    path.write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(PplError, match="don't say so"):
        evidence.read(path)


def test_both_marks_stand_together(fake: Start, texts: Path, tmp_path: Path) -> None:  # noqa: F811
    urls = (fake(route=r, shared="yes", fp8="yes") for r in ("stock", "fused"))
    made = go(*urls, texts, tmp_path / "out", emulate_fp8=True)
    assert [x.partition(":")[0] for x in made.decided.reasons[-2:]] == ["EMULATED", "SHARED GPU"]
    piece = Piece(tmp_path, "ppl.json", "", "servers", made)
    assert texts_sentence(piece).startswith("fp8 prefill EMULATED, SHARED GPU, IDENTICAL")


@pytest.mark.parametrize("first", ["", "yes"])
@pytest.mark.parametrize("what", ["shared", "fp8"])
def test_the_gate_s_sentence_says_it_of_any_of_several_runs(
    what: str,
    first: str,
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    parted = tmp_path / "parted"
    parted.mkdir()
    for text in sorted(texts.iterdir())[::2]:
        text.rename(parted / text.name)
    for mine, given in ((texts, first), (parted, "" if first else "yes")):
        urls = (fake(route=r, **{what: given}) for r in ("stock", "fused"))
        go(*urls, mine, tmp_path / mine.name / "out", emulate_fp8=what == "fp8" and bool(given))
    made = judge.compare_stored([tmp_path / mine.name / "out" for mine in (texts, parted)])
    assert made.verdict == "IDENTICAL", made.decided
    said = texts_sentence(Piece(tmp_path, "ppl.json", "", "servers", made))
    mark = {"shared": "SHARED GPU", "fp8": "fp8 prefill EMULATED"}[what]
    assert said.startswith(f"{mark}, IDENTICAL: 4 of 4 texts")


def test_an_ordinary_run_says_nothing_of_it(fake: Start, texts: Path, tmp_path: Path) -> None:  # noqa: F811
    made = go(fake(route="stock"), fake(route="fused"), texts, tmp_path / "out")
    said = document.markdown(report.blocks(made)) + made.model_dump_json()
    assert "GPU" not in said.replace("prefill backend for fp8 (none on a CPU or Hopper)", "")
    assert SHARED not in said
    assert texts_sentence(Piece(tmp_path, "ppl.json", "", "servers", made)).startswith("IDENTICAL")


@pytest.mark.parametrize(
    ("stock", "fused", "says"),
    [
        ("yes", "", "the servers share GPUs differently: 2 ranks on 1 GPU in stock, a GPU for"),
        ("", "yes", "differently: a GPU for each rank in stock, 2 ranks on 1 GPU in fused"),
        (
            "yes",
            "one rank",
            "fused: its ranks differ in sharing GPUs: rank 0: 2 ranks on 1 GPU; rank 1: a GPU for",
        ),
        ("one rank", "one rank", "stock: its ranks differ in sharing GPUs: rank 0: 2 ranks"),
    ],
)
def test_servers_that_share_in_another_way_are_invalid(
    stock: str,
    fused: str,
    says: str,
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    urls = fake(route="stock", shared=stock), fake(route="fused", shared=fused)
    made = go(*urls, texts, tmp_path / "out")
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert any(says in r for r in made.decided.reasons), made.decided.reasons


def test_what_metrics_can_not_tell_is_not_covered(
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ("--max-num-batched-tokens", "512", "--dcp", "2")
    urls = (fake(route=r, dev=False, shared="yes") for r in ("stock", "fused"))
    made = go(*urls, texts, tmp_path / "out", arguments=words)
    assert made.verdict == "IDENTICAL", made.decided
    said = [x for x in made.not_covered if "whether ranks shared a GPU" in x]
    assert [x.partition(":")[0] for x in said] == list(ARMS)


# -- servers of our own ---------------------------------------------------------------


def test_both_servers_are_started_with_it() -> None:
    for asked in (True, False):
        source = Launched(Options(share_gpu=asked), "m", "cuda")
        pair = dcp.Pair(Options(share_gpu=asked), "m", "cuda")
        made = [x.serve_options(arm) for x in (source, pair) for arm in ARMS]
        assert [o.share_gpu for o in made] == [asked] * 4


def test_a_run_goes_on_with_it_and_not_without(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    out, words = tmp_path / "out", ("--repeats", "1", "--launches", "1")
    made = finish(texts, out, *words, "--share-gpu", shared="yes")
    assert made.verdict == "IDENTICAL", made.decided
    assert made.run is not None
    assert made.run.asked["share_gpu"] is True
    assert sharing.WARNING in made.decided.reasons
    again = finish(texts, out, *words, "--share-gpu", shared="yes")
    assert len(again.run.instances) == len(made.run.instances)  # nothing was started
    for gone, given in ((out, words), (tmp_path / "plain", (*words, "--share-gpu"))):
        if not gone.exists():
            plain = finish(texts, gone, *words)
            assert "share_gpu" not in plain.run.asked
        with start(texts, gone, *given) as run:
            said, _ = run.communicate(timeout=120)
        assert run.returncode == 2
        assert "share_gpu (stored" in said


def test_ranks_with_a_gpu_each_lose_collectives_by_it_all_the_same(
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ("--repeats", "1", "--launches", "1", "--share-gpu")
    made = finish(texts, tmp_path / "out", *words)
    assert not any(x.startswith(sharing.MARK) for x in (*made.warnings, *made.decided.reasons))
    off = "--share-gpu switches them off, and its ranks have a GPU each"
    assert [x for x in made.not_covered if "share" in x] == [
        f"{arm}: vLLM's collectives by peers' memory: {off}" for arm in ARMS
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "there is no GPU here"),
        (["dcp"], "there is no GPU here"),
        (["run", "--stock", "http://a:1", "--fused", "http://b:1"], "--stock and --fused name"),
        (["dcp", "--alone", "http://a:1", "--sharded", "http://b:1"], "--alone and --sharded name"),
    ],
)
def test_where_it_can_not_be_it_is_one_line_before_anything_starts(
    words: list[str],
    says: str,
    texts: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "detect_device", lambda: "cpu")
    monkeypatch.setattr(serve, "small_model", lambda *_, **__: tmp_path)
    monkeypatch.setattr(servers, "has_vllm", lambda: True)
    monkeypatch.setattr(servers, "ServerProcess", lambda *a: started.append(a))
    given = [*words, "--share-gpu", "--texts", str(texts), "--out", str(tmp_path / "out")]
    assert run_app(ppl_app, given, "bytegate ppl") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--share-gpu" in said
    assert says in said
    assert started == []


def test_a_session_that_is_amiss_does_not_make_a_shared_run_forget_it(
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Servers of others, at the same addresses: shared, then with a silent rank, then plain."""
    ports = dict.fromkeys(ARMS, 0)
    said: list[PplEvidence] = []
    for facts, silent in (({"shared": "yes"}, 0), ({"shared": "yes"}, 1), ({}, 0)):
        made = [
            fake_vllm.serve(Fake(route=r, port=ports[r], silent=silent, **facts))[0] for r in ARMS
        ]
        ports = {r: s.server_address[1] for r, s in zip(ARMS, made, strict=True)}
        for one in made:
            threading.Thread(target=one.serve_forever, args=(0.02,), daemon=True).start()
        try:
            said.append(go(*(f"http://127.0.0.1:{ports[r]}" for r in ARMS), texts, tmp_path / "x"))
        finally:
            for one in made:
                one.shutdown()
                one.server_close()
    assert [x.verdict for x in said] == ["IDENTICAL", "INVALID", "INVALID"]
    assert all(sharing.WARNING in x.decided.reasons for x in said)
    assert "it had 2 ranks on 1 GPU and has a GPU for each rank" in said[2].decided.reasons[0]


# -- launches, and a sharded server against one alone ------------------------------------


def server(told: Any, arm: str = "stock", channel: str = "collective_rpc") -> ServerFacts:
    facts: dict[str, Any] = {
        "arm": arm,
        "url": "",
        "launched": False,
        "model": "",
        "max_model_len": 1,
        "settings": {},
        "settings_sha256": None,
        "channel": channel,
        "route": None,
        "versions": {},
        "facts": {SHARED: told} if told else {},
    }
    return ServerFacts(**facts)


def test_a_server_that_comes_back_with_other_gpus_is_another() -> None:
    alone, one, two = server(None), server(ONE), server(TWO)
    assert ready.changed(alone, one) == "it had a GPU for each rank and has 2 ranks on 1 GPU"
    assert ready.changed(one, alone) == "it had 2 ranks on 1 GPU and has a GPU for each rank"
    assert ready.changed(one, two) == "it had 2 ranks on 1 GPU and has 4 ranks on 2 GPUs"
    assert ready.changed(one, server(ONE)) == ready.changed(alone, server(None)) == ""
    untold = server(None, channel="metrics")
    assert ready.changed(one, untold) == "channel was collective_rpc and is metrics"
    assert sharing.between(one, untold) == sharing.between(untold, one) == []


def test_what_is_told_in_another_form_is_still_told() -> None:
    assert sharing.of({SHARED: 3}) == "shared, as 3"
    assert sharing.of({SHARED: None}) == sharing.of({}) == ""
    assert sharing.amiss(Snapshot(facts={SHARED: ONE})) == sharing.amiss(Snapshot()) == []


@pytest.mark.parametrize(("alone", "sharded"), [("yes", "yes"), ("", "yes"), ("", "")])
def test_a_sharded_server_against_one_alone(alone: str, sharded: str, fake: Start) -> None:  # noqa: F811
    urls = fake(route="untouched", shared=alone), fake(route="fused", shared=sharded)
    asked = Options(stock=urls[0], fused=urls[1], route="fused")
    found, source = dcp.Found(), Attached(asked)
    pair = source.get(ARMS, lambda arm: Instance(arm=arm, launch=1, number=1, why="planned"))
    for arm in ARMS:
        dcp._inspect(asked, source, pair[arm], dcp.NAMES[arm], found)
    dcp._unlike(pair, found)
    wrong = [x for x in found.amiss if "share" in x]
    assert len(wrong) == (alone != sharded)
    assert all("a GPU for each rank in alone, 2 ranks on 1 GPU in sharded" in x for x in wrong)
    assert (f"alone: {LINE}" in found.not_covered) == bool(alone)
    assert (f"sharded: {LINE}" in found.not_covered) == bool(sharded)
    made = dcp_evidence.figures([], amiss=[], not_covered=[], facts=found.facts)
    said = document.markdown(dcp_evidence.blocks(made))
    shows = bool(alone or sharded)
    assert (sharing.WARNING in made.reasons) == shows
    assert ("SHARED GPU: 2 ranks on 1 GPU, connected by sockets" in said) == shows


@pytest.mark.parametrize("asked", [True, False])
def test_of_a_sharded_server_too_it_is_listed_what_the_flag_switched_off(
    asked: bool,  # noqa: FBT001
    fake: Start,  # noqa: F811
) -> None:
    options = Options(stock=fake(), fused=fake(route="fused"), route="fused", share_gpu=asked)
    found, source = dcp.Found(), Attached(options)
    pair = source.get(ARMS, lambda arm: Instance(arm=arm, launch=1, number=1, why="planned"))
    dcp._inspect(options, source, pair["fused"], "sharded", found)
    said = "sharded: vLLM's collectives by peers' memory"
    assert any(x.startswith(said) for x in found.not_covered) == asked


def test_a_report_of_it_that_hides_it_is_damaged(tmp_path: Path) -> None:
    told = {"sharded": {"facts": {SHARED: ONE}}}
    made = dcp_evidence.figures([], amiss=["why"], not_covered=[], facts=told)
    dcp_evidence.write(tmp_path, made, "")
    assert dcp_evidence.read(tmp_path / "dcp.json").reasons == ["why", sharing.WARNING]
    raw = json.loads((tmp_path / "dcp.json").read_text(encoding="utf-8"))
    (tmp_path / "dcp.json").write_text(json.dumps(raw | {"reasons": ["why"]}), encoding="utf-8")
    with pytest.raises(PplError, match="ranks shared a GPU, and the reasons don't say so"):
        dcp_evidence.read(tmp_path / "dcp.json")


def test_a_benchmark_never_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    from ppl import serving

    monkeypatch.setenv("BYTEGATE_SHARE_GPU", "1")
    entry = type("Entry", (), {"name": "bytegate"})()
    monkeypatch.setattr(serve.importlib.metadata, "entry_points", lambda **_: [entry])
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda _: object())
    made = serving.options_of("org/model", 2, 2, (), device="cuda")
    launch = serve.plan(made, os.environ, "cuda")
    assert "BYTEGATE_SHARE_GPU" not in launch.environment
    assert "--disable-custom-all-reduce" not in launch.command
