"""The kernel benchmark: its table from given times, its exit codes, and that it needs a GPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from equiv import bench, candidates, document
from equiv.command import run_app
from equiv.errors import ExitCode, NotCovered, UsageError
from equiv.execute import Loaded
from equiv.pairs import load_pair
from equiv.perf import pack
from equiv.perf.timing import Arm, Timing
from kvpack import stock
from kvpack.spec import Unavailable

PAIR = load_pair("kvpack")
TIMES_S = {
    "candidate": 2e-6,
    "again": 2e-6,
    "rival": 3e-6,
    "reference": 8e-6,
    "copy": 1e-6,
    "copy_kernel": 9e-7,
}
ONLY = {"T": [1, 65_536], "H": [1]}


@pytest.fixture
def on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run arms on the CPU, once each, and give them the times above."""
    kernels: dict[str, Any] = {"triton": stock.kv_pack, "vllm": stock.kv_pack}

    def measure(arms: Sequence[Arm], sets: int, *_: Any, **options: Any) -> dict[str, Timing]:
        slow = 2.0 if options["alone"] else 1.0
        return {
            arm.name: Timing(
                arm.name, (slow * TIMES_S[arm.name],) * 5, tuple(map(arm.work, range(sets)))
            )
            for arm in arms
        }

    def load(_pair: Any, name: str, _device: str, _library: str | None) -> Loaded:
        if isinstance(kernels[name], str):
            raise Unavailable(kernels[name])
        return Loaded(name, kernels[name], "dispatch")

    monkeypatch.setattr(pack, "measure", measure)
    monkeypatch.setattr(pack, "input_sets", lambda _moved: 1)
    monkeypatch.setattr(
        pack, "copy_arm", lambda *_, by_kernel: Arm("copy_kernel" if by_kernel else "copy", int)
    )
    monkeypatch.setattr(pack, "collect", lambda *_: {"device": {"model": "a GPU"}})
    monkeypatch.setattr(pack.timing, "require_cuda", lambda _: torch.device("cpu"))
    monkeypatch.setattr(candidates, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return kernels


def run() -> pack.Bench:
    options = {"candidate": "triton", "rival": "vllm", "device": "cuda", "library": None}
    return pack.run(PAIR, **options, only=ONLY, command="bench pack")  # type: ignore[arg-type]


def test_every_cell_is_timed_in_both_modes(on_a_fake_gpu: dict[str, Any]) -> None:
    del on_a_fake_gpu
    made = run()
    assert made.exit_code == ExitCode.PASS
    assert len(made.cells) == 2 * 4 * 2  # T, dtypes with and without fp8, modes
    found = made.cells[0].ratio("rival")
    assert found is not None
    assert found.median == pytest.approx(1.5)
    copy = made.cells[0].ratio("copy")
    assert copy is not None
    assert copy.median == pytest.approx(0.45)  # of the faster


def test_wrong_bytes_fail_whatever_the_speed(on_a_fake_gpu: dict[str, Any]) -> None:
    def wrong(kv_nope: torch.Tensor, k_pe: torch.Tensor, use_fp8: bool) -> Any:  # noqa: FBT001
        k, v = stock.kv_pack(kv_nope, k_pe, use_fp8)
        k.view(torch.uint8)[-1, -1, -1] ^= 1
        return k, v

    on_a_fake_gpu["triton"] = wrong
    made = run()
    assert made.exit_code == ExitCode.FAIL
    assert "but for 16 cells" in document.markdown(pack.blocks(made))


def test_a_missing_rival_is_not_covered(on_a_fake_gpu: dict[str, Any], tmp_path: Path) -> None:
    on_a_fake_gpu["vllm"] = "there is no vLLM"
    made = run()
    assert made.exit_code == ExitCode.INVALID
    data, text = pack.write(made, tmp_path)
    assert json.loads(data.read_text())["schema"] == "bytegate.bench.pack"
    assert "there is no vLLM" in text.read_text()


def test_a_missing_candidate_is_not_covered(on_a_fake_gpu: dict[str, Any]) -> None:
    on_a_fake_gpu["triton"] = "there is no Triton"
    with pytest.raises(NotCovered, match="candidate triton: there is no Triton"):
        run()


def test_the_worst_ratio_comes_first(on_a_fake_gpu: dict[str, Any]) -> None:
    del on_a_fake_gpu
    made = run()
    made.cells[3].runs_s["rival"] = [1e-6] * 5
    assert pack.worst_first(made)[0] is made.cells[3]


@pytest.mark.parametrize(
    ("point", "moved"),
    [
        # 2 tokens of 3 heads: 256 columns in, 192 + 128 out, and k_pe once a token
        ({"fp8": 1}, 6 * (512 + 320) + 2 * 128),
        ({"fp8": 0}, 6 * (256 + 384) + 2 * 128),
    ],
)
def test_bytes_are_counted_once(point: dict[str, Any], moved: int) -> None:
    whole = {"T": 2, "H": 3, "dtype": "bf16", "pe": "same", "rope": 64, **point}
    assert PAIR.bytes_moved(whole) == moved  # type: ignore[attr-defined]


def test_unknown_dimensions_are_bad_usage() -> None:
    with pytest.raises(UsageError, match="no dimension X"):
        pack.points(PAIR, {"X": [1]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_on_a_cpu_nothing_is_covered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_app(bench.app, ["pack", "--out", str(tmp_path)], "bench")
    assert code == ExitCode.INVALID
    assert "device time needs a GPU" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
