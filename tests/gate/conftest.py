"""What tests of the gate share; this room needs more than a GPU host has."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

NEEDS = ("altair", "jinja2", "numpy", "pydantic", "scipy", "vl_convert")
LACKING = [name for name in NEEDS if importlib.util.find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if LACKING else []

sys.path.insert(0, str(Path(__file__).parent))  # for evidence_tree, which is no package's


def pytest_report_header() -> list[str]:
    return [f"tests/gate left out: no {', '.join(LACKING)}"] if LACKING else []


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tree of evidence; tests copy it."""
    from evidence_tree import write_tree

    return write_tree(tmp_path_factory.mktemp("evidence") / "tree")


@pytest.fixture
def tree(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "tree"))


@pytest.fixture(scope="session")
def clean(template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    """What gate and verify say of the untouched tree, and the digest of its bytes."""
    from evidence_tree import bytegate, digest_of_tree, gate

    digest = digest_of_tree(template)
    copy = Path(shutil.copytree(template, tmp_path_factory.mktemp("clean") / "tree"))
    return gate(copy), bytegate("verify", str(copy / "out" / "gate.json"), "--cases", "0"), digest


@pytest.fixture
def page() -> None:
    """Let a test's gate draw the page."""


@pytest.fixture(autouse=True)
def _no_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts out where a test doesn't ask for them: they take most of the time."""
    if "page" not in request.fixturenames:
        monkeypatch.setattr("equiv.gate.page.html", lambda *_: "")
