"""The registry of op pairs: found by entry point, checked before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from equiv import pairs
from equiv.errors import ExitCode, UsageError
from equiv.pairs import GROUP, REQUIRED, OpPair, load_pair, registered


def refused(name: str) -> str:
    with pytest.raises(UsageError) as e:
        load_pair(name)
    assert e.value.exit_code == ExitCode.USAGE
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a distribution by hand, in a folder that is put on the path."""
    info = tmp_path / "another_pair-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another-pair\nVersion: 1.0\n")
    entries = {
        "absent": "no_such_module_at_all:PAIR",
        "nameless": "another_pair:MISSING",
        "broken": "another_pair_broken:PAIR",
        "bare": "another_pair:BARE",
        "renamed": "another_pair:RENAMED",
    }
    lines = "".join(f"{k} = {v}\n" for k, v in entries.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
    (tmp_path / "another_pair.py").write_text(
        "from kvpack.pair import KVPack\n"
        "class Bare:\n    name = 'bare'\n    dims = {}\n"
        "BARE, RENAMED = Bare(), KVPack()\n"
    )
    (tmp_path / "another_pair_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_built_in_pair_is_registered_and_has_everything() -> None:
    assert registered()["kvpack"] == "kvpack.pair:PAIR"
    found = load_pair("kvpack")
    assert isinstance(found, OpPair)
    assert found.name == "kvpack"


def test_an_unknown_pair_names_the_known_ones() -> None:
    message = refused("kvpakc")
    assert "unknown pair 'kvpakc': registered are " in message
    assert "kvpack" in message
    assert f"entry point group '{GROUP}'" in message


@pytest.mark.usefixtures("elsewhere")
def test_registering_imports_nothing() -> None:
    assert registered()["broken"] == "another_pair_broken:PAIR"
    assert "another_pair_broken" not in sys.modules


@pytest.mark.usefixtures("elsewhere")
def test_a_pair_that_can_t_be_used_says_why() -> None:
    assert "pair 'absent' (no_such_module_at_all:PAIR) can't be imported" in refused("absent")
    assert "has no attribute 'MISSING'" in refused("nameless")
    assert "No module named 'no_such_module_at_all'" in refused("broken")
    assert "lacks axes, domain_axes, models, candidates, " in refused("bare")
    assert "calls itself 'kvpack'; the two names must agree" in refused("renamed")


def test_whatever_a_pair_s_module_raises_is_bad_usage(elsewhere: Path) -> None:
    (elsewhere / "another_pair_broken.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in refused("broken")


def test_what_the_contract_lists_is_what_is_checked() -> None:
    members = {n for n in vars(OpPair) if not n.startswith("_")} | set(OpPair.__annotations__)
    assert members == set(REQUIRED)


def test_an_entry_of_a_checkout_counts_without_an_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs.importlib.metadata, "entry_points", lambda **_: [])
    assert registered()["kvpack"] == "kvpack.pair:PAIR"


def test_the_second_pair_fits_the_contract(second_pair: object) -> None:
    found = second_pair.PAIR  # type: ignore[attr-defined]
    assert isinstance(found, OpPair)
    assert [n for n in REQUIRED if not hasattr(found, n)] == []
