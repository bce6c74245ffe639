"""Real runs: a faulty pack fails the gate, and what a run recorded comes out again when verified.

The catalogue's faults up to the gate's verdict are in ``test_catalogue.py``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from catalogue import judged, loop, policy
from evidence_tree import bytegate, edit

from equiv.pairs import load_pair

ROOT = Path(__file__).resolve().parents[2]
PAIR = load_pair("kvpack")
FAULTS = [f for f in PAIR.faults if not f.needs]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder where hypothesis keeps no examples yet."""
    monkeypatch.chdir(tmp_path)


# -- the loop -----------------------------------------------------------------------------

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM to run its loop"
)


@needs_vllm
def test_a_faulty_pack_fails_the_loop_layer_and_a_clean_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packs.py").write_text(
        "from kvroute.packs import cat_pack\n"
        "def clean(kv_nope, k_pe, use_fp8):\n"
        "    return cat_pack(kv_nope, k_pe, use_fp8)\n"
        "def faulty(kv_nope, k_pe, use_fp8):\n"
        "    k, v = cat_pack(kv_nope, k_pe.roll(1, 0), use_fp8)\n"
        "    return k, v\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, code in (("faulty", 1), ("clean", 0)):
        done = judged(tmp_path / name, **loop("edges", pack=f"packs:{name}")(tmp_path / name))
        assert done.code == code, done.said
        assert ("vLLM's loop on cpu: failed: lane edges:" in done.said) == bool(code)


@needs_vllm
def test_a_recorded_batch_comes_out_again(tmp_path: Path) -> None:
    loop("edges")(tmp_path)
    file = tmp_path / "loop" / "loop.json"
    words = ("verify", str(file), "--cases", "3", "--seed", "1")
    done = bytegate(*words)
    assert done.code == 0, done.said
    assert "3 of them; with its candidate 3 passed again" in done.said

    def other(made: dict[str, Any]) -> None:
        for x in made["lanes"][0]["samples"]:
            x["output_hash"] = "0" * 32

    edit(file, other)
    done = bytegate(*words)
    assert done.code == 1
    assert "outputs are" in done.said


# -- verify --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``equiv.json`` of a real run: a clean kernel, one lane."""
    folder = tmp_path_factory.mktemp("recorded")
    words = ("--candidate", FAULTS[0].clean, "--lane", "strides", "--device", "cpu")
    assert bytegate("equiv", *words, "--out", str(folder)).code == 0
    return folder / "equiv.json"


VERIFY = ("--cases", "4", "--seed", "7")


def test_recorded_cases_come_out_again(recorded: Path) -> None:
    done = bytegate("verify", str(recorded), *VERIFY)
    assert done.code == 0, done.said
    assert "inputs of recorded cases" in done.said
    assert "4 of them; with its candidate 4 passed again" in done.said


@pytest.mark.parametrize("which", ["input_hash", "output_hash"])
def test_a_hash_that_was_edited_does_not_come_out_again(
    which: str, recorded: Path, tmp_path: Path
) -> None:
    def other(made: dict[str, Any]) -> None:
        for x in made["candidates"][0]["lanes"][0]["samples"]:
            x[which] = "0" * 32

    copy = tmp_path / "equiv.json"
    copy.write_bytes(recorded.read_bytes())
    edit(copy, other)
    done = bytegate("verify", str(copy), *VERIFY)
    assert done.code == 1
    assert f"{which.partition('_')[0]}s are" in done.said
    assert "DIFFERS" in done.said


def test_outputs_of_another_torch_are_not_covered(recorded: Path, tmp_path: Path) -> None:
    def other(made: dict[str, Any]) -> None:
        made["environment"]["versions"]["torch"] = "2.12.0"
        for x in made["candidates"][0]["lanes"][0]["samples"]:
            x["output_hash"] = "0" * 32

    copy = tmp_path / "equiv.json"
    copy.write_bytes(recorded.read_bytes())
    edit(copy, other)
    done = bytegate("verify", str(copy), *VERIFY)
    assert done.code == 0, done.said
    assert "made with torch 2.12.0" in done.said


def test_inputs_of_a_gpu_come_out_on_a_cpu() -> None:
    """Reports of a GPU are in the repository: their operands are the same here, bit for bit."""
    file = ROOT / "docs" / "results" / "equiv-h200-gate.json"
    done = bytegate("verify", str(file), *VERIFY)
    assert done.code == 0, done.said
    assert "inputs of recorded cases" in done.said
    assert "made on cuda, and this is" in done.said or "outputs in recorded cases" in done.said


def test_a_planted_fault_is_found_again_on_its_smallest_case(tmp_path: Path) -> None:
    words = ("--only", "K06", "--clean-cases", "0", "--profile", "dev", "--device", "cpu")
    assert bytegate("equiv", "faults", *words, "--out", str(tmp_path)).code == 0
    file = tmp_path / "faults.json"
    done = bytegate("verify", str(file))
    assert done.code == 0, done.said
    assert "1 of the picked fail again" in done.said

    def harmless(made: dict[str, Any]) -> None:
        row = made["faults"][0]
        row["smallest"] = row["smallest"].replace(row["candidate"], FAULTS[0].clean)

    edit(file, harmless)
    done = bytegate("verify", str(file))
    assert done.code == 1
    assert "its smallest case passes" in done.said


def test_a_file_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    done = bytegate("verify", str(tmp_path / "gate.json"))
    assert done.code == 2
    assert done.said.count("\n") == 1
    (tmp_path / "x.json").write_text(json.dumps({"schema": "theirs"}), encoding="utf-8")
    assert bytegate("verify", str(tmp_path / "x.json")).code == 2


# -- the whole, by one command ----------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_one_command_runs_what_the_policy_asks_for(tmp_path: Path) -> None:
    path = policy(
        tmp_path,
        kernel=f'candidates = ["{FAULTS[0].clean}"]\nlanes = ["shapes"]',
        faults='kernel = "any"\nloop = "no"\nclean_cases = 100',
    )
    done = bytegate("gate", "--policy", str(path), "--out", str(tmp_path / "out"))
    assert done.code == 0, done.said
    made = json.loads((tmp_path / "out" / "gate.json").read_text(encoding="utf-8"))
    assert [code for _, code in made["ran"]] == [0, 0]
    assert {f["layer"] for f in made["files"]} == {"kernel", "kernel_faults"}


def test_a_layer_that_cannot_run_is_not_covered_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equiv.gate.run.ENTRY", "import sys; sys.exit('bytegate: no such thing')")
    (tmp_path / "out" / "equiv").mkdir(parents=True)
    (tmp_path / "out" / "equiv" / "equiv.json").write_text("stale", encoding="utf-8")
    done = bytegate("gate", "--out", str(tmp_path / "out"))
    assert done.code == 4
    assert "kernel on any device: not covered: exit code 1: no such thing" in done.said
    assert not (tmp_path / "out" / "equiv" / "equiv.json").exists()
