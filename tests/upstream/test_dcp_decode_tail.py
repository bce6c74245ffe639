"""The script for one Hopper GPU: its reference, and that each fault is found and named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "docs" / "upstream" / "dcp-decode-tail" / "reproduce.py"
REQUESTS = ((1, 40), (69, 100), (20, 0))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dcp_decode_tail", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_references_merge_to_attention_over_all_keys(
    script: ModuleType, ranks: int
) -> None:
    expected = script.reference(script.draw(script.Case(REQUESTS, ranks=ranks), "cpu"))
    merged = script.merge(expected.outputs, expected.lses)
    torch.testing.assert_close(merged, expected.merged, rtol=0, atol=1e-12)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_right_attention_passes(script: ModuleType, ranks: int, page: int) -> None:
    case = script.Case(REQUESTS, ranks=ranks, page=page)
    line, wrong = script.judge(script.draw(case, "cpu"), "cpu", "")
    assert not wrong, line
    assert line.count("global") == ranks


@pytest.mark.parametrize(
    "fault", ["local", "half", "none", "packed-row", "rank-0", "strict", "lse-layout"]
)
def test_a_fault_is_found_and_named(script: ModuleType, fault: str) -> None:
    case = script.Case(REQUESTS[1:2])
    line, wrong = script.judge(script.draw(case, "cpu"), "cpu", fault)
    assert {"lse", "merged"} <= wrong
    assert line.splitlines()[0].split(" | ")[-1].split()[-1] == fault
    found = {case: wrong, script.replace(case, ranks=1): set()}
    assert "a rank's own result" in script.conclude(found)


def test_one_token_does_not_show_a_local_mask(script: ModuleType) -> None:
    case = script.Case(((1, 41),))
    assert not script.judge(script.draw(case, "cpu"), "cpu", "local")[1]


def test_without_a_hopper_gpu_it_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.splitlines() == ["NOT RUN: no Hopper GPU: FLASH_ATTN_MLA runs on no other"]
