"""Who may know whom: by what each module imports, and by what importing it brings along."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "equiv",
    "ppl",
    "texts",
    "kvpack",
    "kvroute",
    "k3insert",
    "k3common",
    "k3quant",
    "k3decode",
    "dsmla",
}

MAY_KNOW: dict[str, set[str]] = {
    "kernels/kvpack": set(),
    "kernels/k3insert": {"kvpack"},
    "kernels/k3common": {"kvpack", "k3insert"},
    "kernels/k3quant": {"kvpack", "k3insert", "k3common"},
    "kernels/k3decode": {"kvpack", "k3insert", "k3common"},
    "kernels/dsmla": {"kvpack", "k3insert", "k3common"},
    "kernels/kvroute": {"kvpack"},
    "texts": {"equiv"},
    "equiv": set(),
    "equiv/loop": {"kvroute"},
    "equiv/gate": {"ppl", "texts", "kvroute", "kvpack"},
    "ppl": {"texts", "kvroute", "equiv"},
}
"""Rooms that a folder may import, beside its own; the longest matching folder counts."""

ROOF = {"cli.py", "doctor.py", "bench.py", "__main__.py"}
"""Commands. They may know every room, and none knows them; so may, and does, the gate's folder."""

GATE = Path("equiv/gate")

LAZY: dict[str, tuple[str, ...]] = {
    "pydantic": ("equiv/evidence.py",),
    "jsonschema": (),
    "polars": ("ppl/",),
    "altair": ("ppl/",),
}
"""Packages that only a report needs: who may import them, and that inside a function."""


def modules() -> Iterator[Path]:
    for folder in ("equiv", "ppl", "texts", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT)


def imported(path: Path, *, top_level: bool = False) -> set[str]:
    """Return the first part of every module that a file imports."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name.split(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path} imports relatively"
                found.add(str(child.module).split(".")[0])
            lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not (top_level and (lazy or types_only)):
                visit(child)

    visit(tree)
    return found


def room_of(path: Path) -> tuple[str, set[str]]:
    """Return a file's own package, and the others that it may know."""
    folder = max((f for f in MAY_KNOW if path.is_relative_to(f)), key=len)
    return folder.split("/")[1 if folder.startswith("kernels/") else 0], MAY_KNOW[folder]


@pytest.mark.parametrize("path", [*modules()], ids=str)
def test_a_module_knows_only_whom_it_may(path: Path) -> None:
    own, others = room_of(path)
    if path.name in ROOF and path.parent.name in {"equiv", "ppl"}:
        return
    assert (imported(path) & ROOMS) - {own} <= others


@pytest.mark.parametrize("path", [*modules()], ids=str)
def test_nobody_knows_the_roof(path: Path) -> None:
    if path.name in ROOF or path.is_relative_to(GATE):
        return
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            assert not names & {"equiv.cli", "equiv.doctor", "equiv.__main__"}
            assert not [n for n in names if n == "equiv.gate" or n.startswith("equiv.gate.")]


@pytest.mark.parametrize("path", [*modules()], ids=str)
def test_what_a_report_needs_is_imported_there_and_late(path: Path) -> None:
    if path.parts[0] in {"ppl", "texts"}:  # rooms that bring what they need by an extra
        return
    if path.is_relative_to(GATE) and path.name not in ROOF | {"__init__.py"}:  # and so has this
        return
    for package, allowed in LAZY.items():
        assert package not in imported(path, top_level=True)
        if package in imported(path):
            assert str(path).startswith(allowed)


def test_the_suite_names_no_pair_of_ours() -> None:
    for path in modules():
        if path.parts[0] == "equiv" and path.name not in ROOF:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
            named = [a for n in calls for a in n.args if isinstance(a, ast.Constant)]
            assert "kvpack" not in {a.value for a in named}, path


def test_kernels_is_a_folder_of_packages_and_no_package() -> None:
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_this_test_sees_an_import(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.b\n"
        "def f():\n    from c import d\nclass C:\n    import e\n",
        encoding="utf-8",
    )
    path = tmp_path / "x.py"
    assert imported(path) == {"typing", "a", "c", "e"}
    assert imported(path, top_level=True) == {"typing", "e"}


# -- what an import brings along ----------------------------------------------------

LIGHT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("kvpack", "kvpack.faults.catalogue", "equiv", "equiv.evidence"): (
        *("torch", "numpy", "triton", "vllm", "hypothesis", "pydantic"),
    ),
    ("kvpack.pair",): ("torch._dynamo.convert_frame", "torch._inductor", "triton", "vllm"),
    ("equiv.worker", "equiv.execute", "equiv.judge", "equiv.pool", "equiv.proof"): (
        *("pydantic", "hypothesis", "rich", "typer", "kvpack", "triton"),
    ),
    ("equiv.campaign", "equiv.run", "equiv.faults", "equiv.repro"): (
        *("pydantic", "rich", "typer", "kvpack", "triton"),
    ),
    ("equiv.gate.cli",): ("torch", "scipy", "polars", "altair", "jinja2", "pydantic"),
    ("equiv.cli",): ("pydantic", "kvpack", "triton", "torch._dynamo.convert_frame"),
}
"""Modules to what importing them must not import."""


@pytest.mark.parametrize("names", LIGHT, ids=lambda names: names[0])
def test_importing_a_module_stays_light(names: tuple[str, ...]) -> None:
    script = f"import sys, {', '.join(names)}; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    brought = set(done.stdout.split())
    assert set(names) <= brought
    assert [x for x in LIGHT[names] if x in brought] == []
