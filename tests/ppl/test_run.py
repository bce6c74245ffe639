"""``ppl run`` against fake servers, and with every fault between it and them."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_vllm
from fake_vllm import Options as Fake
from fault_proxy import Proxy

from equiv.command import run_app
from ppl import evidence, facts, judge, kept, preflight, runner, tokens
from ppl import top1 as argmax
from ppl.cli import ppl_app
from ppl.errors import PplError, Stale
from ppl.evidence import PplEvidence
from ppl.options import Options
from ppl.pace import Pace
from ppl.store import Store
from texts.errors import TextError

TEXTS = 4
WORDS = "It was a bright cold day in April, and the clocks were striking thirteen. "


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # It imports torch, and every run of this file would.
    monkeypatch.setattr("ppl.runner.environment.collect", lambda *_: {"test": True})
    monkeypatch.setattr("ppl.transport.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("ppl.transport.MOST_WAIT_S", 0.05)
    monkeypatch.setattr("ppl.scoring.SETTLE_S", 0.5)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(TEXTS):
        (folder / f"text{i}.txt").write_text(f"{i}: " + WORDS * (27 + i), encoding="utf-8")
    return folder


Start = Callable[..., str]


@pytest.fixture
def fake() -> Iterator[Start]:
    """Start fake servers and proxies in threads: ``fake(route="fused", fault="NaN")``."""
    running: list[Any] = []

    def begin(fault: str = "", **facts: Any) -> str:
        server, _ = fake_vllm.serve(Fake(**facts))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        if not fault:
            return url
        proxy = Proxy(url, fault)
        running.append(proxy)
        return proxy.url

    yield begin
    for one in running:
        if isinstance(one, Proxy):
            one.close()
        else:
            one.shutdown()
            one.server_close()


def go(stock: str, fused: str, texts: Path, out: Path, **facts: Any) -> PplEvidence:
    given: dict[str, Any] = {"texts": (str(texts),), "workspace": 1024, "out": out}
    options = Options(stock=stock, fused=fused, **{**given, **facts})
    with Path(out.parent / "progress").open("a", encoding="utf-8") as log:
        made = runner.run(options, Pace(log))
    assert evidence.contradictions(made) == []
    evidence.write(out / "ppl.json", made)
    again = evidence.read(out / "ppl.json")
    assert again == made.model_copy(update={"content_sha256": again.content_sha256})
    return made


def test_two_servers_of_equal_bits_are_identical(fake: Start, texts: Path, tmp_path: Path) -> None:
    made = go(fake(route="stock"), fake(route="fused"), texts, tmp_path / "out")
    assert (made.verdict, made.exit_code) == ("IDENTICAL", 0), made.decided
    assert len(made.runs) == 4
    assert made.run is not None
    assert [f.route for f in made.run.servers] == ["stock", "fused"]
    assert made.run.configuration is not None
    assert made.run.configuration.budget == 512
    # Servers that are there have no log, and were not launched again.
    assert any(x.startswith("scheduler chunks") for x in made.not_covered)
    assert "no server was launched again: there is no noise floor" in made.warnings
    assert not any("NO CONTINUATION" in x for x in made.warnings)


def test_compare_says_the_same_of_what_a_run_left(fake: Start, texts: Path, tmp_path: Path) -> None:
    made = go(fake(route="stock"), fake(route="fused", fault="NaN"), texts, tmp_path / "out")
    again = judge.compare_stored([tmp_path / "out"])
    assert again.decided == made.decided
    assert again.run == made.run


def test_the_command_leaves_every_report(
    fake: Start, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    stock, fused = fake(route="stock"), fake(route="fused")
    words = ["run", "--stock", stock, "--fused", fused, "--texts", str(texts)]
    assert run_app(ppl_app, [*words, "--workspace", "1024", "--out", str(out)], "bytegate ppl") == 0
    assert "bytegate ppl: IDENTICAL" in capsys.readouterr().out
    made = evidence.read(out / "ppl.json")
    assert made.run is not None
    assert made.run.command.startswith("bytegate ppl")
    page = (out / "ppl.html").read_text(encoding="utf-8")
    markdown = (out / "ppl.md").read_text(encoding="utf-8")
    for text in (page, markdown):
        assert "## Servers" in text or "<h2>Servers</h2>" in text
        assert fused in text
        assert made.run.instances[0].why in text
    assert tokens.inputs_sha256(out / "tokens.parquet") == made.inputs_sha256


def test_without_pages_compare_makes_them_elsewhere(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["run", "--stock", fake(route="stock"), "--fused", fake(route="fused"), "--no-pages"]
    words += ["--texts", str(texts), "--workspace", "1024", "--out", str(out)]
    assert run_app(ppl_app, words, "bytegate ppl") == 0
    made = evidence.read(out / "ppl.json")
    assert not list(out.glob("*.html")) + list(out.glob("*.md")) + list(out.glob("*.parquet"))
    assert run_app(ppl_app, ["compare", str(out), "--out", str(out)], "bytegate ppl") == 0
    again = evidence.read(out / "ppl.json")
    assert (again.decided, again.run) == (made.decided, made.run)
    assert (out / "ppl.html").exists()
    assert (out / "tokens.parquet").exists()


FAULTS = {
    "shift rows": "shifted by one token from row 0 on",
    "shift values": "is shifted by one token",
    "short": "short: ",
    "-9999.0": "a sentinel",
    "NaN": "NaN or infinite",
    "null": "null in row 60",
    "null row": "null in row 39",
    "no log-probs": "no prompt log-probs (null)",
    "other ids": "answered for other token ids",
    "one text of other ids": "is scored from other ids than stock launch 1 repeat 1",
    "rounded": "rounds log-probs",
    "one in 5 fails": "refused with HTTP 500: dropped by the proxy",
    "stale": "answered for other token ids",
    "prefix cache": "prefix caching is on",
    "cached tokens": "16 tokens came from a prefix cache",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arm", ["stock", "fused"])
def test_a_fault_on_the_way_makes_it_invalid(
    fault: str, arm: str, fake: Start, texts: Path, tmp_path: Path
) -> None:
    urls = {a: fake(route=a, fault=fault if a == arm else "none") for a in ("stock", "fused")}
    made = go(urls["stock"], urls["fused"], texts, tmp_path / "out")
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert any(FAULTS[fault] in r for r in made.decided.reasons), made.decided.reasons


def test_the_clean_twin_of_all_of_them_passes(fake: Start, texts: Path, tmp_path: Path) -> None:
    stock, fused = (fake(route=a, fault="none") for a in ("stock", "fused"))
    assert go(stock, fused, texts, tmp_path / "out").verdict == "IDENTICAL"


def test_a_small_bias_on_exposed_tokens_is_different(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    fused = fake(route="fused", fault="bias")
    made = go(fake(route="stock"), fused, texts, tmp_path / "out", margin=1e-4)
    assert (made.verdict, made.exit_code) == ("DIFFERENT", 1), made.decided
    assert all(t.unexposed.differing == 0 for t in made.texts)


def test_retries_are_of_the_transport_and_counted(fake: Start, texts: Path, tmp_path: Path) -> None:
    fused = fake(route="fused", fault="busy once")
    made = go(fake(route="stock"), fused, texts, tmp_path / "out")
    assert made.run is not None
    # The proxy's server did the work twice, and the counters of the first try aren't the second's.
    assert made.run.retries == {"HTTP 503": 1}
    assert made.verdict == "IDENTICAL", made.decided


@pytest.mark.parametrize(
    ("stock", "fused", "says"),
    [
        ({"route": "fused"}, {"route": "fused"}, "both servers run the same route, fused"),
        ({"route": "stock"}, {"route": "stock"}, "both servers run the same route, stock"),
        ({"route": "fused"}, {"route": "stock"}, "the arms are swapped"),
        ({}, {"dev": False, "metrics": False}, "fused: its route is unproven"),
        ({}, {"speculative": True}, "speculative decoding is on"),
        ({}, {"model": "another"}, "model differ"),
        ({}, {"version": "0.0.other"}, "versions differ"),
        ({}, {"budget": 256}, "the arms' configurations differ: scheduler_config.max_num_batched"),
        ({}, {"seed": 1}, "the arms' configurations differ: model_config.seed"),
        ({}, {"extra_calls": 1}, "rank 0 counted"),
        ({}, {"silent": 1}, "fused: 1 of its 2 ranks tell their counters"),
        ({}, {"workspace": 512}, "rank 0 counted"),
        ({"dev": False}, {"dev": False, "budget": 256}, "rank 0 counted"),
    ],
)
def test_what_a_preflight_finds(
    stock: dict[str, Any],
    fused: dict[str, Any],
    says: str,
    fake: Start,
    texts: Path,
    tmp_path: Path,
) -> None:
    a = fake(**{"route": "stock", **stock})
    b = fake(**{"route": "fused", **fused})
    stated = ("--max-num-batched-tokens", "512", "--dcp", "2")
    made = go(a, b, texts, tmp_path / "out", arguments=stated)
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert any(says in r for r in made.decided.reasons), made.decided.reasons
    assert judge.compare_stored([tmp_path / "out"]).decided == made.decided


@pytest.mark.parametrize(("ranks", "dcp"), [(8, 8), (8, 4), (4, 4)])
def test_any_number_of_ranks_is_planned_and_counted(
    ranks: int, dcp: int, fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = (fake(route=a, ranks=ranks, dcp=dcp) for a in ("stock", "fused"))
    made = go(stock, fused, texts, tmp_path / "out")
    assert made.verdict == "IDENTICAL", made.decided
    assert made.run is not None
    assert made.run.configuration is not None
    assert made.run.configuration.ranks == dcp
    counted = made.run.servers[1].facts
    assert (counted["world"], counted["dcp"]) == (ranks, dcp)
    lacking = fake(route="fused", ranks=ranks, dcp=dcp, silent=1)
    made = go(stock, lacking, texts, tmp_path / "lacking")
    assert made.verdict == "INVALID"
    assert f"fused: {ranks - 1} of its {ranks} ranks tell their counters" in made.decided.reasons


def test_servers_without_dev_mode_are_told_by_their_metrics(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = (fake(route=a, dev=False) for a in ("stock", "fused"))
    stated = ("--max-num-batched-tokens=512", "--decode-context-parallel-size", "2")
    made = go(stock, fused, texts, tmp_path / "out", arguments=stated)
    assert made.verdict == "IDENTICAL", made.decided
    assert made.run is not None
    assert made.run.servers[0].channel == "metrics"
    assert "fused: max_num_batched_tokens is what was stated" in made.not_covered
    assert any("its whole configuration" in x for x in made.not_covered)


def test_what_a_server_does_not_tell_must_be_stated(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = (fake(route=a, dev=False) for a in ("stock", "fused"))
    with pytest.raises(PplError, match="doesn't tell its --max-num-batched-tokens"):
        go(stock, fused, texts, tmp_path / "out")


def test_texts_that_never_reach_the_path_are_refused(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(PplError, match="never reaches the path under test"):
        go(fake(), fake(route="fused"), texts, tmp_path / "out", tokens=(400, 500))


def test_a_set_without_a_continuation_is_warned_about_in_the_verdict(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = (fake(route=a, workspace=8192) for a in ("stock", "fused"))
    made = go(stock, fused, texts, tmp_path / "out", workspace=8192)
    assert made.verdict == "IDENTICAL"
    assert any(r.startswith("NO CONTINUATION") for r in made.decided.reasons)


def test_the_smaller_form_is_used_where_it_gives_the_same_bits(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = (fake(route=a, scale_out=True) for a in ("stock", "fused"))
    made = go(stock, fused, texts, tmp_path / "out")
    assert made.run is not None
    assert made.run.method == "prompt_logprob_token_ids"
    assert made.verdict == "IDENTICAL"
    assert not any("prompt_logprob_token_ids" in x for x in made.not_covered)
    one, other = fake(route="stock"), fake(route="fused", scale_out=True)
    made = go(one, other, texts, tmp_path / "out2")
    assert made.run is not None
    assert made.run.method == "prompt_logprobs"
    assert any("prompt_logprob_token_ids" in x and "403" in x for x in made.not_covered)


def test_ids_are_the_servers_own_where_it_has_a_tokenizer(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = (fake(route=a, tokenizer=5) for a in ("stock", "fused"))
    made = go(stock, fused, texts, tmp_path / "out")
    assert made.verdict == "IDENTICAL"
    assert made.run is not None
    assert made.run.tokenizer == "the server's /tokenize"
    made = go(stock, fake(route="fused", tokenizer=6), texts, tmp_path / "other")
    says = "the arms' tokenizers give other ids for the same text"
    assert made.decided.reasons[0] == says
    assert made.verdict == "INVALID"


def test_a_result_of_an_earlier_run_is_never_taken_for_this_ones(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    go(fake(seed=1), fake(route="fused", seed=1), texts, tmp_path / "earlier")
    stock, fused = fake(), fake(route="fused")
    go(stock, fused, texts, tmp_path / "out")
    (earlier,) = (tmp_path / "earlier" / "scores").glob("text1*")
    shutil.copytree(earlier, tmp_path / "out" / "scores" / earlier.name, dirs_exist_ok=True)
    with pytest.raises(Stale, match=r"is stale: arguments differ"):
        go(stock, fused, texts, tmp_path / "out")
    made = judge.compare_stored([tmp_path / "out"])
    assert made.verdict == "INVALID"
    assert any(r.startswith("arguments differ") for r in made.decided.reasons)


def test_a_forced_workspace_is_found_out(fake: Start, texts: Path, tmp_path: Path) -> None:
    stock, fused = fake(route="stock"), fake(route="fused")
    made = go(stock, fused, texts, tmp_path / "out", workspace=None)
    assert made.verdict == "IDENTICAL", made.decided
    assert made.run is not None
    assert made.run.configuration is not None
    assert made.run.configuration.workspace_rows == 1024


def test_a_burst_of_all_texts(fake: Start, texts: Path, tmp_path: Path) -> None:
    made = go(fake(), fake(route="fused"), texts, tmp_path / "out", burst=True)
    assert made.run is not None
    assert made.run.burst is not None
    assert (made.run.burst.word, made.run.burst.identical_texts) == ("IDENTICAL", TEXTS)
    assert (made.run.burst.launches, made.run.burst.bursts) == (1, 3)
    assert made.run.burst.floor_nats == 0
    runs = {r.run for r in Store(tmp_path / "out" / "burst").records()}
    assert runs == {(arm, 1, n) for arm in ("stock", "fused") for n in (1, 2, 3)}


def test_a_race_that_shows_only_in_a_burst_is_a_race(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    fused = fake(route="fused", crowded_nats=0.05)
    made = go(fake(), fused, texts, tmp_path / "out", burst=True, bursts=2)
    assert made.identity is not None
    assert made.identity.identical_texts == TEXTS
    assert (made.verdict, made.exit_code) == ("DIFFERENT", 1), made.decided
    assert all("in a burst of all texts" in r for r in made.decided.reasons)
    assert made.run is not None
    assert made.run.burst is not None
    assert made.run.burst.bursts == 2
    assert any("from the text scored alone" in w for w in made.warnings)


def test_the_key_is_sent_and_kept_nowhere(
    fake: Start, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-open")
    stock, fused = (fake(route=a, key="sesame-open") for a in ("stock", "fused"))
    made = go(stock, fused, texts, tmp_path / "out", key_variable="MY_KEY")
    assert made.verdict == "IDENTICAL"
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes()
    with pytest.raises(PplError, match="API key"):
        go(stock, fused, texts, tmp_path / "other")


def test_a_second_run_asks_for_nothing_that_is_stored(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    log = tmp_path / "requests"
    stock, fused = (fake(route=a, requests=str(log)) for a in ("stock", "fused"))
    first = go(stock, fused, texts, tmp_path / "out")
    asked = log.read_text("utf-8").splitlines()
    again = go(stock, fused, texts, tmp_path / "out")
    more = log.read_text("utf-8").splitlines()[len(asked) :]
    assert again.inputs_sha256 == first.inputs_sha256
    # A warm-up request of each server, which is none of the texts.
    assert len(more) == 2
    assert set(more) <= set(asked)
    assert len(set(asked)) == 2 * (TEXTS + 1)


def test_results_of_another_run_are_not_taken(fake: Start, texts: Path, tmp_path: Path) -> None:
    stock, fused = fake(route="stock"), fake(route="fused")
    go(stock, fused, texts, tmp_path / "out")
    with pytest.raises(Stale, match=r"holds another run: fused \(stored http"):
        go(stock, fake(route="fused", seed=3), texts, tmp_path / "out")
    with pytest.raises(Stale, match="stated the claim identical"):
        go(stock, fused, texts, tmp_path / "out", claim="equivalent")
    (texts / "text0.txt").write_text("changed " + WORDS * 40, encoding="utf-8")
    with pytest.raises(Stale, match="holds another run: texts"):
        go(stock, fused, texts, tmp_path / "out")


def test_another_run_in_the_same_folder_is_refused(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (
        kept.alone(out),
        pytest.raises(PplError, match="another run writes to"),
    ):
        go(fake(), fake(route="fused"), texts, out)


def test_failures_stay_in_the_evidence_of_a_resumed_run(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = fake(route="stock"), fake(route="fused", fault="one in 5 fails")
    first = go(stock, fused, texts, tmp_path / "out")
    assert first.verdict == "INVALID"
    again = go(stock, fused, texts, tmp_path / "out")
    assert again.verdict == "INVALID"
    assert again.run is not None
    assert first.run is not None
    assert again.run.failures[: len(first.run.failures)] == first.run.failures


def test_a_restart_with_another_configuration_is_invalid(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    fused = fake(route="fused", restart_at=5, restart_seed=1)
    made = go(fake(route="stock"), fused, texts, tmp_path / "out")
    assert made.verdict == "INVALID"
    says = "fused: restarted half-way with another configuration: seed was 0 and is 1"
    assert says in made.decided.reasons[0]


@pytest.mark.parametrize("dev", [True, False])
def test_a_restart_with_the_same_configuration_is_told(
    dev: bool,  # noqa: FBT001 - a parameter of a test
    fake: Start,
    texts: Path,
    tmp_path: Path,
) -> None:
    stock, fused = fake(route="stock", dev=dev), fake(route="fused", dev=dev, restart_at=5)
    stated = ("--max-num-batched-tokens=512", "--dcp", "2")
    made = go(stock, fused, texts, tmp_path / "out", arguments=stated)
    assert made.verdict == "IDENTICAL", made.decided
    assert any("fused launch 1 is made of 2 server processes" in w for w in made.warnings)


def test_progress_says_how_fast_and_how_long(fake: Start, texts: Path, tmp_path: Path) -> None:
    go(fake(), fake(route="fused"), texts, tmp_path / "out")
    lines = (tmp_path / "progress").read_text("utf-8")
    assert "tokens/s" in lines
    assert "16 of 16" in lines
    kept = json.loads((tmp_path / "out" / "run.json").read_text("utf-8"))
    assert kept["timing"][0]["scored_tokens"] > 0


def test_a_run_that_was_stopped_is_invalid_until_it_is_finished(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    urls = fake(route="stock"), fake(route="fused")
    made = go(*urls, texts, out, burst=True, bursts=1)
    whole = tmp_path / "copy"
    shutil.copytree(out, whole)
    for lacking in ("*/*-1-2.json", "text1*/*.json", "../burst/scores/text1*/*.json"):
        shutil.rmtree(out)
        shutil.copytree(whole, out)
        gone = list((out / "scores").glob(lacking))
        assert gone
        for path in gone:
            path.unlink()
        again = judge.compare_stored([out])
        assert (again.verdict, again.exit_code) == ("INVALID", 4)
        assert "the run isn't finished" in again.decided.reasons[0]
        finished = go(*urls, texts, out, burst=True, bursts=1)
        assert finished.verdict == made.verdict == "IDENTICAL"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("rounded to float32", "all rows are decimals of 5 digits or fewer"),
        ("16 bits", "all rows have 16 bits or fewer"),
        ("constant", "rows are -1.0: they don't depend on the text"),
        ("repeated", "the values of the warm-up, whose ids are others"),
    ],
)
def test_values_that_hide_differences_are_invalid_in_both_arms(
    fault: str, says: str, fake: Start, texts: Path, tmp_path: Path
) -> None:
    stock, fused = (fake(route=a, fault=fault) for a in ("stock", "fused"))
    made = go(stock, fused, texts, tmp_path / "out", tokens=(1900, 1900))
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert any(says in r for r in made.decided.reasons), made.decided.reasons


def test_counters_that_nobody_tells_are_named(fake: Start, texts: Path, tmp_path: Path) -> None:
    stated = ("--max-num-batched-tokens=512", "--decode-context-parallel-size", "2")
    urls = [fake(route=a, dev=False, fault="only calls") for a in ("stock", "fused")]
    made = go(*urls, texts, tmp_path / "out", arguments=stated)
    assert made.verdict == "IDENTICAL", made.decided
    for name in ("chunks", "continuations", "packs", "pack_rows"):
        assert f"{name} of the route: counted for 0 of 16 results" in made.not_covered
    assert "that no other request was served: observed for 0 of 16 results" in made.not_covered
    urls = [fake(route=a, dev=False, fault="one rank") for a in ("stock", "fused")]
    made = go(*urls, texts, tmp_path / "out2", arguments=stated)
    assert made.verdict == "INVALID"
    assert "stock: 1 of its 2 ranks tell their counters" in made.decided.reasons


@pytest.mark.parametrize("key", ["se\ncret", "se cret", "s\u00e9cret"])
def test_a_key_that_no_header_takes_is_refused_and_not_told(
    key: str, fake: Start, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIED", key)
    urls = fake(route="stock"), fake(route="fused")
    with pytest.raises(PplError, match="--api-key-env TRIED: its value has a blank") as e:
        go(*urls, texts, tmp_path / "out", key_variable="TRIED")
    assert "cret" not in str(e.value)


def test_a_folder_that_cannot_be_made_and_a_margin_that_bounds_nothing(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--stock", "http://127.0.0.1:1", "--fused", "http://127.0.0.1:2"]
    words += ["--texts", str(texts)]
    (tmp_path / "file").touch()
    assert run_app(ppl_app, [*words, "--out", str(tmp_path / "file" / "x")], "bytegate ppl") == 2
    assert "can't write to" in capsys.readouterr().err
    words += ["--margin", "1000", "--out", str(tmp_path / "out")]
    assert run_app(ppl_app, words, "bytegate ppl") == 2
    assert "margin 1000.0: expected at most 100 nats" in capsys.readouterr().err


def test_a_server_that_is_another_after_each_request_ends_the_run(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    fused = fake(route="fused", fault="never the same")
    made = go(fake(route="stock"), fused, texts, tmp_path / "out")
    assert made.verdict == "INVALID"
    assert "fused was started again 4 times in one launch" in made.decided.reasons[0]


def test_the_same_text_twice_is_refused(fake: Start, texts: Path, tmp_path: Path) -> None:
    shutil.copy(texts / "text1.txt", texts / "again.txt")
    urls = fake(route="stock"), fake(route="fused")
    with pytest.raises(PplError, match=r"texts .*text1.txt.* are the same text"):
        go(*urls, texts, tmp_path / "out")


def test_a_run_may_go_on_without_a_file_that_is_not_there(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    urls = fake(route="stock"), fake(route="fused")
    given = Options(
        stock=urls[0],
        fused=urls[1],
        texts=(str(texts), str(tmp_path / "nosuch.txt")),
        out=tmp_path / "out",
    )
    with (tmp_path / "progress").open("w", encoding="utf-8") as log:
        with pytest.raises(TextError, match=r"nosuch\.txt"):
            runner.run(given, Pace(log))
        made = runner.run(replace(given, without_broken=True), Pace(log))
    assert made.verdict == "IDENTICAL"
    assert any(r.startswith("WITHOUT text") and "nosuch.txt" in r for r in made.decided.reasons)


# -- arg-maxes --------------------------------------------------------------------------


def test_arg_maxes_are_stored_and_agree(fake: Start, texts: Path, tmp_path: Path) -> None:
    """The clean twin of the faults below."""
    stock, fused = (fake(route=a, fault="none", scale_out=True) for a in ("stock", "fused"))
    made = go(stock, fused, texts, tmp_path / "out", top1=True)
    assert (made.verdict, made.exit_code) == ("IDENTICAL", 0), made.decided
    assert made.run is not None
    assert made.run.method == "prompt_logprobs"
    assert [t.text for t in made.top1] == [t.text for t in made.texts]
    assert all(t.rows == t.agreeing == t.noise_agreeing for t in made.top1)
    assert not any("top-1" in x for x in made.not_covered)
    store, record = judge.stored([tmp_path / "out"])["text0.txt", ("fused", 1, 2)]
    top = argmax.load(store, record)
    assert top is not None
    assert top.ids.shape == (record.rows, 2)
    assert top.margins is not None
    assert (top.margins > 0).all()
    plain = go(stock, fused, texts, tmp_path / "plain")
    assert plain.top1 == []
    assert plain.inputs_sha256 == made.inputs_sha256
    assert not list((tmp_path / "plain").rglob("*.top"))
    with pytest.raises(Stale, match="top1"):
        go(stock, fused, texts, tmp_path / "plain", top1=True)


@pytest.mark.parametrize(("claim", "code"), [("identical", 1), ("equivalent", 0)])
def test_best_tokens_that_are_swapped_are_told_though_no_score_moves(
    claim: str, code: int, fake: Start, texts: Path, tmp_path: Path
) -> None:
    fused = fake(route="fused", fault="best tokens swapped")
    made = go(fake(route="stock"), fused, texts, tmp_path / "out", top1=True, claim=claim)
    assert (made.verdict, made.exit_code) == ("EQUIVALENT", code)
    assert made.decided.reasons[0].startswith(
        "every scored token is bit-equal, but the arg-max of "
    )
    for t in made.top1:
        assert t.agreeing < t.rows == t.noise_agreeing
        assert t.flips
        assert all(f.stock_margin_nats == f.fused_margin_nats > 0 for f in t.flips)
        assert all((f.stock_id, f.fused_id) == (f.fused_id - 1, f.stock_id + 1) for f in t.flips)
    assert go(fake(route="stock"), fused, texts, tmp_path / "plain").verdict == "IDENTICAL"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("first isn't best", "the token that is ranked first isn't the most probable one"),
        ("best tokens lacking", "hasn't the 2 best tokens: the arg-max isn't given"),
        ("best is NaN", "a best token's log-prob is NaN or infinite"),
        ("best is infinite", "a best token's log-prob is NaN or infinite"),
        ("best is no id", "has a best token that is no id: ["),
        ("best is negative", "has a best token that is no id: ["),
        ("best is a list", "has best tokens of another form"),
    ],
)
def test_arg_maxes_that_can_not_be_are_invalid(
    fault: str, says: str, fake: Start, texts: Path, tmp_path: Path
) -> None:
    fused = fake(route="fused", fault=fault)
    made = go(fake(route="stock"), fused, texts, tmp_path / "out", top1=True)
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    assert any(says in r for r in made.decided.reasons), made.decided.reasons
    assert go(fake(route="stock"), fused, texts, tmp_path / "plain").verdict == "IDENTICAL"


def test_a_server_that_gives_no_arg_max_is_not_covered_by_name(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    fused = fake(route="fused", max_logprobs=1)
    made = go(fake(route="stock"), fused, texts, tmp_path / "out", top1=True)
    assert (made.verdict, made.top1) == ("IDENTICAL", [])
    why = "top-1 agreement: fused: refused with HTTP 400: Requested prompt logprobs of 2"
    assert any(x.startswith(why) for x in made.not_covered), made.not_covered
    assert "top-1 agreement: both arms gave arg-maxes of 0 of 4 texts" in made.not_covered
    assert go(fake(route="stock"), fused, texts, tmp_path / "plain").not_covered != made.not_covered


def test_a_run_whose_facts_were_deleted_is_invalid(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert go(fake(route="stock"), fake(route="fused"), texts, out).verdict == "IDENTICAL"
    assert judge.compare_stored([out]).verdict == "IDENTICAL"
    (out / "run.json").unlink()
    (failed,) = (out / "scores").glob("text1*")
    shutil.rmtree(failed)  # which nothing else would tell
    made = judge.compare_stored([out])
    assert (made.verdict, made.exit_code) == ("INVALID", 4)
    (reason,) = made.decided.reasons
    assert reason.startswith("12 results of a run without a run.json: what else was asked for")
    assert not any(x.startswith("whether the results are whole") for x in made.not_covered)


def test_facts_that_were_edited_are_noticed(fake: Start, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(fake(route="stock"), fake(route="fused"), texts, out, margin=1e-3)
    path = out / facts.NAME
    whole = path.read_text("utf-8")
    assert judge.stated([out], None, None) == ("identical", 1e-3)
    with pytest.raises(PplError, match=r"margin 0\.0"):
        judge.compare_stored([out], margin=judge.stated([out], None, 0.0)[1])
    raw = json.loads(whole)
    for change in ({"texts": raw["texts"][1:]}, {"asked": raw["asked"] | {"launches": 1}}):
        path.write_text(json.dumps(raw | change), "utf-8")
        with pytest.raises(PplError, match=r"run\.json is damaged: its content isn't what was"):
            judge.compare_stored([out])
    path.write_text(json.dumps(raw), "utf-8")
    assert judge.compare_stored([out]).verdict == "IDENTICAL"


def test_servers_that_emulated_say_so_whatever_was_asked(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    servers = (fake(route=a, fp8="yes") for a in ("stock", "fused"))
    assert go(*servers, texts, out, emulate_fp8=True).verdict == "IDENTICAL"
    known = facts.read(out)
    assert known is not None
    asked = {k: v for k, v in known.asked.items() if k != "emulate_fp8_prefill"}
    facts.write(out, known.model_copy(update={"asked": asked, "warnings": []}))
    made = judge.compare_stored([out])
    assert made.run is not None
    assert made.run.emulates_fp8
    assert made.decided.reasons[-1].startswith("EMULATED")
    assert made.warnings[0].startswith("EMULATED")


def test_compare_takes_what_the_run_stated_and_says_what_was_stated_late(
    fake: Start, texts: Path, tmp_path: Path
) -> None:
    out, to = tmp_path / "out", ["--out", str(tmp_path / "cmp")]
    urls = fake(route="stock"), fake(route="fused")
    go(*urls, texts, out, claim="equivalent", margin=5e-4)
    assert run_app(ppl_app, ["compare", str(out), *to], "bytegate ppl") == 0
    made = evidence.read(tmp_path / "cmp" / "ppl.json")
    assert (made.claim, made.margin_nats, made.margin_stated) == ("equivalent", 5e-4, True)
    assert not any("stated after the run" in w for w in made.warnings)
    words = ["compare", str(out), "--margin", "0.5", *to]
    assert run_app(ppl_app, words, "bytegate ppl") == 0
    made = evidence.read(tmp_path / "cmp" / "ppl.json")
    late = "claim equivalent, margin 0.5 nats: stated after the run, which stated equivalent"
    assert any(w.startswith(late) for w in made.warnings)


@pytest.mark.parametrize(
    "name",
    [
        "env.VLLM_CACHE_ROOT",
        "env.VLLM_CONFIG_ROOT",
        "env.VLLM_ASSETS_CACHE",
        "env.VLLM_INSTANCE_ID",
        "load_config.download_dir",
        "vllm_config.instance_id",
        "env.VLLM_HOST_IP",
    ],
)
def test_what_two_hosts_may_differ_in(name: str) -> None:
    assert preflight.OWN.search(name)


@pytest.mark.parametrize(
    "name",
    [
        "cache_config.enable_prefix_caching",
        "env.VLLM_USE_V2_MODEL_RUNNER",
        "model_config.dtype",
        "env.VLLM_ATTENTION_BACKEND",
        "compilation_config.cache_dir_mode",
    ],
)
def test_what_they_may_not_differ_in(name: str) -> None:
    assert not preflight.OWN.search(name)
