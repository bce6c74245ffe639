"""PyNccl that is off: what runs as decode is garbage, and a run says so or is invalid."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_vllm
from fake_vllm import Options as Fake
from test_run import _quick, fake, go, texts  # noqa: F401 - fixtures

from equiv import document
from ppl import dcp, judge, outputs, pynccl, ready, report
from ppl.facts import ARMS, Instance, ServerFacts
from ppl.observe import PYNCCL, Snapshot, pynccl_of
from ppl.options import Options
from ppl.plan import Configuration, request
from ppl.servers import Attached
from ppl.store import Store

Start = Callable[..., str]
MARK = "decode under DCP on"


def test_a_run_without_decode_tails_says_it_in_every_report(
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    made = go(fake(pynccl="off"), fake(route="fused", pynccl="off"), texts, out)
    assert made.verdict == "IDENTICAL", made.decided
    said = [x for x in made.not_covered if x.startswith(MARK)]
    assert said == [
        f"{MARK} {arm}: PyNccl is off, so vLLM's reduce-scatter returns uninitialised memory: "
        "steps of up to 1 tokens are garbage; vLLM 0.33 wants NCCL 2.29.7 or later"
        for arm in ARMS
    ]
    outputs.leave(out, made, judge.stored([out]))
    for name in ("ppl.json", "ppl.md", "ppl.html"):
        text = (out / name).read_text(encoding="utf-8")
        assert f"{MARK} fused" in text, name
    assert f"NOT COVERED: {said[0]}" in document.markdown(report.blocks(made))
    assert judge.compare_stored([out]).not_covered == made.not_covered


@pytest.mark.parametrize("told", ["on", ""])
def test_where_it_is_on_or_not_known_nothing_changes(
    told: str,
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    urls = (fake(route=r, pynccl=told, decode=300) for r in ("stock", "fused"))
    made = go(*urls, texts, tmp_path / "out", burst=True, bursts=1)
    assert made.verdict == "IDENTICAL", made.decided
    assert made.run is not None
    assert made.run.configuration is not None
    planned = [request(t.text, t.tokens, made.run.configuration) for t in made.run.texts]
    assert pynccl.of_texts("stock", planned, 300)  # the twin has the steps that the fault has
    assert not any("PyNccl" in x for x in made.not_covered)
    assert [f.facts.get(PYNCCL) for f in made.run.servers] == [True if told else None] * 2


def test_texts_with_a_tail_that_runs_as_decode_are_invalid(
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    urls = (fake(route=r, pynccl="off", decode=300) for r in ("stock", "fused"))
    made = go(*urls, texts, out)
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert made.run is not None
    tails = {t.text: t.tokens % 512 for t in made.run.texts}
    short = {name for name, n in tails.items() if n <= 300}
    assert short
    for name, n in tails.items():
        said = [r for r in made.decided.reasons if f"text {name}: its step of {n} tokens" in r]
        assert len(said) == (2 if name in short else 0), made.decided.reasons
    assert next(Store(out).records(), None) is None
    assert judge.compare_stored([out]).decided == made.decided
    assert any(x.startswith(MARK) and "up to 300 tokens" in x for x in made.not_covered)


def test_a_run_that_was_refused_goes_on_once_it_is_on(texts: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    made = [fake_vllm.serve(Fake(route=r, pynccl="off", decode=300)) for r in ("stock", "fused")]
    for server, _ in made:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        urls = [f"http://127.0.0.1:{server.server_address[1]}" for server, _ in made]
        assert go(*urls, texts, out).verdict == "INVALID"
        for _, one in made:
            one.options.pynccl = "on"
        done = go(*urls, texts, out)
    finally:
        for server, _ in made:
            server.shutdown()
            server.server_close()
    assert done.verdict == "IDENTICAL", done.decided


def test_a_server_that_comes_back_with_another_is_another() -> None:
    off, on, untold = (
        ServerFacts(
            arm="stock",
            url="",
            launched=False,
            model="",
            max_model_len=1,
            settings={},
            settings_sha256=None,
            channel=None,
            route=None,
            versions={},
            facts=told,
        )
        for told in ({PYNCCL: False}, {PYNCCL: True}, {})
    )
    assert ready.changed(off, on) == "pynccl was False and is True"
    assert ready.changed(off, off) == ready.changed(untold, off) == ready.changed(on, untold) == ""


def test_a_burst_is_invalid_and_not_sent(
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    urls = (fake(route=r, pynccl="off") for r in ("stock", "fused"))
    made = go(*urls, texts, tmp_path / "out", burst=True, bursts=2)
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    for arm in ARMS:
        assert any(
            f"{arm} launch 1" in r and f"in a burst of all texts: {pynccl.IN_A_BURST}" in r
            for r in made.decided.reasons
        ), made.decided.reasons
    assert made.identity is not None  # the texts alone have no such step
    assert made.identity.identical_texts == made.identity.texts
    assert not (tmp_path / "out" / "burst").exists()


@pytest.mark.parametrize("fused", ["off", "off in one rank"])
def test_servers_that_differ_in_it_are_invalid(
    fused: str,
    fake: Start,  # noqa: F811
    texts: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    urls = fake(pynccl="on"), fake(route="fused", pynccl=fused)
    made = go(*urls, texts, tmp_path / "out")
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    why = "the arms' configurations differ: PyNccl is on in stock, off in fused"
    assert why in made.decided.reasons


def test_a_step_counts_where_it_has_scores() -> None:
    made = Configuration(budget=512, page=16, max_model_len=9216, workspace_rows=1024)
    for tokens, decode, named in ((1025, 1, 0), (1026, 1, 0), (1026, 2, 1), (1030, 5, 0)):
        planned = request("t", tokens, made.model_copy(update={"decode_tokens": decode}))
        assert len(pynccl.of_texts("stock", [planned], decode)) == named
    short = request("t", 40, made)
    assert pynccl.of_texts("stock", [short], 40)  # a prompt alone is such a step as well


def test_ranks_are_taken_together() -> None:
    for told, found in (
        ([True, True], True),
        ([True, False], False),
        ([None, False], False),
        ([True, None], None),
        ([None], None),
        ([], None),
    ):
        assert pynccl_of([{PYNCCL: x} for x in told]) is found
    assert pynccl_of([{}]) is None


def test_another_collective_of_decode_steps_is_not_meant() -> None:
    seen = Snapshot(facts={PYNCCL: False})
    assert pynccl.off(seen, {})
    assert pynccl.off(seen, {pynccl.BACKEND: "ag_rs"})
    assert not pynccl.off(seen, {pynccl.BACKEND: "a2a"})
    assert "few (how few isn't told) tokens" in pynccl.open_("fused", {})


def test_a_sharded_server_against_one_alone_says_it(fake: Start) -> None:  # noqa: F811
    for told, named in (("off", True), ("on", False)):
        asked = Options(stock=fake(), fused=fake(route="fused", pynccl=told), route="fused")
        found = dcp.Found()
        source = Attached(asked)
        servers = source.get(ARMS, lambda arm: Instance(arm=arm, launch=1, number=1, why="planned"))
        dcp._inspect(asked, source, servers["fused"], "sharded", found)
        assert any(x.startswith(f"{MARK} sharded: PyNccl is off") for x in found.not_covered) == (
            named
        )


def test_a_benchmark_says_that_its_answers_are_garbage() -> None:
    off = {"stock": [True, True], "fused": [True, False]}
    (line,) = pynccl.while_serving(off, ())
    assert line.startswith("what decode under DCP answered on fused: PyNccl is off")
    assert pynccl.while_serving(off, ("--dcp-comm-backend", "a2a")) == []
    assert pynccl.while_serving(off, ("--dcp-comm-backend=a2a",)) == []
    assert pynccl.while_serving({"stock": [True, None], "fused": []}, ()) == []
