"""What ``bytegate serve`` starts, and how it says no."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvroute import serve
from kvroute.errors import RouteError
from kvroute.process import ServerProcess
from kvroute.serve import ServeOptions, parse, plan


@pytest.fixture(autouse=True)
def _plugin_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = type("Entry", (), {"name": "bytegate"})()
    monkeypatch.setattr(
        serve.importlib.metadata,
        "entry_points",
        lambda group, **_: [entry] if group == "vllm.general_plugins" else [],  # not torch's
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(serve.model, "make", lambda folder, **_: folder)


def test_a_cpu_server_gets_the_small_model_and_dcp() -> None:
    launch = plan(ServeOptions(route="fused", workspace=1024), {}, "cpu")
    words = " ".join(launch.command)
    assert "--tensor-parallel-size 2 --decode-context-parallel-size 2" in words
    assert "small-deepseek-v2" in words
    assert launch.environment["BYTEGATE_ROUTE"] == "fused"
    assert launch.environment["BYTEGATE_CPU_DCP"] == "1"
    assert launch.environment["BYTEGATE_WORKSPACE_ROWS"] == "1024"


def test_variables_of_the_caller_do_not_leak_into_another_route() -> None:
    leftovers = {"BYTEGATE_ROUTE": "fused", "BYTEGATE_PATCH": "os:getcwd"}
    launch = plan(ServeOptions(route="stock"), leftovers, "cpu")
    assert launch.environment["BYTEGATE_ROUTE"] == "stock"
    assert "BYTEGATE_PATCH" not in launch.environment


def test_arguments_for_vllm_win_over_the_defaults() -> None:
    extra = ("--max-num-batched-tokens", "256", "--dtype=float32", "--enable-prefix-caching")
    words = plan(ServeOptions(extra=extra), {}, "cpu").command
    assert words.count("--max-num-batched-tokens") == 1
    assert "--dtype" not in words
    assert "--no-enable-prefix-caching" not in words


def test_a_gpu_server_needs_a_model() -> None:
    with pytest.raises(RouteError, match="--model is missing"):
        plan(ServeOptions(), {}, "cuda")
    words = plan(ServeOptions(model="somewhere"), {}, "cuda").command
    assert "CPU_MLA" not in words


@pytest.mark.parametrize(
    "options",
    [
        ServeOptions(route="fast"),
        ServeOptions(route="no.such:pack"),
        ServeOptions(route="fault:L99"),
        ServeOptions(patches=("no.such:patch",)),
        ServeOptions(tp=2, dcp=3),
        ServeOptions(tp=0),
        ServeOptions(workspace=0),
        ServeOptions(port=70_000),
        ServeOptions(port=-1),
        ServeOptions(host="203.0.113.7"),
        ServeOptions(evidence=Path("/dev/null/evidence")),
    ],
)
def test_what_can_not_work_is_refused_before_anything_starts(options: ServeOptions) -> None:
    with pytest.raises(RouteError, match=r"\A[^\n]+\Z"):
        plan(options, {}, "cpu")


@pytest.mark.parametrize(("tp", "dcp"), [(8, 8), (8, 4), (8, 2), (4, 4), (4, 1), (1, 1), (3, 3)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_number_of_ranks_is_passed_on(tp: int, dcp: int, device: str) -> None:
    options = parse(["--tp", str(tp), "--dcp", str(dcp), "--model", "org/model"])
    words = " ".join(plan(options, {}, device).command)
    assert f"--tensor-parallel-size {tp} --decode-context-parallel-size {dcp} " in words


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 4), (4, 4), (8, 8), (3, 12)])
def test_the_small_model_has_heads_for_every_rank(
    tp: int, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = serve.small_model(tp)
    assert serve.heads_of(str(folder)) == heads
    assert folder.name.endswith(f"-h{heads}") == (heads != 4)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert serve.small_model(tp) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_heads_that_ranks_can_not_share_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"text_config": {"num_attention_heads": 12}}', encoding="utf-8")
    with pytest.raises(RouteError, match="tp=8: the model has 12 heads"):
        plan(ServeOptions(tp=8, dcp=8, model=str(tmp_path)), {}, "cpu")
    plan(ServeOptions(tp=4, dcp=4, model=str(tmp_path)), {}, "cpu")
    config.write_text("[]", encoding="utf-8")
    plan(ServeOptions(tp=8, dcp=8, model=str(tmp_path)), {}, "cpu")


def test_a_server_whose_plugin_vllm_would_not_load_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RouteError, match="VLLM_PLUGINS"):
        plan(ServeOptions(), {"VLLM_PLUGINS": "other"}, "cpu")
    monkeypatch.setattr(serve.importlib.metadata, "entry_points", lambda **_: [])
    with pytest.raises(RouteError, match="install this project"):
        plan(ServeOptions(), {}, "cpu")


def test_the_command_line_passes_on_what_is_vllms() -> None:
    options = parse(["--route", "fault:L07", "--dcp", "2", "--seed", "3", "--", "--enforce-eager"])
    assert options.route == "fault:L07"
    assert options.extra == ("--seed", "3", "--enforce-eager")


CHILD = (
    "import subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', 'import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)']); time.sleep(60)"
)


def test_stopping_leaves_no_child_behind(tmp_path: Path) -> None:
    server = ServerProcess(
        [sys.executable, "-c", CHILD], {"PATH": ""}, "http://127.0.0.1:9", tmp_path / "log"
    )
    end = time.monotonic() + 10
    family: list[psutil.Process] = []
    while not family and time.monotonic() < end:
        family = psutil.Process(server.pid).children(recursive=True)
        time.sleep(0.05)
    assert family
    server.stop(grace_s=5)
    assert not [process for process in family if process.is_running()]


def test_a_server_that_dies_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    with (
        ServerProcess(command, {}, "http://127.0.0.1:9", tmp_path / "log") as server,
        pytest.raises(
            RouteError, match=r"\Athe server ended with 7 before it was up; see [^\n]+\Z"
        ),
    ):
        server.wait_healthy(10)


@pytest.mark.parametrize("words", [["--tp", "two"], ["--route"], ["--port", "x"]])
def test_bad_words_are_one_line_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("bytegate: ")
    assert said.count("\n") == 1


def test_a_signal_while_the_server_is_being_started_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(_: ServeOptions) -> ServerProcess:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        started.append(ServerProcess(command, {}, "http://127.0.0.1:9", tmp_path / "log"))
        os.kill(os.getpid(), signal.SIGHUP)
        return started[0]

    monkeypatch.setattr(serve, "start", start)
    before = signal.getsignal(signal.SIGHUP)
    assert serve.serve(ServeOptions()) == 0
    assert not psutil.pid_exists(started[0].pid)
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_server_switches_off_what_its_host_lacks(
    *, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda _: object() if there else None)
    names = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_KIMI_K3_GEMM_AR")
    made = plan(ServeOptions(model="somewhere"), {}, "cuda").environment
    assert {made.get(name) for name in names} == ({None} if there else {"0"})
    mine = plan(ServeOptions(model="somewhere"), dict.fromkeys(names, "1"), "cuda").environment
    assert {mine[name] for name in names} == {"1"}
    assert not set(names) & set(plan(ServeOptions(), {}, "cpu").environment)
