"""What calls share beside the operands: a kernel that changes it is found, and the next isn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from equiv.candidates import import_function
from equiv.case import Case, Fill
from equiv.execute import Executor, Loaded
from equiv.modes import CPU_MODES
from equiv.pairs import OpPair, load_pair

CLEAN = {
    "k3insert": "k3insert.faults.kernel:insert",
    "k3quant": "k3quant.faults.kernel:clean",
    "k3decode": "k3decode.faults.kernel:clean",
    "dsmla": "dsmla.faults.kernel:clean",
}


def points(pair: OpPair) -> list[dict[str, Any]]:
    """Return small points of the pair, one for each combination of its axes in the domain."""
    from equiv.lanes import domain_points

    dims = {"T": 5, "H": 2}
    return [{**dims, **point} for point in domain_points(pair)]


def case_of(pair: OpPair, point: dict[str, Any], mode: str = "eager") -> Case:
    made = Case(pair.name, "shapes", tuple(point.items()), candidate="own", device="cpu")
    return made.with_(fill=Fill("bits", 0), mode=mode)


def changes(pair: OpPair, point: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return a working kernel that flips the last bit of what is shared, after its work."""
    clean = import_function(CLEAN[pair.name])

    def kernel(*operands: Any) -> Any:
        made = clean(*operands)
        seen, _ = pair.beside(point, torch.device("cpu"))[name]  # type: ignore[attr-defined]
        seen.view(torch.uint8)[..., -1] ^= 1
        return made

    return kernel


def shared() -> list[tuple[str, str]]:
    found = {}
    for which in CLEAN:
        pair = load_pair(which)
        for point in points(pair):
            beside = pair.beside(point, torch.device("cpu"))  # type: ignore[attr-defined]
            found |= dict.fromkeys((which, name) for name in beside)
    return list(found)


def test_each_pair_says_what_it_shares() -> None:
    names = {which: {n for w, n in shared() if w == which} for which in CLEAN}
    scales = {f"scale {i}" for i in range(4)}
    turn = {"positions", "table"}
    assert names == {
        "k3insert": {"slot_mapping"},
        "k3quant": {"slot_mapping", *turn, *scales},
        "k3decode": {"slot_mapping", *turn, *scales},
        "dsmla": {"slot_mapping", *turn},
    }


@pytest.mark.parametrize(("which", "name"), shared())
def test_a_kernel_that_changes_it_is_found_and_the_next_one_is_not(which: str, name: str) -> None:
    pair = load_pair(which)
    met = 0
    for point in points(pair):
        if name not in pair.beside(point, torch.device("cpu")):  # type: ignore[attr-defined]
            continue
        met += 1
        case = case_of(pair, point)
        bad = Executor(pair, Loaded("own", changes(pair, point, name), "dispatch"), "cpu", ())
        found = bad.run(case)
        assert (found.status, found.detail) == ("input_changed", f"changed: {name}")
        good = Executor(pair, Loaded("own", import_function(CLEAN[which]), "dispatch"), "cpu", ())
        assert good.run(case).status == "equal"
    assert met


@pytest.mark.parametrize("which", CLEAN)
def test_without_tokens_there_is_nothing_to_change(which: str) -> None:
    pair = load_pair(which)
    kernel = Loaded("own", import_function(CLEAN[which]), "dispatch")
    for point in points(pair):
        case = case_of(pair, point | {"T": 0})
        assert Executor(pair, kernel, "cpu", ()).run(case).status == "equal"


@pytest.mark.parametrize("mode", CPU_MODES)
def test_marked_padding_is_found_in_every_mode(mode: str) -> None:
    pair = load_pair("k3insert")
    kernel = import_function("k3insert.faults.slots:marks_padding")
    statuses = {}
    for point in points(pair):
        executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
        statuses[str(point["slots"])] = executor.run(case_of(pair, point, mode)).status
    assert statuses == {
        "in_order": "equal",
        "scattered": "equal",
        "padded": "input_changed",
    }


def test_what_a_call_that_raises_has_changed_is_put_back() -> None:
    pair = load_pair("k3insert")
    point = next(p for p in points(pair) if p["slots"] == "padded")

    def kernel(*operands: Any) -> Any:
        operands[-1].fill_(0)
        raise RuntimeError("no")

    bad = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    assert bad.run(case_of(pair, point)).status == "raised"
    good = Executor(pair, Loaded("own", import_function(CLEAN["k3insert"]), "dispatch"), "cpu", ())
    assert good.run(case_of(pair, point)).status == "equal"
