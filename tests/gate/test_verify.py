"""``bytegate verify``: what it compares, what it repeats, what it can't, and how it ends.

Each check has a fault that fails it, beside a twin that passes.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_tree import bytegate, candidate, edit, equiv, fault, faults, finding, lane, loop

from equiv import evidence
from equiv.result import NOT_ALONE

CLEAN = """
from kvpack.faults.kernel import kv_pack as clean


def kv_pack(kv_nope, k_pe, use_fp8):
    return clean(kv_nope, k_pe, use_fp8)
"""
FAULTY = CLEAN.replace("k_pe, use_fp8)\n", "k_pe.roll(1, 2), use_fp8)\n").replace(
    "def kv_pack(kv_nope, k_pe.roll(1, 2), use_fp8)", "def kv_pack(kv_nope, k_pe, use_fp8)"
)
VERIFY = ("--cases", "3", "--seed", "1")
OWN = "own_kernel.py:kv_pack"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a kernel of one's own and the evidence of one lane of it: clean, and faulty."""
    made = {}
    for name, text, code in (("clean", CLEAN, 0), ("faulty", FAULTY, 1)):
        folder = made[name] = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            (folder / "own_kernel.py").write_text(text, encoding="utf-8")
            words = ("--candidate", OWN, "--lane", "sizes", "--device", "cpu", "--profile", "dev")
            done = bytegate("equiv", *words, "--out", ".")
            assert done.code == code, done.said
    return made


def here(recorded: dict[str, Path], name: str) -> None:
    """Copy a kernel and its evidence to the working folder."""
    shutil.copytree(recorded[name], ".", dirs_exist_ok=True)


# -- sources ------------------------------------------------------------------------------


def test_the_source_of_ones_own_kernel_is_the_recorded_one(recorded: dict[str, Path]) -> None:
    here(recorded, "clean")
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert done.code == 0, done.said
    assert f"the source of {OWN}" in done.said
    assert "candidates of recorded cases" not in done.said
    Path("own_kernel.py").write_text(f"{CLEAN}\n# another line\n", encoding="utf-8")
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert done.code == 1, done.said
    assert "is recorded" in done.said
    assert "DIFFERS" in done.said


def test_sources_are_compared_where_no_case_is_run(recorded: dict[str, Path]) -> None:
    here(recorded, "clean")
    words = ("verify", "equiv.json", "--cases", "0")
    done = bytegate(*words)
    assert done.code == 0, done.said
    assert "none was asked for (--cases 0)" in done.said
    Path("own_kernel.py").write_text(f"{CLEAN}\n# another line\n", encoding="utf-8")
    assert bytegate(*words).code == 1


def test_a_kernel_that_is_not_here_is_not_covered_by_name(recorded: dict[str, Path]) -> None:
    here(recorded, "clean")
    Path("own_kernel.py").unlink()
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert done.code == 0, done.said
    assert "it isn't here" in done.said
    assert f"{OWN} can't be had here: stock ran alone" in done.said
    assert "VERIFIED, but for 2 lines NOT COVERED" in done.said


def test_a_module_that_nobody_imported_has_a_source(tmp_path: Path) -> None:
    from equiv.candidates import source_sha256

    (tmp_path / "never_imported.py").write_text(CLEAN, encoding="utf-8")
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    (tmp_path / "a_package" / "inner.py").write_text(CLEAN, encoding="utf-8")
    for name in ("never_imported", "a_package.inner"):
        before = source_sha256(f"{name}:kv_pack")
        assert before
        assert name not in sys.modules
        importlib.import_module(name)
        assert source_sha256(f"{name}:kv_pack") == before
    assert not source_sha256("there_is_none:kv_pack")


# -- findings -----------------------------------------------------------------------------


def test_a_finding_fails_again_and_its_verdict_is_verified(recorded: dict[str, Path]) -> None:
    here(recorded, "faulty")
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert done.code == 0, done.said
    assert "it says FAIL" in done.said
    assert "of the picked fail again" in done.said
    Path("own_kernel.py").write_text(CLEAN, encoding="utf-8")
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert done.code == 1, done.said
    assert "its case passes: kvpack/own_kernel.py:kv_pack" in done.said


def first_finding(change: Callable[[dict[str, Any]], None]) -> None:
    def to(made: dict[str, Any]) -> None:
        for f in made["candidates"][0]["lanes"][0]["findings"]:
            change(f)

    edit(Path("equiv.json"), to)


def test_a_finding_that_cannot_be_repeated_is_not_covered(recorded: dict[str, Path]) -> None:
    here(recorded, "faulty")
    Path("own_kernel.py").unlink()
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert "not repeated: kvpack/own_kernel.py" in done.said
    assert "its candidate can't be had here" in done.said
    here(recorded, "faulty")
    Path("own_kernel.py").write_text(CLEAN, encoding="utf-8")
    first_finding(lambda f: f.update(detail=f"{f['detail']}; {NOT_ALONE}"))
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert "its case passes" not in done.said
    assert f"it showed {NOT_ALONE}" in done.said


def test_findings_under_another_ledger_are_not_covered(recorded: dict[str, Path]) -> None:
    here(recorded, "faulty")

    def ledger(made: dict[str, Any]) -> None:
        made["command"] += " --ledger mine.toml"

    edit(Path("equiv.json"), ledger)
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert "judged by a ledger that isn't the suite's (--ledger)" in done.said
    assert "of the picked fail again" not in done.said


def test_findings_of_a_gpu_are_not_covered_on_a_cpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    found = lane("shapes", state="failed", equal=87, findings=[finding("divergence")])
    who = candidate("vllm", state="failed", lanes=[found])
    made = equiv("cuda:0", candidates=[who], verdict="FAIL", exit_code=1)
    evidence.write(tmp_path / "equiv.json", made)
    done = bytegate("verify", "equiv.json", *VERIFY)
    assert "1 finding: made on cuda:0, and this is cpu" in done.said
    assert done.code == 4, "of this file nothing can be made again here"
    assert "NOT VERIFIED" in done.said


def test_a_fault_of_an_unknown_candidate_is_not_covered(tmp_path: Path) -> None:
    point = "T=1,H=1,dtype=bf16,fp8=0,pe=same,rope=64"
    line = f"kvpack/gone:kv_pack/cpu/shapes/{point}/-/zero.0/eager/-"
    rows = [fault("K01", smallest=line, candidate="gone:kv_pack")]
    evidence.write(tmp_path / "faults.json", faults(faults=rows))
    done = bytegate("verify", "faults.json", *VERIFY)
    assert "fault K01: gone:kv_pack can't be had here" in done.said
    assert done.code == 4


# -- the loop -----------------------------------------------------------------------------

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM to run its loop"
)
BATCH = (
    "loop/{pack}/cpu/edges/D=2,rank=1,I=1,page=16,H=1,ws=32,dims=real,dtype=bf16,cache=auto,fp8=0,"
    "kscale=1,proj=plain,pad=0/{requests}/3"
)
CONTINUES, SHORT = "2+40", "2+3"


@needs_vllm
@pytest.mark.parametrize(("text", "code"), [(FAULTY, 0), (CLEAN, 1)], ids=["faulty", "clean"])
def test_a_finding_of_the_loop_fails_again(text: str, code: int, tmp_path: Path) -> None:
    module = f"loop_pack_{code}"
    (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    pack = f"{module}:kv_pack"
    line = BATCH.format(pack=pack, requests=CONTINUES)
    found = dataclasses.replace(finding("divergence", "edges"), case=line, found=line)
    failed = lane("edges", state="failed", equal=87, findings=[found])
    from equiv.candidates import source_sha256

    digest = source_sha256(pack)
    verdict = {"verdict": "FAIL", "exit_code": 1, "lanes": [failed]}
    evidence.write(tmp_path / "loop.json", loop(pack=pack, pack_sha256=digest, **verdict))
    done = bytegate("verify", "loop.json", *VERIFY)
    assert done.code == code, done.said
    assert f"the source of {pack}" in done.said
    assert ("its case passes: loop/" if code else "1 of the picked fail again") in done.said
    evidence.write(tmp_path / "loop.json", loop(pack=pack, pack_sha256="9" * 64, **verdict))
    for words in (VERIFY, ("--cases", "0")):
        done = bytegate("verify", "loop.json", *words)
        assert done.code == 1
        assert "and 999999999999 is recorded" in done.said


@needs_vllm
def test_batches_of_a_vllm_that_was_patched_are_not_covered(tmp_path: Path) -> None:
    made = loop(pack="fused", pack_sha256="", patches=["somewhere:change"])
    evidence.write(tmp_path / "loop.json", made)
    done = bytegate("verify", "loop.json", *VERIFY)
    assert "vLLM was changed by somewhere:change" in done.said
    assert done.code == 4


@needs_vllm
@pytest.mark.parametrize(("requests", "code"), [(CONTINUES, 0), (SHORT, 1)])
def test_a_planted_fault_of_the_loop_is_found_again(
    requests: str, code: int, tmp_path: Path
) -> None:
    from kvroute.faults import patch_of

    line = BATCH.format(pack="fused", requests=requests)
    rows = [fault("L07", smallest=line, candidate=patch_of("L07"))]
    evidence.write(tmp_path / "faults.json", faults(pair="loop", faults=rows))
    done = bytegate("verify", "faults.json", *VERIFY)
    assert done.code == code, done.said
    says = f"its smallest case passes: fault L07, {line}" if code else "1 of the picked fail again"
    assert says in done.said
    rows = [fault("L07", smallest=line, candidate="os:getcwd")]
    evidence.write(tmp_path / "faults.json", faults(pair="loop", faults=rows))
    done = bytegate("verify", "faults.json", *VERIFY)
    assert "os:getcwd is none of the loop's faults" in done.said
    assert done.code == 4


# -- exit codes ---------------------------------------------------------------------------


def test_how_verify_and_show_end(tree: Path, recorded: dict[str, Path]) -> None:
    """One table for ``verify`` and ``show``: the verdict that a file has is neither's own."""
    ppl = tree / "ppl" / "ppl.json"
    assert bytegate("verify", str(ppl)).code == 0
    shutil.move(tree / "ppl" / "scores", tree / "elsewhere")
    done = bytegate("verify", str(ppl))
    assert done.code == 4
    assert "NOT VERIFIED" in done.said
    shutil.move(tree / "elsewhere", tree / "ppl" / "scores")
    assert bytegate("verify", str(ppl)).code == 0

    here(recorded, "faulty")
    assert bytegate("verify", "equiv.json", *VERIFY).code == 0
    assert bytegate("equiv", "show", "equiv.json").code == 0
    data = Path("equiv.json").read_bytes()
    Path("equiv.json").write_bytes(data[:-100])
    assert bytegate("verify", "equiv.json").code == 4
    assert bytegate("equiv", "show", "equiv.json").code == 2
    Path("equiv.json").write_text('{"schema": "theirs"}', encoding="utf-8")
    for command in (("verify",), ("equiv", "show")):
        assert bytegate(*command, "there_is_none.json").code == 2
