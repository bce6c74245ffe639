"""What a run on a GPU asks of vLLM, as far as a machine without one can tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("httpx2", "scipy", "stamina"):
    pytest.importorskip(name)

from kvroute import serve, threshold  # noqa: E402 - the packages decide first
from ppl import model as small  # noqa: E402
from ppl import preflight, servers  # noqa: E402
from ppl.facts import ARMS, Arm, Instance, ServerFacts  # noqa: E402
from ppl.observe import Snapshot  # noqa: E402
from ppl.options import Options  # noqa: E402
from ppl.plan import Configuration, request  # noqa: E402
from ppl.servers import Launched, Server  # noqa: E402


@pytest.fixture(autouse=True)
def _plugin_there(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = type("Entry", (), {"name": "bytegate"})()
    monkeypatch.setattr(
        serve.importlib.metadata,
        "entry_points",
        lambda group, **_: [entry] if group == "vllm.general_plugins" else [],
    )


def words(options: Options, model: str = "somewhere") -> list[str]:
    launched = Launched(options, model, "cuda")
    return serve.plan(launched.serve_options("fused"), {}, "cuda").command


def value(command: list[str], name: str) -> str:
    assert command.count(name) == 1
    return command[command.index(name) + 1]


def test_the_small_model_is_served_on_a_gpu_at_the_budget_that_is_asked_for() -> None:
    made = words(Options(full=True), str(small.folder()))
    assert value(made, "--model") == str(small.folder())
    assert value(made, "--max-num-batched-tokens") == "16384"
    assert value(made, "--max-model-len") == "131072"
    assert value(made, "--kv-cache-memory-bytes") == "4G"
    assert value(made, "--decode-context-parallel-size") == "2"
    for flag in ("--skip-tokenizer-init", "--enable-scale-out", "--enforce-eager"):
        assert made.count(flag) == 1
    assert Launched(Options(full=True), "somewhere", "cuda").workspace is None


@pytest.mark.parametrize(("tp", "dcp"), [(8, 8), (8, 4), (4, 4)])
def test_any_number_of_ranks_is_launched(tp: int, dcp: int) -> None:
    made = words(Options(full=True, tp=tp, dcp=dcp, model="org/model"), "org/model")
    assert value(made, "--tensor-parallel-size") == str(tp)
    assert value(made, "--decode-context-parallel-size") == str(dcp)


def test_every_default_of_a_gpu_gives_way() -> None:
    mine = ("--max-num-batched-tokens=8192", "--kv-cache-memory-bytes", "9G")
    made = words(Options(full=True, arguments=(*mine, "--no-skip-tokenizer-init")))
    assert "--max-num-batched-tokens" not in made
    assert value(made, "--kv-cache-memory-bytes") == "9G"
    assert "--skip-tokenizer-init" not in made


def test_a_model_that_is_named_brings_its_own_arguments(tmp_path: Path) -> None:
    bare = words(Options(model=str(tmp_path), full=True), str(tmp_path))
    assert "--max-num-batched-tokens" not in bare
    assert "--skip-tokenizer-init" in bare
    (tmp_path / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in words(Options(model=str(tmp_path)), str(tmp_path))


@pytest.mark.parametrize("stated", [True, False])
def test_two_start_at_once_only_where_neither_measures_memory(
    *, stated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []

    def start(_self: Launched, arm: Arm, instance: Instance) -> Any:
        order.append(f"start {arm}")
        return SimpleNamespace(arm=arm, instance=instance)

    def wait(server: Any) -> None:
        order.append(f"up {server.arm}")
        server.instance = server.instance.model_copy(update={"up_s": 1.0})

    monkeypatch.setattr(Launched, "_start", start)
    monkeypatch.setattr(servers, "_wait", wait)
    more = ("--gpu-memory-utilization", "0.25") if stated else ()
    arguments = ("--kv-cache-memory-bytes", "4G", *more)
    launched = Launched(Options(model="m", arguments=arguments, out=tmp_path), "m", "cuda")
    launched.get(ARMS, lambda arm: Instance(arm=arm, launch=1, number=1, why="planned"))
    apart = ["start stock", "up stock", "start fused", "up fused"]
    together = ["start stock", "start fused", "up stock", "up fused"]
    assert order == (together if stated else apart)


LINE = (
    "(APIServer pid=7) INFO 11-30 10:00:00 [loggers.py:199] Engine 000: Iteration({n}): 1 context "
    "requests, {tokens} context tokens, 0 generation requests, 0 generation tokens, iteration "
    "elapsed time: 201.53 ms, GPU KV cache usage: 3.1%\n"
)
"""As ``vllm.v1.metrics.loggers.LoggingStatLogger`` of 0.33 writes it."""


def test_engine_steps_are_read_from_a_log_of_vllm_033(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "".join(LINE.format(n=n, tokens=t) for n, t in enumerate((16384, 16384, 1232)))
        + LINE.format(n=3, tokens=0)[:-20]  # still being written
    )
    process: Any = SimpleNamespace(log=log)
    endpoint: Any = None
    server = Server(
        "stock", endpoint, Instance(arm="stock", launch=1, number=1, why=""), process=process
    )
    assert server.steps() == [(16384, 0), (16384, 0), (1232, 0)]
    assert server.steps() == []


def test_a_tail_that_runs_as_decode_is_planned_where_the_server_tells_its_threshold() -> None:
    settings = {
        "max_num_batched_tokens": 16384,
        "decode_context_parallel_size": 2,
        "block_size": 64,
        "max_num_seqs": 1024,
    }
    facts = ServerFacts(
        arm="stock",
        url="http://host",
        launched=True,
        model="m",
        max_model_len=131072,
        settings=settings,
        settings_sha256=None,
        channel="collective_rpc",
        route="stock",
        facts={"decode_tokens": 512},
        versions={},
    )
    made = preflight.configuration(facts, None)
    assert made.decode_tokens == 512
    assert made.layout().workspace == 65536
    short, long = (request("t", 32768 + n, made) for n in (512, 513))
    assert [len(s.context_chunks) for s in short.steps] == [0, 1, 0]
    assert [len(s.context_chunks) for s in long.steps] == [0, 1, 1]
    silent = preflight.configuration(facts.model_copy(update={"facts": {}}), None)
    assert silent.decode_tokens == 1
    whole = [s.context_chunks for s in request("long", 100_000, made).steps]
    assert [len(c) for c in whole] == [0, 1, 1, 1, 1, 2, 2]
    assert whole[-1] == (65536, 32768)
    assert isinstance(made, Configuration)


class Builder:
    reorder_batch_threshold: int | None = 1


class FlashAttention(Builder):
    def __init__(self) -> None:
        self.reorder_batch_threshold = 512


class LinearAttention:
    reorder_batch_threshold = 4096


def worker(*kinds: type, nested: bool = True) -> Any:
    """Return a worker as vLLM's is, as far as builders are looked for."""
    groups = [SimpleNamespace(metadata_builders=[kind()]) for kind in kinds]
    runner = SimpleNamespace(attn_groups=[groups, []] if nested else groups)
    return SimpleNamespace(model_runner=runner)


@pytest.fixture
def mla(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.attention.mla_attention"
    fake = SimpleNamespace(MLACommonMetadataBuilder=Builder)
    monkeypatch.setitem(threshold.sys.modules, name, fake)


@pytest.mark.usefixtures("mla")
def test_the_threshold_is_the_largest_of_the_builders_of_this_process() -> None:
    assert threshold.decode_tokens() is None
    held = [Builder(), FlashAttention()]
    assert threshold.decode_tokens() == 512
    del held


@pytest.mark.usefixtures("mla")
def test_the_threshold_is_read_from_the_worker_where_the_heap_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threshold.gc, "get_objects", list)  # as after gc.freeze()
    held = [FlashAttention()]
    assert threshold.decode_tokens() is None
    for nested in (True, False):
        mine = worker(Builder, LinearAttention, FlashAttention, nested=nested)
        assert threshold.decode_tokens(mine) == 512
    assert threshold.decode_tokens(worker(Builder, LinearAttention)) == 1
    assert threshold.decode_tokens(worker(LinearAttention)) is None
    for other in (object(), SimpleNamespace(model_runner=SimpleNamespace(attn_groups=None))):
        assert threshold.decode_tokens(other) is None
    del held


@pytest.mark.usefixtures("mla")
def test_a_worker_of_another_form_leaves_the_old_way() -> None:
    held = [FlashAttention()]
    assert threshold.decode_tokens(SimpleNamespace(model_runner=None)) == 512
    del held


@pytest.mark.usefixtures("mla")
def test_the_extension_asks_the_worker_that_it_is_mixed_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvroute import extension, tally

    class Worker(extension.RouteExtension):
        model_runner = worker(FlashAttention).model_runner

    monkeypatch.setattr(threshold.gc, "get_objects", list)
    monkeypatch.setattr(tally, "TALLY", tally.Tally())
    assert Worker().bytegate_route()["decode_tokens"] == 512


def test_an_untold_threshold_is_named() -> None:
    for facts, named in (
        ({}, True),
        ({"decode_tokens": None}, True),
        ({"decode_tokens": 1}, False),
    ):
        seen = Snapshot(channel="collective_rpc", facts=facts)
        blanks = preflight._blanks("fused", seen, {"a": 1})
        assert any("as decode: assumed 1" in x for x in blanks) == named


def test_an_address_in_memory_is_no_configuration() -> None:
    one, other = (
        preflight.flat({"a": {"hook": f"<vllm.Hook object at {x}>", "b": 1}})
        for x in ("0x7f00aa", "0x7f00bb")
    )
    assert one == other
    assert preflight.flat({"a": "4"}) != preflight.flat({"a": "5"})
