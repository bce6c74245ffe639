"""The reduce-scatter without PyNccl is still silent in the version that the page speaks of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

SCRIPT = Path(__file__).parents[2] / "docs" / "upstream" / "dcp-reduce-scatter" / "reproduce.py"
MENDED = """
import runpy, sys
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
whole = CudaCommunicator.reduce_scatter
def checked(self, input_, dim=-1):
    if self.pynccl_comm is None or self.pynccl_comm.disabled:
        raise RuntimeError("PyNccl is off")
    return whole(self, input_, dim)
CudaCommunicator.reduce_scatter = checked
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_nobody_wrote_what_comes_back() -> None:
    done = run(str(SCRIPT))
    assert (done.returncode, done.stdout) == (
        1,
        "no error; 48 of 48 elements were never written\n",
    ), done.stderr


def test_a_call_that_refuses_is_no_finding() -> None:
    done = run("-c", MENDED, str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not silent: RuntimeError")
