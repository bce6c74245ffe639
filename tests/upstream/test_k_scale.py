"""fp8 context prefill applies k_scale with decode context parallelism, and not without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

SCRIPT = Path(__file__).parents[2] / "docs" / "upstream" / "k-scale" / "reproduce.py"


def test_the_two_paths_agree_at_a_scale_of_one_and_at_no_other() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    found = {float(scale): (float(plain), float(parallel)) for scale, plain, parallel in rows}
    assert set(found) == {1.0, 0.07, 3.7}
    for scale, (plain, parallel) in found.items():
        assert parallel < 0.1
        assert plain < 0.1 if scale == 1 else plain > 0.5
