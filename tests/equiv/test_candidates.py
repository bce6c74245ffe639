"""Candidates by name, by ``module:function`` and by ``file.py:function``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from equiv import candidates
from equiv.candidates import check_name, import_function, is_own, load, module_name
from equiv.errors import ExitCode, UsageError
from equiv.pairs import OpPair
from kvpack.faults.kernel import kv_pack


@pytest.fixture(autouse=True)
def _same_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, name: str, source: str = "def kernel(): return 'mine'\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return path


def refused(name: str) -> str:
    with pytest.raises(UsageError) as e:
        import_function(name)
    assert e.value.exit_code == ExitCode.USAGE
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def test_the_pair_s_own_names_are_known(pair: OpPair) -> None:
    for name in pair.candidates:
        check_name(pair, name)
    with pytest.raises(UsageError, match="unknown candidate 'inducter': pair kvpack has stock, "):
        check_name(pair, "inducter")
    check_name(pair, "some.module:function")  # which is looked for later


def test_a_colon_makes_it_somebody_s_own() -> None:
    assert [is_own(n) for n in ("inductor", "a:b", "./a.py:b")] == [False, True, True]


def test_a_file_by_path(folder: Path) -> None:
    write(folder, "kernels/mine.py")
    assert import_function("kernels/mine.py:kernel")() == "mine"
    assert import_function(f"{folder}/kernels/mine.py:kernel")() == "mine"


def test_a_module_of_the_working_folder(folder: Path) -> None:
    write(folder, "package_of_mine/__init__.py", "")
    write(
        folder, "package_of_mine/inner.py", "class C:\n    @staticmethod\n    def f(): return 4\n"
    )
    assert import_function("package_of_mine.inner:C.f")() == 4


def test_a_file_may_import_its_neighbours(folder: Path) -> None:
    write(folder, "deep/helper_of_mine.py", "value = 5\n")
    write(
        folder, "deep/mine.py", "import helper_of_mine\ndef kernel(): return helper_of_mine.value\n"
    )
    assert import_function("deep/mine.py:kernel")() == 5


def test_a_file_with_dataclasses(folder: Path) -> None:
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    source += "@dataclass\nclass D:\n    x: int = 3\ndef kernel(): return D().x\n"
    write(folder, "mine.py", source)
    assert import_function("mine.py:kernel")() == 3


@pytest.mark.parametrize("name", ["torch.py", "kvpack.py", "numpy.py", "types.py"])
def test_a_file_called_like_a_module_doesn_t_stand_in_for_it(name: str, folder: Path) -> None:
    write(folder, f"deep/{name}")
    stem = name.removesuffix(".py")
    before = sys.modules.get(stem)
    assert import_function(f"deep/{name}:kernel")() == "mine"
    assert sys.modules.get(stem) is before
    assert module_name(folder / "deep" / name) == f"candidate_{stem}"
    assert module_name(folder / "deep" / "mine.py") == "mine"


@pytest.mark.parametrize("name", ["my-kernel.py", "a.b.py", "2.py"])
def test_a_file_needs_no_name_of_a_module(name: str, folder: Path) -> None:
    write(folder, name)
    assert import_function(f"{name}:kernel")() == "mine"


def test_what_isn_t_there_is_said(folder: Path) -> None:
    write(folder, "mine.py", "number = 3\n")
    assert "there is no file other.py" in refused("other.py:kernel")
    assert "kernel doesn't exist in mine.py" in refused("mine.py:kernel")
    assert "number isn't callable in mine.py" in refused("mine.py:number")
    assert "number.real.imag isn't callable" in refused("mine.py:number.real.imag")
    assert "No module named 'nowhere_at_all'" in refused("nowhere_at_all:kernel")
    assert "candidate ':kernel'" in refused(":kernel")
    assert "candidate 'mine.py:'" in refused("mine.py:")


@pytest.mark.parametrize(
    "source",
    ["1 / 0\n", "raise SystemExit('no\\nmore')\n", "raise KeyError\n", "x = (\n"],
    ids=["error", "exit", "bare", "syntax"],
)
def test_whatever_an_import_raises_is_bad_usage(source: str, folder: Path) -> None:
    write(folder, "mine.py", source)
    assert refused("mine.py:kernel").startswith("candidate 'mine.py:kernel' can't be imported: ")


def test_ctrl_c_during_an_import_is_no_bad_usage(folder: Path) -> None:
    write(folder, "mine.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        import_function("mine.py:kernel")


def test_global_state_is_taken_before_an_import(folder: Path, pair: OpPair) -> None:
    write(folder, "mine.py", "import torch\ntorch.manual_seed(3)\ndef kernel(): ...\n")
    torch.manual_seed(5)
    before = torch.get_rng_state().numpy().tobytes()
    loaded = load(pair, "mine.py:kernel", "cpu", None)
    assert loaded.state is not None
    assert loaded.state["random state"] == before


def test_loading_knows_how_outputs_are_guarded(pair: OpPair) -> None:
    assert load(pair, "kvpack.faults.kernel:kv_pack", "cpu", None).guard == "dispatch"
    assert load(pair, "kvpack.faults.kernel:kv_pack", "cpu", None).kernel is kv_pack
    assert load(pair, "inductor", "cpu", None).guard == "out"
    assert load(pair, "stock", "cpu", None).guard == "dispatch"


def test_a_kernel_that_was_compiled_while_it_was_imported_is_noticed(
    folder: Path, pair: OpPair
) -> None:
    source = "import torch\nkernel = torch.compile(lambda x: x + 1, backend='eager')\n"
    write(folder, "cold.py", source)
    write(folder, "warm.py", f"{source}kernel(torch.zeros(3))\n")
    assert load(pair, "cold.py:kernel", "cpu", None).guard == "dispatch"
    assert load(pair, "warm.py:kernel", "cpu", None).guard == "malloc"


def test_a_library_goes_to_those_that_take_one(pair: OpPair) -> None:
    assert pair.candidates["vllm"].takes_library
    assert load(pair, "inductor", "cpu", "/no/such/library.so").guard == "out"
    assert candidates.is_own("x:y")
