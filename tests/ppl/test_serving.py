"""Serving A/B: what vLLM's client is sent, what its figures become, and what is not believed."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from equiv.errors import NotCovered
from equiv.perf.record import ServingRun, is_tail
from kvroute.errors import RouteError
from kvroute.serve import ServeOptions
from ppl import serving
from ppl.errors import PplError
from ppl.serving import Load

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
    (metric,) = serving.metrics(runs_of((10.0, 10.01), (9.0, 9.01), "median_ttft_ms"), LOAD)
    assert metric.resolved
    assert metric.change == pytest.approx(-0.1, abs=1e-3)
    assert metric.noise == pytest.approx(0.001, rel=1e-2)
    (metric,) = serving.metrics(runs_of((10.0, 10.5), (9.8, 9.9), "median_ttft_ms"), LOAD)
    assert not metric.resolved
    assert metric.why_not == "within the noise of two launches"
    assert metric.change is not None  # shown, beside the noise


def test_launches_that_differ_by_chance_alone_are_seldom_told_apart() -> None:
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(2000):
        a, b, c, d = rng.normal(100, 1, 4)
        (metric,) = serving.metrics(runs_of((a, b), (c, d), "median_ttft_ms"), LOAD)
        told += metric.resolved
    assert told <= 2000 * 0.01 + 3 * (2000 * 0.01) ** 0.5


@pytest.mark.parametrize("name", ["p99_ttft_ms", "p90_e2el_ms", "p99_itl_ms"])
def test_a_tail_of_too_few_requests_has_no_figure(name: str) -> None:
    (metric,) = serving.metrics(runs_of((10.0, 10.0), (5.0, 5.0), name), LOAD)
    assert is_tail(name)
    assert (metric.stock, metric.fused, metric.change, metric.launches) == (None, None, None, {})
    assert metric.why_not.startswith("needs ")


@pytest.mark.parametrize(("requests", "enough"), [(99, False), (100, True)])
def test_a_p90_needs_ten_samples_beyond_it(requests: int, *, enough: bool) -> None:
    load = Load(input_tokens=40, output_tokens=3, requests=requests, concurrency=2, repeats=2)
    runs = runs_of((10.0, 10.0), (5.0, 5.0), "p90_ttft_ms")
    assert serving.metrics(runs, load)[0].resolved == enough


def test_a_tail_needs_the_noise_to_resolve_it() -> None:
    (metric,) = serving.metrics(runs_of((10.0, 10.0), (5.0, 5.01), "p99_ttft_ms"), MANY)
    assert metric.resolved
    assert metric.fused == pytest.approx(5.005)
    (metric,) = serving.metrics(runs_of((10.0, 12.0), (9.0, 11.0), "p99_ttft_ms"), MANY)
    assert (metric.resolved, metric.fused) == (False, None)
    assert metric.why_not == "within the noise of two launches"


def test_repeats_of_a_launch_count_once() -> None:
    runs = [
        ServingRun(route, launch, repeat, 4, 0, {"median_ttft_ms": base + 0.01 * launch + repeat})
        for route, base in (("stock", 10.0), ("fused", 5.0))
        for launch in (1, 2)
        for repeat in (1, 2, 3)
    ]
    (metric,) = serving.metrics(runs, LOAD)
    assert metric.launches["stock"] == pytest.approx([12.01, 12.02])
    assert metric.resolved


# -- what is not believed ---------------------------------------------------------------

GOOD = {"calls": 8, "chunks": 8, "packs": 0}
PACKED = {"calls": 8, "chunks": 8, "packs": 8}
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


def test_counters_are_summed_over_ranks() -> None:
    text = (
        "# HELP bytegate_packs_total x\n"
        'bytegate_packs_total{rank="0",route="fused",switch=""} 8.0\n'
        'bytegate_packs_total{rank="1",route="fused",switch=""} 8.0\n'
        'bytegate_chunks_total{rank="0",route="fused",switch=""} 9.0\n'
        'vllm:num_preemptions_total{engine="0"} 3.0\n'
    )
    assert serving.counters(text) == {"calls": 0, "chunks": 9, "packs": 16}
    assert serving.counters("") == {"calls": 0, "chunks": 0, "packs": 0}


# -- the client -------------------------------------------------------------------------


def test_every_launch_is_sent_the_same_ids(tmp_path: Path) -> None:
    lines = serving.trace(LOAD, tmp_path).read_text("utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert [e["input_length"] for e in entries] == [40] * 4
    seeds = [seed for e in entries for seed in e["hash_ids"]]
    assert len(seeds) == len(set(seeds)) == 4 * 3  # three blocks of 16 each, none shared
    command = serving.client_command("http://x", LOAD, tmp_path, tmp_path, tmp_path, "stock-1")
    assert command[1:3] == ["-m", "ppl.vllm_bench"]
    assert "--no-self-timed" in command


def test_a_model_without_a_tokenizer_gets_a_stand_in_of_its_size(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 50}', encoding="utf-8")
    place = serving.tokenizer(model, tmp_path)
    made = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    assert made.get_vocab_size() == 50
    (model / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert serving.tokenizer(model, tmp_path) == model
    assert serving.tokenizer(Path("org/name"), tmp_path) == Path("org/name")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"completed": 1}', '{"completed": "x"}'])
def test_a_result_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PplError, match="left no result"):
        serving.read(path, "stock", 1, 1)
    with pytest.raises(PplError, match="left no result"):
        serving.read(tmp_path / "none.json", "stock", 1, 1)


# -- all of it, with stand-ins for the server and the client --------------------------------

CLIENT = """
import json, sys
folder, stem, repeats, rate = sys.argv[1:]
for n in range(1, int(repeats) + 1):
    with open(f"{folder}/{stem}-{n}.json", "w") as f:
        json.dump({"completed": 4, "failed": 0, "total_token_throughput": float(rate) + n}, f)
"""


class FakeServer:
    """Answers /metrics as a server on a route does."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    routes: list[str] = []
    rates = {"stock": 100.0, "fused": 200.0}

    def start(options: ServeOptions, *, log: Path) -> FakeServer:
        assert options.route is not None
        routes.append(options.route)
        return FakeServer(options.route, log)

    def command(
        _url: str, load: Load, _prompts: Path, _names: Path, folder: Path, stem: str
    ) -> list[str]:
        rate = rates[stem.partition("-")[0]] + len(routes) / 10
        words = (str(folder), stem, str(load.repeats), str(rate))
        return [sys.executable, "-c", CLIENT, *words]

    monkeypatch.setattr(serving.serve, "start", start)
    monkeypatch.setattr(serving, "client_command", command)
    monkeypatch.setattr(serving, "tokenizer", lambda model, _folder: model)
    monkeypatch.setattr(serving, "_arguments", lambda _options: ["--dtype", "bfloat16"])
    return routes


def test_arms_are_launched_abba_and_compared(started: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    made = serving.compare(ServeOptions(), LOAD, tmp_path, progress=said.append)
    assert started == ["stock", "fused", "fused", "stock"]
    assert made.invalid == []
    assert len(made.runs) == 8
    (metric,) = made.metrics
    assert metric.name == "total_token_throughput"
    assert metric.resolved
    assert [p["packs"] for p in made.packs] == [0, 8, 8, 0]
    assert any("200" in line or "201" in line for line in said)


def test_another_route_that_is_stock_in_truth_is_invalid(
    started: list[str], tmp_path: Path
) -> None:
    made = serving.compare(ServeOptions(), LOAD, tmp_path, fused="stock")
    assert "packed nothing by the routed kernel" in made.invalid[0]
    assert made.metrics == []


def test_a_client_that_fails_is_one_line(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "print('oh'); raise SystemExit(7)"]
    monkeypatch.setattr(serving, "client_command", lambda *_: failing)
    with pytest.raises(PplError, match=r"client ended with 7: oh; see .*stock-1-client.log"):
        serving.compare(ServeOptions(), LOAD, tmp_path)


def test_a_server_that_does_not_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise RouteError("the server ended with 1 before it was up")

    monkeypatch.setattr(serving.serve, "start", start)
    with pytest.raises(PplError, match="stock, launch 1: the server ended with 1"):
        serving.compare(ServeOptions(), LOAD, tmp_path)


def test_prefix_caching_and_no_vllm_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PplError, match="enable-prefix-caching"):
        serving.compare(ServeOptions(extra=("--enable-prefix-caching",)), LOAD, tmp_path)
    find: Callable[[str], None] = lambda _name: None  # noqa: E731
    monkeypatch.setattr(serving.importlib.util, "find_spec", find)
    with pytest.raises(NotCovered, match="vLLM isn't installed"):
        serving.options_of(None, 2, 2, [])
