"""Serving A/B: what vLLM's client is sent, what its figures become, and what is not believed."""

from __future__ import annotations

import argparse
import http.server
import itertools
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from equiv.errors import NotCovered
from equiv.perf.record import ServingRun, is_tail
from kvroute import serve
from kvroute.errors import RouteError
from kvroute.serve import ServeOptions
from ppl import counted, figures, servers, serving, serving_client, vllm_bench
from ppl import load as load_of
from ppl.errors import PplError
from ppl.load import Load, Sessions, levels

LOAD = Load(input_tokens=40, output_tokens=3, requests=4, concurrency=2, repeats=2)
MANY = Load(input_tokens=40, output_tokens=3, requests=1000, concurrency=2, repeats=2)


def runs_of(stock: tuple[float, ...], fused: tuple[float, ...], name: str) -> list[ServingRun]:
    return [
        ServingRun(route, launch, 1, 4, 0, {name: value})
        for route, values in (("stock", stock), ("fused", fused))
        for launch, value in enumerate(values, 1)
    ]


# -- what figures become ----------------------------------------------------------------


def test_a_clear_change_is_told_apart_and_noise_is_not() -> None:
    (metric,) = figures.metrics(runs_of((10.0, 10.01), (9.0, 9.01), "median_ttft_ms"), LOAD)
    assert metric.resolved
    assert metric.change == pytest.approx(-0.1, abs=1e-3)
    assert metric.noise == pytest.approx(0.001, rel=1e-2)
    (metric,) = figures.metrics(runs_of((10.0, 10.5), (9.8, 9.9), "median_ttft_ms"), LOAD)
    assert not metric.resolved
    assert metric.why_not == "within the noise of two launches"
    assert metric.change is not None  # shown, beside the noise


def test_launches_that_differ_by_chance_alone_are_seldom_told_apart() -> None:
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(2000):
        a, b, c, d = rng.normal(100, 1, 4)
        (metric,) = figures.metrics(runs_of((a, b), (c, d), "median_ttft_ms"), LOAD)
        told += metric.resolved
    assert told <= 2000 * 0.01 + 3 * (2000 * 0.01) ** 0.5


@pytest.mark.parametrize("name", ["p99_ttft_ms", "p90_e2el_ms", "p99_itl_ms"])
def test_a_tail_of_too_few_requests_has_no_figure(name: str) -> None:
    (metric,) = figures.metrics(runs_of((10.0, 10.0), (5.0, 5.0), name), LOAD)
    assert is_tail(name)
    assert (metric.stock, metric.fused, metric.change, metric.launches) == (None, None, None, {})
    assert metric.why_not.startswith("needs ")


@pytest.mark.parametrize(("requests", "enough"), [(99, False), (100, True)])
def test_a_p90_needs_ten_samples_beyond_it(requests: int, *, enough: bool) -> None:
    load = Load(input_tokens=40, output_tokens=3, requests=requests, concurrency=2, repeats=2)
    runs = runs_of((10.0, 10.0), (5.0, 5.0), "p90_ttft_ms")
    assert figures.metrics(runs, load)[0].resolved == enough


def test_a_tail_needs_the_noise_to_resolve_it() -> None:
    (metric,) = figures.metrics(runs_of((10.0, 10.0), (5.0, 5.01), "p99_ttft_ms"), MANY)
    assert metric.resolved
    assert metric.fused == pytest.approx(5.005)
    (metric,) = figures.metrics(runs_of((10.0, 12.0), (9.0, 11.0), "p99_ttft_ms"), MANY)
    assert (metric.resolved, metric.fused) == (False, None)
    assert metric.why_not == "within the noise of two launches"


def test_repeats_of_a_launch_count_once() -> None:
    runs = [
        ServingRun(route, launch, repeat, 4, 0, {"median_ttft_ms": base + 0.01 * launch + repeat})
        for route, base in (("stock", 10.0), ("fused", 5.0))
        for launch in (1, 2)
        for repeat in (1, 2, 3)
    ]
    (metric,) = figures.metrics(runs, LOAD)
    assert metric.launches["stock"] == pytest.approx([12.01, 12.02])
    assert metric.resolved


# -- what is not believed ---------------------------------------------------------------

GOOD = {"calls": 8, "chunks": 8, "packs": 0, "ranks": 8, "packing_ranks": 0}
PACKED = GOOD | {"packs": 8, "packing_ranks": 8}
ONE = ServingRun("stock", 1, 1, 4, 0, {})


@pytest.mark.parametrize(
    ("packs", "run", "says"),
    [
        ([GOOD, PACKED], ONE, None),
        ([PACKED, PACKED], ONE, "packed 8 chunks by the routed kernel"),
        ([GOOD, GOOD], ONE, "packed nothing by the routed kernel"),
        ([GOOD, {"calls": 0, "chunks": 0, "packs": 0}], ONE, "never reached the path"),
        ([GOOD, PACKED], ServingRun("stock", 1, 1, 3, 1, {}), "1 requests failed"),
        ([GOOD, PACKED], ServingRun("stock", 1, 1, 0, 0, {}), "0 requests failed"),
    ],
)
def test_routes_that_did_not_run_and_requests_that_failed(
    packs: list[dict[str, int]], run: ServingRun, says: str | None
) -> None:
    wrong = serving.amiss(["stock", "fused"], packs, [run])
    assert (wrong == []) == (says is None)
    assert says is None or says in wrong[0]


@pytest.mark.parametrize(
    ("counters", "says"),
    [
        (GOOD, None),
        (GOOD | {"cache_hits": 32}, None),
        (GOOD | {"chunks": 0}, "stock launch 1 at 8 run 2 never reached the path"),
        (GOOD | {"packs": 3}, "stock launch 1 at 8 run 2 packed 3 chunks by the routed kernel"),
        (GOOD | {"cache_hits": 0}, "stock launch 1 at 8 run 2 found nothing in the prefix cache"),
        (GOOD | {"ranks": 7}, "stock launch 1 at 8 run 2 reached the path under test on 7 of 8"),
    ],
)
def test_every_run_of_every_level_is_looked_at(counters: dict[str, int], says: str | None) -> None:
    run = ServingRun("stock", 1, 2, 4, 0, {}, concurrency=8, counters=counters)
    wrong = serving.amiss(["stock", "fused"], [GOOD, PACKED], [run], caching=True, ranks=8)
    assert (wrong == []) == (says is None)
    assert says is None or says in wrong[0]
    assert len(wrong) < 2


@pytest.mark.parametrize("packing", [8, 7])
def test_every_rank_has_to_pack(packing: int) -> None:
    counters = PACKED | {"packing_ranks": packing}
    run = ServingRun("fused", 1, 1, 4, 0, {}, concurrency=8, counters=counters)
    wrong = serving.amiss(["stock", "fused"], [GOOD, PACKED], [run], ranks=8)
    said = "fused launch 1 at 8 run 1 packed by the routed kernel on 7 of 8 ranks"
    assert wrong == ([] if packing == 8 else [said])


def test_a_cache_that_tells_nothing_is_not_covered_by_name() -> None:
    told = ServingRun("stock", 1, 1, 4, 0, {}, counters=GOOD | {"cache_hits": 5})
    quiet = ServingRun("stock", 1, 1, 4, 0, {}, counters=GOOD)
    assert serving.silent([told]) == []
    assert serving.silent([told, quiet]) == [
        "the prefix cache's hits: /metrics told none in 1 runs"
    ]


NO_COUNTS = {"calls": 0, "chunks": 0, "context_tokens": 0, "packs": 0, "pack_rows": 0}


@pytest.mark.parametrize("ranks", [2, 8])
def test_counters_are_summed_over_ranks(ranks: int) -> None:
    text = "# HELP bytegate_packs_total x\n" + "".join(
        f'bytegate_{name}_total{{rank="{rank}",route="fused",switch=""}} {value}\n'
        for rank in range(ranks)
        for name, value in (("packs", 8.0), ("pack_rows", 1.6e6), ("continuations", 3.0))
    )
    text += (
        'vllm:num_preemptions_total{engine="0"} 3.0\n'
        'vllm:prefix_cache_queries_total{engine="0"} 100.0\n'
        'vllm:prefix_cache_hits_total{engine="0"} 60.0\n'
    )
    cached = {"cache_queries": 100, "cache_hits": 60}
    counts = {"packs": 8 * ranks, "pack_rows": 1_600_000 * ranks}
    assert counted.counters(text) == NO_COUNTS | counts | cached
    assert counted.counters("") == NO_COUNTS


def test_a_run_counts_what_came_in_it_alone(tmp_path: Path) -> None:
    line = 'bytegate_chunks_total{{rank="{}",route="stock",switch=""}} {}.0\n'
    before, after = ("".join(line.format(rank, n) for rank in range(8)) for n in (5, 9))
    after = after.replace(line.format(6, 9), line.format(6, 5))  # one that did nothing
    result = tmp_path / "stock-1-at-2-1.json"
    counted.write(result, before, after)
    ranks = {"ranks": 7, "packing_ranks": 0}
    assert counted.read(result) == NO_COUNTS | {"chunks": 7 * 4} | ranks
    counted.write(result, after, before)
    with pytest.raises(PplError, match="the counter chunks fell in a run"):
        counted.read(result)
    counted.place(result).unlink()
    with pytest.raises(PplError, match="the counters of a run are missing"):
        counted.read(result)


# -- the client -------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_every_launch_is_sent_the_same_ids(tmp_path: Path) -> None:
    requests, warm = load_of.trace(LOAD, tmp_path)
    entries = lines_of(requests)
    assert [e["input_length"] for e in entries] == [40] * 4
    seeds = [seed for e in [*entries, *lines_of(warm)] for seed in e["hash_ids"]]
    assert len(seeds) == len(set(seeds)) == 6 * 3  # three blocks of 16 each, none shared
    command = serving_client.client_command(
        "http://x", LOAD, requests, warm, tmp_path, tmp_path, "stock-1"
    )
    assert command[1:3] == ["-m", "ppl.vllm_bench"]
    assert "--no-self-timed" in command
    assert "--reset" not in command


SOME = Sessions(shared_tokens=64, turns=3, turn_tokens=32)


def test_levels_rise_and_have_as_many_sessions() -> None:
    made = levels([8, 2, 8], repeats=2, output_tokens=4, sessions=SOME)
    assert [(m.concurrency, m.sessions, m.requests) for m in made] == [(2, 2, 6), (8, 8, 24)]
    assert {m.input_tokens for m in made} == {64 + 3 * 32}
    fixed = levels([2, 8], repeats=2, output_tokens=4, sessions=replace(SOME, sessions=10))
    assert [m.requests for m in fixed] == [30, 30]
    plain = levels([70, 1], repeats=2, output_tokens=4, input_tokens=40, requests=9)
    assert [(m.concurrency, m.sessions, m.requests) for m in plain] == [(1, 0, 9), (70, 0, 9)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shared_tokens": 0}, "--shared-tokens 0: expected a positive multiple of 16"),
        ({"shared_tokens": 65}, "--shared-tokens 65: expected a positive multiple of 16"),
        ({"turn_tokens": 8}, "--turn-tokens 8: expected a positive multiple of 16"),
        ({"turns": 0}, "--turns 0: expected at least 1"),
        ({"sessions": 3}, "--sessions 3: 4 requests at a time need as many sessions"),
    ],
)
def test_sessions_that_can_not_be_sent_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(PplError, match=says):
        levels([1, 4], repeats=2, output_tokens=4, sessions=replace(SOME, **change))
    levels([1, 4], repeats=2, output_tokens=4, sessions=replace(SOME, sessions=4))
    with pytest.raises(PplError, match="--concurrency"):
        levels([], repeats=2, output_tokens=4)


def test_a_turn_begins_with_the_prefix_and_the_turns_before_it(tmp_path: Path) -> None:
    (load,) = levels([2], repeats=1, output_tokens=4, sessions=SOME)
    requests, warm = load_of.trace(load, tmp_path)
    turns = [e["hash_ids"] for e in lines_of(requests)]
    prefix = [0, 1, 2, 3]
    first, second = turns[0::2], turns[1::2]  # sessions take turns
    for session in (first, second):
        assert [len(t) for t in session] == [6, 8, 10]
        for before, after in itertools.pairwise(session):
            assert after[: len(before)] == before
    assert [e["input_length"] for e in lines_of(requests)] == [96, 96, 128, 128, 160, 160]
    assert set(first[-1]) & set(second[-1]) == set(prefix)
    for entry in lines_of(warm):  # it brings the prefix into the cache, and no turn
        assert entry["hash_ids"][:4] == prefix
        assert not set(entry["hash_ids"][4:]) & {b for t in turns for b in t}
    command = serving_client.client_command(
        "http://x", load, requests, warm, tmp_path, tmp_path, "stock-1"
    )
    assert command[command.index("--") - 1] == "--reset"
    assert command[command.index("--num-prompts") + 1] == "6"


def test_the_clients_own_reader_gives_the_prefix_the_same_ids(tmp_path: Path) -> None:
    datasets = pytest.importorskip("vllm.benchmarks.datasets.datasets")
    (load,) = levels([2], repeats=1, output_tokens=4, sessions=SOME)
    requests, _ = load_of.trace(load, tmp_path)
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    reader = datasets.TimedTrace(
        dataset_path=str(requests),
        random_seed=0,
        timed_trace_chunk_hash_size=load_of.BLOCK,
        **{f"timed_trace_label_{name}": name for name in names},
    )
    words = SimpleNamespace(get_vocab=lambda: {f"t{i}": i for i in range(500)}, all_special_ids=[])
    sent = [s.prompt for s in reader.sample(words, 6)]
    assert [len(ids) for ids in sent] == [96, 96, 128, 128, 160, 160]
    assert len({tuple(ids[:64]) for ids in sent}) == 1
    assert sent[2][:96] == sent[0]
    assert sent[4][:128] == sent[2]
    assert sent[1][64:] != sent[0][64:]


class Pages:
    """A server of a few answers, one after the other; the last stays."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        left = list(answers)
        asked: list[str] = []
        self.asked = asked

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(self.path)
                code, body = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                count = sum(path == "/metrics" for path in asked)
                line = 'bytegate_chunks_total{{rank="0",route="stock",switch=""}} {}.0\n'
                self.wfile.write(line.format(10 * count).encode())

            def log_message(self, *_: Any) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([(200, '{"success": true}')], None),
        ([(200, '{"success": false}'), (200, '{"success": true}')], None),
        ([(200, '{"success": false}')], "was refused"),
        ([(200, "")], "was refused"),
        ([(404, "{}")], "answered 404"),
    ],
)
def test_a_cache_that_is_not_emptied_stops_the_client(
    answers: list[tuple[int, str]], says: str | None
) -> None:
    pages = Pages(*answers)
    try:
        if says is None:
            vllm_bench.reset(pages.url, patience_s=5)
            assert set(pages.asked) == {"/reset_prefix_cache"}
            assert len(pages.asked) == len(answers)
            return
        with pytest.raises(SystemExit, match=says):
            vllm_bench.reset(pages.url, patience_s=0.3)
    finally:
        pages.close()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool, str]]:
    """Replace vLLM's client by one that notes what it was asked for."""
    called: list[tuple[str, int, bool, str]] = []

    def benchmark(o: argparse.Namespace) -> dict[str, int]:
        called.append((o.dataset_path, o.num_prompts, o.save_result, o.result_filename))
        return {"failed": int(o.dataset_path == "bad")}

    def arguments(parser: argparse.ArgumentParser) -> None:
        for name in ("base-url", "dataset-path", "result-dir", "result-filename"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--num-prompts", type=int)
        parser.add_argument("--save-result", action="store_true")

    serve_ = SimpleNamespace(add_cli_args=arguments, main=benchmark)
    parsing = SimpleNamespace(FlexibleArgumentParser=argparse.ArgumentParser)
    for name in ("vllm", "vllm.benchmarks", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "vllm.benchmarks.serve", serve_)  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "vllm.utils.argparse_utils", parsing)  # type: ignore[misc]
    return called


def words_of(url: str, folder: Path, *own: str) -> list[str]:
    theirs = ("--base-url", url, "--dataset-path", "requests", "--num-prompts", "6")
    result = ("--save-result", "--result-dir", str(folder), "--result-filename", "x.json")
    return [*own, "--", *theirs, *result]


def test_every_run_comes_after_a_reset_and_a_warm_up_that_is_not_counted(
    client: list[tuple[str, int, bool, str]], tmp_path: Path
) -> None:
    pages = Pages((200, '{"success": true}'))
    try:
        own = ("2", "--warm", "warm", "--warm-requests", "3", "--reset")
        assert vllm_bench.main(words_of(pages.url, tmp_path, *own)) == 0
        assert pages.asked == ["/reset_prefix_cache", "/metrics", "/metrics"] * 2
        own = ("1", "--warm", "bad", "--warm-requests", "3")
        with pytest.raises(SystemExit, match="1 requests of the warm-up failed"):
            vllm_bench.main(words_of(pages.url, tmp_path, *own))
        assert len(pages.asked) == 6
    finally:
        pages.close()
    assert client[:4] == [
        ("warm", 3, False, "x.json"),
        ("requests", 6, True, "x-1.json"),
        ("warm", 3, False, "x.json"),
        ("requests", 6, True, "x-2.json"),
    ]
    assert counted.read(tmp_path / "x-1.json")["chunks"] == 10
    assert counted.read(tmp_path / "x-2.json")["chunks"] == 10


def test_a_model_without_a_tokenizer_gets_a_stand_in_of_its_size(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 50}', encoding="utf-8")
    place = load_of.tokenizer(model, tmp_path)
    made = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    assert made.get_vocab_size() == 50
    (model / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert load_of.tokenizer(model, tmp_path) == model
    assert load_of.tokenizer(Path("org/name"), tmp_path) == Path("org/name")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"completed": 1}', '{"completed": "x"}'])
def test_a_result_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PplError, match="left no result"):
        serving_client.read(path, "stock", 1, 1, 2)
    with pytest.raises(PplError, match="left no result"):
        serving_client.read(tmp_path / "none.json", "stock", 1, 1, 2)


# -- all of it, with stand-ins for the server and the client --------------------------------

CLIENT = """
import json, sys
folder, stem, repeats, rate, counts = sys.argv[1:]
for n in range(1, int(repeats) + 1):
    figures = {"completed": 4, "failed": 0, "total_token_throughput": float(rate) + n}
    with open(f"{folder}/{stem}-{n}.json", "w") as f:
        json.dump({"duration": 2.0, **figures}, f)
    with open(f"{folder}/{stem}-{n}.counters.json", "w") as f:
        mine = json.loads(counts)
        json.dump({"before": {}, "after": mine, "ranks": {"0": mine, "1": mine}}, f)
"""


class FakeServer:
    """Answers /metrics as a server on a route does."""

    pid = 2**22 + 1
    """Of no process: beyond what Linux gives."""

    def __init__(self, route: str, log: Path) -> None:
        packs = 0 if route == "stock" else 8
        text = (
            f'bytegate_chunks_total{{rank="0",route="{route}",switch=""}} 8.0\n'
            f'bytegate_packs_total{{rank="0",route="{route}",switch=""}} {packs}.0\n'
        )

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                return

        log.write_text("started\n", encoding="utf-8")
        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait_healthy(self, _timeout_s: float) -> None:
        return

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hits() -> list[int]:
    """Tokens that the prefix cache gave in a run."""
    return [60]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, hits: list[int]) -> list[str]:
    routes: list[str] = []
    rates = {"stock": 100.0, "fused": 200.0}

    def start(options: ServeOptions, *, log: Path, before: list[str]) -> FakeServer:
        assert options.route is not None
        assert before == servers.tether()
        routes.append(options.route)
        return FakeServer(options.route, log)

    def command(
        _url: str, load: Load, _prompts: Path, _warm: Path, _names: Path, folder: Path, stem: str
    ) -> list[str]:
        rate = rates[stem.partition("-")[0]] * load.concurrency + len(routes) / 10
        packs = 0 if routes[-1] == "stock" else 8
        counts = {"chunks": 8, "packs": packs, "cache_queries": 100, "cache_hits": hits[0]}
        words = (str(folder), stem, str(load.repeats), str(rate), json.dumps(counts))
        return [sys.executable, "-c", CLIENT, *words]

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(serving_client, "client_command", command)
    monkeypatch.setattr(serving_client, "tokenizer", lambda model, _folder: model)
    monkeypatch.setattr(serving, "_arguments", lambda options: list(options.extra))
    monkeypatch.setattr(serving, "tallies_of", lambda _url: [{"packs": {"bfloat16": 1}}])
    monkeypatch.setattr(serving, "folder_of", lambda _options: Path("small"))
    return routes


def test_arms_are_launched_abba_and_compared(started: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    made = serving.compare(ServeOptions(), [LOAD], tmp_path, progress=said.append)
    assert started == ["stock", "fused", "fused", "stock"]
    assert made.invalid == []
    assert len(made.runs) == 8
    (metric,) = made.metrics
    assert metric.name == "total_token_throughput"
    assert metric.resolved
    assert [p["packs"] for p in made.packs] == [0, 8, 8, 0]
    assert any("200" in line or "201" in line for line in said)


def test_every_launch_measures_every_level_with_the_cache_on(
    started: list[str], tmp_path: Path
) -> None:
    loads = levels([4, 1], repeats=2, output_tokens=4, sessions=SOME)
    made = serving.compare(ServeOptions(), loads, tmp_path)
    assert started == ["stock", "fused", "fused", "stock"]
    assert made.invalid == made.not_covered == []
    assert made.arguments == ["--enable-prefix-caching"]
    order = [(r.route, r.launch, r.concurrency, r.repeat) for r in made.runs]
    assert order[:6] == [
        ("stock", 1, 1, 1),
        ("stock", 1, 1, 2),
        ("stock", 1, 4, 1),
        ("stock", 1, 4, 2),
        ("fused", 1, 1, 1),
        ("fused", 1, 1, 2),
    ]
    assert [m.concurrency for m in made.metrics] == [1, 4]
    low, high = made.metrics
    assert low.launches["stock"] == pytest.approx([101.6, 101.9])
    assert high.launches["stock"] == pytest.approx([401.6, 401.9])
    assert [load["sessions"] for load in made.loads] == [1, 4]
    assert {r.wall_s for r in made.runs} == {2.0}
    assert (made.heads, made.kinds, made.prefix_caching) == (None, ["bfloat16"], True)


@pytest.mark.parametrize("told", [False, True, None])
def test_times_of_decode_steps_without_pynccl_are_named(
    told: bool | None,  # noqa: FBT001
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(serving, "tallies_of", lambda _url: [{"packs": {}, "pynccl": told}])
    made = serving.compare(ServeOptions(), [LOAD], tmp_path)
    assert len(started) == 4
    assert made.invalid == []
    named = ["stock", "fused"] if told is False else []
    assert [x.partition(":")[0].rpartition(" ")[2] for x in made.not_covered] == named


def test_sessions_that_the_cache_gave_nothing_are_invalid(
    started: list[str], hits: list[int], tmp_path: Path
) -> None:
    hits[0] = 0
    loads = levels([1], repeats=1, output_tokens=4, sessions=SOME)
    made = serving.compare(ServeOptions(), loads, tmp_path)
    assert made.metrics == []
    assert "stock launch 1 at 1 run 1 found nothing in the prefix cache" in made.invalid[0]
    again = serving.compare(ServeOptions(), [LOAD], tmp_path / "own")
    assert again.invalid == []  # nothing to find


def test_sessions_do_not_go_without_the_cache(tmp_path: Path) -> None:
    loads = levels([1], repeats=1, output_tokens=4, sessions=SOME)
    off = ServeOptions(extra=("--no-enable-prefix-caching",))
    with pytest.raises(PplError, match="--no-enable-prefix-caching: sessions need"):
        serving.compare(off, loads, tmp_path)
    on = ServeOptions(extra=("--enable-prefix-caching",))
    assert serving.with_caching(on, loads) == on
    assert serving.with_caching(ServeOptions(), [LOAD]) == ServeOptions()


def test_a_gpu_has_a_model_with_wide_ranks_and_what_ppl_serves_it_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(serving.serve, "plan", lambda *_: None)
    made = serving.options_of(None, 8, 8, ["--", "--seed", "1"], "cuda")
    assert made.model is not None
    assert serving._heads(Path(made.model), 8) == 16
    words = " ".join(made.extra)
    assert "--seed 1" in words
    assert "--max-num-batched-tokens 16384 --max-model-len 131072" in words
    assert "--kv-cache-memory-bytes 4G --gpu-memory-utilization 0.25" in words
    assert "--dtype bfloat16" in words
    half = serving.options_of(None, 2, 2, ["--dtype=float16"], "cuda")
    assert "bfloat16" not in half.extra
    assert "--skip-tokenizer-init" in words
    named = serving.options_of("org/model", 8, 8, ["--seed", "1"], "cuda")
    assert named.model == "org/model"
    assert not {"--max-num-batched-tokens", "--dtype"} & set(named.extra)
    assert serving.options_of(None, 2, 2, [], "cpu").extra == ()


def test_another_route_that_is_stock_in_truth_is_invalid(
    started: list[str], tmp_path: Path
) -> None:
    made = serving.compare(ServeOptions(), [LOAD], tmp_path, fused="stock")
    assert "packed nothing by the routed kernel" in made.invalid[0]
    assert made.metrics == []


def test_a_client_that_fails_is_one_line(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "print('oh'); raise SystemExit(7)"]
    monkeypatch.setattr(serving_client, "client_command", lambda *_: failing)
    with pytest.raises(PplError, match=r"client ended with 7: oh; see .*stock-1-at-2-client.log"):
        serving.compare(ServeOptions(), [LOAD], tmp_path)


def test_what_a_client_said_last_is_not_what_its_libraries_did() -> None:
    noise = "\nnanobind: leaked 2 types!\n - leaked type x\nSee https://nanobind.readthedocs.io\n"
    assert serving_client.last_line("one\nrefused" + noise) == "refused"
    assert serving_client.last_line("one\nrefused\n\n") == "refused"
    assert serving_client.last_line("") == "no output"


def test_a_server_that_does_not_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise RouteError("the server ended with 1 before it was up")

    monkeypatch.setattr(serving.serve, "start", start)
    with pytest.raises(PplError, match="stock, launch 1: the server ended with 1"):
        serving.compare(ServeOptions(), [LOAD], tmp_path)


def test_prefix_caching_and_no_vllm_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PplError, match="enable-prefix-caching"):
        serving.compare(ServeOptions(extra=("--enable-prefix-caching",)), [LOAD], tmp_path)
    find: Callable[[str], None] = lambda _name: None  # noqa: E731
    monkeypatch.setattr(serving.importlib.util, "find_spec", find)
    with pytest.raises(NotCovered, match="vLLM isn't installed"):
        serving.options_of(None, 2, 2, [])
