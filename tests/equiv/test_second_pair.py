"""A pair in a package outside: built, installed, found, run, and its faulty kernel caught."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from equiv.faults import FaultsRequest, run_faults

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).with_name("second_pair")

FAULTY = """
import torch

def scale_add(a, factor, bias, total):
    out = torch.empty(a.shape, dtype=a.dtype)
    torch.mul(a, factor, out=out)
    out += bias
    total[:1] += out[:1]  # the other rows are forgotten
    return out
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package and install it into a folder, without a network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("second")
    shutil.copytree(
        PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    target = ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run([*pip, *offline, *target], check=True, capture_output=True, timeout=120)
    return folder / "site"


@pytest.fixture
def command(site: Path, folder: Path) -> Command:
    """Run ``python -m equiv`` where the package is installed."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", site)))
        return subprocess.run(
            [sys.executable, "-m", "equiv", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return call


def test_the_package_imports_nothing_of_ours() -> None:
    source = (PACKAGE / "scale_add" / "pair.py").read_text(encoding="utf-8")
    lines = [s.strip() for s in source.splitlines()]
    imports = {s.split()[1].split(".")[0] for s in lines if s.startswith(("import ", "from "))}
    assert imports == {"__future__", "collections", "dataclasses", "math", "torch", "typing"}


def test_an_installed_pair_runs_like_our_own(command: Command, folder: Path) -> None:
    done = command("--pair", "scale_add", "--profile", "dev", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((folder / "out/equiv/equiv.json").read_text(encoding="utf-8"))
    assert (made["verdict"], made["pair"]) == ("PASS", "scale_add")
    (fused, absent) = made["candidates"]
    assert (fused["state"], absent["state"]) == ("passed", "not covered")
    assert [x["state"] for x in fused["lanes"]] == ["passed"] * 6
    assert sum(x["cases"] for x in fused["lanes"]) > 800
    assert all(x["oracle_checked"] == 0 for x in fused["lanes"])  # it has no model
    assert all(x["guarded"] == x["equal"] for x in fused["lanes"])


def test_a_faulty_kernel_of_it_is_caught(command: Command, folder: Path) -> None:
    (folder / "mine.py").write_text(FAULTY, encoding="utf-8")
    words = ("--pair", "scale_add", "--candidate", "mine.py:scale_add", "--lane", "alignment")
    done = command(*words)
    assert done.returncode == 1, done.stdout + done.stderr
    made = json.loads((folder / "out/equiv/equiv.json").read_text(encoding="utf-8"))
    (found,) = [f for x in made["candidates"][0]["lanes"] for f in x["findings"]]
    assert found["kind"] == "divergence"
    assert found["detail"].startswith("total: ")
    assert "scale_add/mine.py:scale_add/cpu/alignment/N=2,C=1," in found["case"]
    assert found["set_elements"] == 1


def test_its_own_faults_are_caught(
    site: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site)
    request = FaultsRequest(
        pair="scale_add", profile="dev", device="cpu", clean_cases=60, out=folder / "out"
    )
    made = run_faults(request)
    (row,) = made.faults
    assert (row.id, row.outcome, row.lane) == ("A1", "caught", "shapes")
    assert made.false_alarms["alarms"] == []
    assert set(made.false_alarms["candidates"]) == {
        "stock",
        "scale_add.pair:fused",
        "scale_add.pair:stock",
    }
    assert made.exit_code == 0
