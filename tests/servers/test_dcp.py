"""``ppl dcp`` on real vLLM servers: a sharded one against tensor parallelism alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
for name in ("httpx2", "scipy", "stamina"):
    pytest.importorskip(name)

from ppl import dcp_evidence  # noqa: E402 - vLLM decides first
from ppl.dcp_evidence import DcpEvidence  # noqa: E402

ROOT = Path(__file__).parents[2]
TEXTS = ("alice", "hamlet")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


def run(out: Path, *words: str, code: int) -> DcpEvidence:
    texts = [w for t in TEXTS for w in ("--texts", t)]
    done = subprocess.run(
        [sys.executable, "-m", "ppl", "dcp", "--out", str(out), *texts, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout + done.stderr)
    assert done.returncode == code
    return dcp_evidence.read(out / "dcp.json")


def test_sharding_moves_nothing_beyond_roundings(tmp_path: Path) -> None:
    made = run(tmp_path, code=0)
    assert made.verdict == "WITHIN"
    assert [t.text for t in made.texts] == list(TEXTS)
    assert all(t.judged > 1000 and t.merged > 0 and t.differing > 0 for t in made.texts)
    assert all(t.control_differing == 0 for t in made.texts)


@pytest.mark.parametrize("fault", ["L04", "L07", "L10", "L11"])
def test_a_faulty_loop_is_outside(fault: str, tmp_path: Path) -> None:
    made = run(tmp_path, "--route", f"fault:{fault}", code=1)
    assert made.verdict == "OUTSIDE"
    assert all(t.control_differing == 0 for t in made.texts)
