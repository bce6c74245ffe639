"""From a tree of evidence to a verdict: what decides, what is only said, what is left behind."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from evidence_tree import (
    COMMIT,
    KERNEL_LANES,
    LOOP_LANES,
    OWN,
    arrays,
    bytegate,
    candidate,
    edit,
    environment,
    equiv,
    fault,
    faults,
    finding,
    gate,
    lane,
    loop,
    ppl,
    use,
)

from equiv import evidence, partial
from equiv.gate import block, collect, facts, record
from equiv.perf import record as perf
from equiv.result import FINDINGS

HERE = Path("cpu")


def put(tree: Path, made: Any, *where: str) -> None:
    name = {"bytegate.equiv": "equiv.json", "bytegate.loop": "loop.json"}
    evidence.write(tree.joinpath(*where, name.get(made.schema, "faults.json")), made)


def policy(tree: Path, text: str) -> None:
    """Write the tree's policy anew: ``text`` after its own kernel and pack."""
    own = f'[kernel]\ncandidates = ["{OWN}"]\n[loop]\npack = "my_pack:kv_pack"\n'
    for line in text.splitlines(keepends=True):
        if line.startswith(("[kernel]", "[loop]")):
            raise AssertionError("replace the whole policy instead")
    (tree / "policy.toml").write_text(own + text, encoding="utf-8")


def made_of(tree: Path) -> Any:
    return json.loads((tree / "out" / "gate.json").read_text(encoding="utf-8"))


def cell(tree: Path, layer: str, device: str = "cpu") -> Any:
    return next(
        c for c in made_of(tree)["cells"] if c["layer"] == layer and c["device"].startswith(device)
    )


# -- each layer, and each kind of failure --------------------------------------------------


def test_a_kernel_run_that_was_killed_is_no_pass(tree: Path) -> None:
    left = [partial.lane(x, partial.UNFINISHED) for x in KERNEL_LANES[1:]]
    killed = candidate(OWN, state="not covered", lanes=[lane(KERNEL_LANES[0]), *left])
    other = partial.candidate("inductor", KERNEL_LANES, partial.UNFINISHED)
    for folder, device in (("cpu", "cpu"), ("gpu", "cuda:0")):
        made = equiv(device, verdict="NOT COVERED", exit_code=4, candidates=[other, killed])
        put(tree, made, folder, "equiv")
    done = gate(tree)
    assert done.code == 4
    assert cell(tree, "kernel")["state"] == "not covered"
    assert f"inductor, lane {KERNEL_LANES[1]}: {partial.UNFINISHED}" in json.dumps(made_of(tree))


@pytest.mark.parametrize("kind", FINDINGS)
def test_every_kind_of_finding_fails_the_kernel_layer(kind: str, tree: Path) -> None:
    lanes = [lane(x) for x in KERNEL_LANES]
    lanes[1] = lane("shapes", state="failed", findings=[finding(kind)], equal=89, bound=None)
    bad = candidate("inductor", state="failed", lanes=lanes)
    put(tree, equiv(verdict="FAIL", exit_code=1, candidates=[bad, candidate(OWN)]), "cpu", "equiv")
    done = gate(tree)
    assert done.code == 1
    assert f"kernel on cpu: failed: inductor, lane shapes: {kind}: k: 1 bytes" in done.said
    assert cell(tree, "kernel", "gpu")["state"] == "passed"
    text = (tree / "out" / "gate.md").read_text(encoding="utf-8")
    assert "bytegate gate: FAIL" in text
    assert f"inductor, lane shapes: {kind}" in text


def test_the_page_has_the_command_that_repeats_a_finding(tree: Path, page: None) -> None:
    lanes = [lane("shapes", state="failed", findings=[finding("divergence")], equal=89)]
    bad = candidate("inductor", state="failed", lanes=lanes)
    put(tree, equiv(verdict="FAIL", exit_code=1, candidates=[bad]), "cpu", "equiv")
    assert gate(tree).code == 1
    text = (tree / "out" / "gate.html").read_text(encoding="utf-8")
    assert "bytegate equiv repro kvpack/x/cpu/shapes" in text


def test_a_declared_difference_that_is_gone_fails(tree: Path) -> None:
    gone = candidate("inductor", state="failed", reason="declared divergence D1 is gone")
    put(tree, equiv(verdict="FAIL", exit_code=1, candidates=[gone, candidate(OWN)]), "cpu", "equiv")
    done = gate(tree)
    assert done.code == 1
    assert "inductor: declared divergence D1 is gone" in done.said


def test_a_declared_difference_that_the_policy_does_not_take_fails(tree: Path) -> None:
    met = [candidate("inductor", ledger=[use("X9")]), candidate(OWN)]
    put(tree, equiv(candidates=met), "cpu", "equiv")
    done = gate(tree)
    assert done.code == 1
    assert "the declared difference X9 was met, which the policy doesn't accept" in done.said
    quiet = [candidate("inductor", ledger=[use("X9", "not exercised")]), candidate(OWN)]
    put(tree, equiv(candidates=quiet), "cpu", "equiv")
    assert gate(tree).code == 0


def test_a_missed_fault_and_a_false_alarm_fail(tree: Path) -> None:
    rows = [fault("K01"), fault("K09", outcome="missed", detail="no lane failed")]
    put(tree, faults(faults=rows, verdict="FAIL", exit_code=1), "cpu", "faults")
    done = gate(tree)
    assert done.code == 1
    assert (
        "kernel faults on cpu: failed: planted fault K09 (a planted fault) was missed" in done.said
    )
    alarm = {"candidate": "clean", "case": "a case", "kind": "divergence", "detail": "x"}
    alarms = {"cases": 1_200, "alarms": [alarm], "candidates": {"clean": 1_200}}
    put(tree, faults(false_alarms=alarms, verdict="FAIL", exit_code=1), "cpu", "faults")
    done = gate(tree)
    assert done.code == 1
    assert "false alarm on clean: divergence on a case" in done.said


@pytest.mark.parametrize("kind", ["divergence", "reference", "ranks", "plan", "not_run", "raised"])
def test_a_finding_in_the_loop_fails_its_layer(kind: str, tree: Path) -> None:
    lanes = [lane(x, kinds={"D=2": 100}) for x in (*evidence_lanes(),)]
    lanes[0] = dataclasses.replace(
        lanes[0], state="failed", findings=[finding(kind, "edges")], equal=89, bound=None
    )
    put(tree, loop(lanes=lanes, verdict="FAIL", exit_code=1), "cpu", "loop")
    done = gate(tree)
    assert done.code == 1
    assert f"vLLM's loop on cpu: failed: lane edges: {kind}" in done.said
    assert cell(tree, "kernel")["state"] == "passed"


def evidence_lanes() -> tuple[str, ...]:
    return tuple(x.lane for x in loop().lanes)


def test_a_loop_that_was_not_vllms_own_is_invalid(tree: Path) -> None:
    untouched = {"untouched": False, "problems": ["reorg_kvcache was replaced"], "subjects": []}
    put(tree, loop(untouched=untouched, verdict="INVALID", exit_code=4), "cpu", "loop")
    done = gate(tree)
    assert done.code == 4
    assert "invalid: the loop isn't vLLM's own: reorg_kvcache was replaced" in done.said


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_shared_a_gpu_are_not_taken_for_ranks_with_one_each(
    shared: bool,  # noqa: FBT001
    tree: Path,
    page: None,
) -> None:
    line = (
        "D = 4, ranks with a device each (NVLink, peer memory): 4 ranks shared 1 GPU, connected by "
        "sockets"
    )
    lanes = [lane(x, kinds={"D=2": 100}) for x in LOOP_LANES if x not in {"gloo", "engine"}]
    lanes.append(lane("nccl", left_out=[line] if shared else []))
    made = loop(
        device="cuda:0",
        lanes=lanes,
        stand_ins=[],
        share_gpu=int(shared),
        environment=environment("cuda:0", vllm="0.33.0"),
    )
    put(tree, made, "gpu", "loop")
    done = gate(tree)
    assert cell(tree, "loop", "gpu")["state"] == "passed"
    said = f"vLLM's loop on gpu NVIDIA H200: nccl: {line}"
    assert (said in made_of(tree)["not_covered"]) == shared
    for name in ("gate.md", "gate.html"):
        text = (tree / "out" / name).read_text(encoding="utf-8")
        assert ("ranks of lane nccl SHARED 1 GPU, connected by sockets" in text) == shared
    assert done.code == 0


def shifted(by: float) -> Callable[[str, str, Any], Any]:
    """Lower the exposed half of the fused arm."""

    def change(_text: str, arm: str, values: Any) -> Any:
        if arm == "fused":
            values[100:] -= by
        return values

    return change


@pytest.mark.parametrize(
    ("change", "facts", "code", "says"),
    [
        (shifted(3e-3), {}, 1, "servers on cpu: failed: DIFFERENT"),
        (shifted(3e-5), {}, 0, "bytegate gate: PASS"),
        (None, {"ran": {"fused": "stock"}}, 4, "invalid: INVALID: text text 0, fused launch 1"),
        (None, {"routes": {"fused": "stock"}}, 4, "both arms were asked for the same route"),
        (
            lambda _t, arm, v: v if arm == "stock" else [*v[1:], v[0]],
            {},
            4,
            "is shifted by one token",
        ),
    ],
    ids=["biased", "within noise", "one route ran", "one route asked", "shifted"],
)
def test_what_servers_show_decides(
    change: Any, facts: dict[str, Any], code: int, says: str, tree: Path
) -> None:
    shutil.rmtree(tree / "ppl")
    arrays(tree / "ppl", noisy(change), **facts)
    ppl(tree / "ppl")
    done = gate(tree)
    assert done.code == code, done.said
    assert says in done.said


def noisy(change: Any) -> Callable[[str, str, Any], Any]:
    """Add to a change noise as small as servers' own, so that launches differ."""
    import numpy as np

    rng = np.random.default_rng(1)

    def both(text: str, arm: str, values: Any) -> Any:
        if change is None:
            return values
        values = np.asarray(change(text, arm, values), dtype=np.float64)
        values[100:] -= np.abs(rng.normal(0, 1e-5, len(values) - 100))
        return np.minimum(values, 0.0)

    return both


def test_an_inconclusive_comparison_is_exit_code_3(tree: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    shutil.rmtree(tree / "ppl")
    arrays(
        tree / "ppl",
        lambda _t, arm, v: np.minimum(v + (arm == "fused") * rng.normal(0, 2e-3), 0.0),
    )
    assert ppl(tree / "ppl").verdict == "INCONCLUSIVE"
    done = gate(tree)
    assert done.code == 3
    assert "bytegate gate: INCONCLUSIVE" in done.said


# -- what is required ----------------------------------------------------------------------


def test_without_a_gpu_it_passes_and_says_so(tree: Path) -> None:
    shutil.rmtree(tree / "gpu")
    done = gate(tree)
    assert done.code == 0
    assert "there is no evidence of kernel on a GPU" in done.said
    text = (tree / "out" / "gate.md").read_text(encoding="utf-8")
    assert (
        "| kernel, kernel faults, vLLM's loop, loop faults, servers | gpu | not covered |" in text
    )


def test_required_gpu_without_one_is_exit_code_4(tree: Path) -> None:
    shutil.rmtree(tree / "gpu")
    done = gate(tree, "--require", "gpu")
    assert done.code == 4
    for layer in ("kernel", "kernel faults", "vLLM's loop", "loop faults", "servers"):
        assert f"there is no evidence of {layer} on a GPU" in done.said


def test_evidence_of_a_gpu_alone_is_enough_for_any(tree: Path) -> None:
    for layer in ("equiv", "faults"):
        shutil.rmtree(tree / "cpu" / layer)
    assert gate(tree).code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[servers]\ntexts = 11\n", "10 texts of 11"),
        ("[servers]\nexposed_tokens = 100000\n", "3,000 exposed tokens, and the policy asks for"),
        ("[servers]\nobserved = ['scheduler chunks']\n", "scheduler chunks: observed for 0 of 40"),
        ("[servers]\nmargin_nats = 1e-5\n", "judged by a margin of 0.0001 nats"),
        ("[servers]\nclaim = 'equivalent'\n", "judged under the claim 'identical'"),
        ("[servers]\nrequired = 'gpu'\n", "there is no evidence of servers on a GPU"),
        ("[faults]\nclean_cases = 5000\n", "1,200 cases of clean kernels, and the policy asks"),
        ("[faults]\nloop = 'gpu'\n", "there is no evidence of loop faults on a GPU"),
    ],
)
def test_less_than_the_policy_asks_for_is_not_covered(text: str, says: str, tree: Path) -> None:
    policy(tree, text)
    done = gate(tree)
    assert done.code == 4
    assert says in done.said
    assert "bytegate gate: NOT COVERED" in done.said


def emulated(folder: Path) -> None:
    """Leave what a run with emulated fp8 prefill leaves, without its arrays."""
    from ppl import emulation, evidence
    from ppl.facts import RunFacts

    made = evidence.read(folder.parent / "ppl" / "ppl.json")
    asked = {"emulate_fp8_prefill": True}
    run = RunFacts(asked=asked, claim="identical", margin_nats=None)
    reasons = (*made.decided.reasons, emulation.WARNING)
    decided = made.decided.model_copy(update={"reasons": reasons})
    changed: dict[str, Any] = {
        "run": run,
        "decided": decided,
        "warnings": [emulation.WARNING, *made.warnings],
    }
    changed["inputs_sha256"] = "0" * 64  # its arrays are others
    evidence.write(folder / "ppl.json", made.model_copy(update=changed))


def test_servers_that_emulate_fp8_do_not_stand_for_others(tree: Path) -> None:
    emulated(tree / "fp8")
    done = gate(tree)
    assert done.code == 0, done.said
    text = (tree / "out" / "gate.md").read_text(encoding="utf-8")
    assert "fp8 prefill EMULATED, IDENTICAL" in text
    shutil.rmtree(tree / "ppl")
    done = gate(tree)
    assert done.code == 4
    assert "only servers that emulate fp8 prefill ran" in done.said


def test_a_comparison_with_an_ordinary_run_in_it_is_not_of_emulation_alone(tree: Path) -> None:
    """Its facts are those of its first run; what another left open tells that there was one."""
    from ppl import evidence

    emulated(tree / "fp8")
    shutil.rmtree(tree / "ppl")
    path = tree / "fp8" / "ppl.json"
    made = evidence.read(path)
    assert made.only_emulated
    left_open = "the fp8 pack in a served model: packs converted bfloat16 alone"
    evidence.write(path, made.model_copy(update={"not_covered": [*made.not_covered, left_open]}))
    assert "only servers that emulate" not in gate(tree).said


@pytest.mark.parametrize("shared", [True, False])
def test_servers_whose_ranks_share_a_gpu_are_told_apart(
    shared: bool,  # noqa: FBT001
    tree: Path,
    page: None,
) -> None:
    from ppl import evidence, sharing
    from ppl.facts import RunFacts, ServerFacts

    made = evidence.read(tree / "ppl" / "ppl.json")
    told = {"share_gpu": {"ranks": 2, "gpus": 1}} if shared else {}
    known: dict[str, Any] = dict.fromkeys(("settings_sha256", "channel", "route"))
    known |= {"url": "", "launched": True, "model": "", "max_model_len": 1, "settings": {}}
    one = ServerFacts(arm="stock", versions={}, facts=told, **known)
    open_ = sharing.open_("stock", told)
    reasons = (*made.decided.reasons, *sharing.warnings(shared=shared))
    changed = {
        "run": RunFacts(asked={}, claim="identical", margin_nats=None, servers=[one]),
        "decided": made.decided.model_copy(update={"reasons": reasons}),
        "warnings": [*sharing.warnings(shared=shared), *made.warnings],
        "not_covered": [*made.not_covered, *open_],
        "inputs_sha256": "0" * 64,  # its arrays are others
    }
    evidence.write(tree / "gpu" / "ppl.json", made.model_copy(update=changed))
    assert gate(tree).code == 0
    for name in ("gate.md", "gate.html"):
        text = (tree / "out" / name).read_text(encoding="utf-8")
        assert ("SHARED GPU, IDENTICAL" in text) == shared, name
    said = [x for x in made_of(tree)["not_covered"] if "2 ranks on 1 GPU" in x]
    assert len(said) == len(open_) == shared


def test_a_larger_profile_that_was_not_run_is_not_covered(tree: Path) -> None:
    (tree / "policy.toml").write_text(
        '[kernel]\nprofile = "gate"\n[loop]\npack = "my_pack:kv_pack"\n', encoding="utf-8"
    )
    done = gate(tree)
    assert done.code == 4
    assert "profile dev, and the policy asks for gate" in done.said
    put(tree, equiv(profile="nightly"), "cpu", "equiv")
    assert gate(tree).code == 0


def test_a_candidate_that_must_run_and_did_not(tree: Path) -> None:
    (tree / "policy.toml").write_text(
        '[kernel]\ncandidates = ["fast"]\n[loop]\npack = "my_pack:kv_pack"\n', encoding="utf-8"
    )
    done = gate(tree)
    assert done.code == 4
    assert "candidate fast wasn't run" in done.said


@pytest.mark.parametrize(
    ("stated", "asked", "code"),
    [
        ("my_pack.py:kv_pack", "my_pack.py:kv_pack", 0),
        ("src/my_pack.py:kv_pack", "my_pack.py:kv_pack", 0),
        ("../my_pack.py:kv_pack", "./src/my_pack.py:kv_pack", 0),
        ("src/my_pack.py:kv_pack", "my_pack.py:other", 4),
        ("src/your_pack.py:kv_pack", "my_pack.py:kv_pack", 4),
    ],
)
def test_a_candidate_is_the_same_from_another_folder(
    stated: str, asked: str, code: int, tree: Path
) -> None:
    """A file's path follows the working directory; what it is, its digest says."""
    made = equiv(candidates=[candidate("inductor"), candidate(stated)])
    evidence.write(tree / "cpu" / "equiv" / "equiv.json", made)
    shutil.rmtree(tree / "gpu")
    policy = f'[kernel]\ncandidates = ["{asked}"]\n[loop]\npack = "my_pack:kv_pack"\n'
    (tree / "policy.toml").write_text(policy, encoding="utf-8")
    done = gate(tree)
    assert done.code == code, done.said
    assert ("wasn't run" in done.said) == bool(code)


def test_two_files_of_one_name_are_not_one_candidate(tree: Path) -> None:
    other = dataclasses.replace(candidate("b/my_pack.py:kv_pack"), source_sha256="9" * 64)
    made = equiv(candidates=[candidate("a/my_pack.py:kv_pack"), other])
    evidence.write(tree / "cpu" / "equiv" / "equiv.json", made)
    done = gate(tree)
    assert done.code == 4
    assert "candidates differ: my_pack has other sources" in done.said


def test_arrays_that_stayed_behind_are_said_and_can_be_required(tree: Path) -> None:
    shutil.rmtree(tree / "ppl" / "scores")
    done = gate(tree)
    assert done.code == 0
    assert any("arrays aren't here" in x for x in made_of(tree)["not_covered"])
    policy(tree, "[servers]\narrays = true\n")
    assert gate(tree).code == 4


def test_some_of_the_faults_are_not_all(tree: Path) -> None:
    shutil.rmtree(tree / "gpu" / "faults")
    put(tree, faults(command="bytegate equiv faults --only K01"), "cpu", "faults")
    done = gate(tree)
    assert done.code == 4
    assert "only some of the planted faults were run (--only)" in done.said


def test_a_lane_that_another_run_covers_is_covered(tree: Path) -> None:
    first = equiv(candidates=[candidate("inductor", lanes=[lane("shapes")]), candidate(OWN)])
    rest = [lane(x) for x in KERNEL_LANES if x != "shapes"]
    second = equiv(candidates=[candidate("inductor", lanes=rest)], seed=1)
    put(tree, first, "cpu", "equiv")
    put(tree, second, "cpu", "more")
    assert gate(tree).code == 0
    assert cell(tree, "kernel")["files"] == [
        "tree/cpu/equiv/equiv.json",
        "tree/cpu/more/equiv.json",
    ]


def test_failing_evidence_decides_even_where_nothing_requires_it(tree: Path) -> None:
    policy(tree, "[faults]\nkernel = 'no'\n")
    rows = [fault("K09", outcome="missed", detail="no lane failed")]
    put(tree, faults("cuda:0", faults=rows, verdict="FAIL", exit_code=1), "gpu", "faults")
    assert gate(tree).code == 1


def test_a_tree_with_changes_is_said_and_can_be_refused(tree: Path) -> None:
    def changed(made: dict[str, Any]) -> None:
        made["environment"]["suite"]["dirty"] = True

    edit(tree / "cpu" / "equiv" / "equiv.json", changed)
    assert gate(tree).code == 0
    assert "with uncommitted changes" in (tree / "out" / "gate.md").read_text(encoding="utf-8")
    text = (tree / "policy.toml").read_text(encoding="utf-8")
    (tree / "policy.toml").write_text("clean_tree = true\n" + text, encoding="utf-8")
    done = gate(tree)
    assert done.code == 4
    assert "the policy wants a clean tree, and had changes: tree/cpu/equiv/equiv.json" in done.said


def test_the_commit_can_be_asked_for(tree: Path) -> None:
    assert gate(tree, "--commit", COMMIT).code == 0
    assert gate(tree, "--commit", COMMIT[:8]).code == 0
    done = gate(tree, "--commit", "b" * 40)
    assert done.code == 4
    assert "commit bbbbbbbbbbbb was asked for" in done.said


def test_two_gpus_may_have_another_torch_each(tree: Path) -> None:
    """What is built against a device may differ with the device; nothing else may."""
    made = environment("cuda:0")
    made["device"]["model"] = "NVIDIA B200"
    made["versions"]["torch"] = "2.12.0"
    put(tree, equiv("cuda:0", environment=made), "b200", "equiv")
    assert gate(tree).code == 0
    assert cell(tree, "kernel", "gpu NVIDIA B200")["state"] == "passed"


def test_servers_are_of_the_commit_that_ran_them_and_of_the_one_that_compared(tree: Path) -> None:
    from ppl.facts import RunFacts, write

    for commit, code in ((COMMIT, 0), ("b" * 40, 4)):
        suite = {"commit": commit, "dirty": False, "sources_sha256": {"equiv": "1" * 64}}
        facts = RunFacts(
            asked={}, claim="identical", margin_nats=None, environment={"suite": suite}
        )
        write(tree / "ppl", facts)
        ppl(tree / "ppl")
        done = gate(tree)
        assert done.code == code, done.said
    assert "commits differ" in done.said
    assert "bbbbbbbbbbbb in tree/ppl/ppl.json" in done.said


def test_a_run_of_servers_that_another_machine_left_is_repeated_as_it_was_typed() -> None:
    typed = "bytegate ppl run --route fused --out /data/run7"
    pieces = [SimpleNamespace(made=SimpleNamespace(run=SimpleNamespace(command=typed)))]
    made = SimpleNamespace(ran=[], command="bytegate gate --from run7")
    found = SimpleNamespace(pieces=pieces)
    again: Any = facts.commands
    assert again(made, found) == ["bytegate ppl run --route fused", made.command]
    made.ran = [("bytegate ppl run --route fused", 0)]  # this gate's own: said once
    assert again(made, found) == ["bytegate ppl run --route fused", made.command]


@pytest.mark.parametrize(
    ("torch", "gather", "device"),
    [
        ("2.13.0+cpu", "", "cpu"),
        ("2.11.0+cu130", "", "gpu"),
        ("", "nccl", "gpu"),
        ("", "gloo", "cpu"),
        ("2.11.0", "", "unstated"),
    ],
)
def test_where_servers_ran_is_what_they_say(torch: str, gather: str, device: str) -> None:
    run = SimpleNamespace(servers=[SimpleNamespace(facts={"gather": gather})])
    assert collect.servers_device({"torch": torch}, run) == device


# -- usage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--from", "nowhere"), "--from nowhere: there is no such folder"),
        (("--from", ".", "--require", "tpu"), "--require tpu: expected gpu"),
        (("--from", ".", "--policy", "nowhere.toml"), "can't read the policy nowhere.toml"),
        (("--form", "."), "No such option"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = bytegate("gate", *words)
    assert done.code == 2
    assert says in done.said
    assert done.said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_without_evidence_passes_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
    done = bytegate("gate", "--from", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.code == 4
    assert "there is no evidence of kernel on any device" in done.said


def test_files_that_are_no_evidence_are_passed_over(tree: Path) -> None:
    (tree / "other.json").write_text('{"schema": "theirs"}', encoding="utf-8")
    (tree / "broken.json").write_text("{", encoding="utf-8")
    (tree / "run").mkdir()
    for schema in ("ppl.run", "perf.launch", "perf.tail", "perf.server"):
        own = f'{{"schema": "bytegate.{schema}", "content_sha256": "of another"}}'
        (tree / "run" / f"{schema}.json").write_text(own, encoding="utf-8")
    assert gate(tree).code == 0


def test_speed_is_shown_and_never_decides(tree: Path) -> None:
    arm = perf.TailArm(
        "fused", [1e-4], perf.Ratio(0.84, 0.83, 0.85), perf.Ratio(0.9, 0.9, 0.9), True, True
    )
    stock = perf.TailArm(
        "stock", [1.2e-4], perf.Ratio(1, 1, 1), perf.Ratio(0.8, 0.8, 0.8), False, True
    )
    arms = [stock, dataclasses.replace(stock, name="stock again"), arm]
    arms.append(dataclasses.replace(stock, name="copy", identical=None))
    tail = perf.Tail("kvpack", "cuda:0", 3, 5, [perf.TailCell({"T": 8}, 4096, 2, arms)])
    verdict, code = perf.verdict_of(tail, None)
    said = perf.summarised(tail, None, [])
    made = perf.PerfEvidence(
        verdict, code, tail, None, [], environment(), "", 1.0, "bytegate perf", summary=said
    )
    evidence.write(tree / "perf.json", made)
    assert gate(tree).code == 0
    text = (tree / "out" / "gate.md").read_text(encoding="utf-8")
    assert "**speed, doesn't decide**" in text
    assert said[0].split(":")[0] in text
    edit(tree / "perf.json", lambda raw: raw["environment"]["suite"].update(commit="b" * 40))
    done = gate(tree)
    assert done.code == 0
    assert "speed isn't shown: commits differ" in done.said
    assert said[0].split(":")[0] not in (tree / "out" / "gate.md").read_text(encoding="utf-8")
    edit(tree / "perf.json", lambda raw: raw.update({"seconds": 2.0}), sealed=False)
    done = gate(tree)
    assert done.code == 0
    assert "speed isn't shown: the evidence tree/perf.json is damaged" in done.said


# -- what is left behind -------------------------------------------------------------------


def test_what_the_block_has_no_room_for_is_counted(tree: Path) -> None:
    names = [OWN, *(f"own_{n}" for n in range(30))]
    put(tree, equiv(candidates=[candidate(n) for n in names]), "cpu", "equiv")
    for n in range(20):
        made = equiv("cuda:0", environment={**environment("cuda:0"), "device": {"model": f"G{n}"}})
        put(tree, made, f"gpu-{n}")
    assert gate(tree).code == 0
    text = (tree / "out" / "gate.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= block.MOST_LINES
    cells, identity = (part for part in text.split("\n\n") if part.startswith("| "))
    assert re.match(r"\| layer \(first \d+ of \d+\) \|", cells)
    assert re.match(r"\| equal bytes, cases by dtype \(first \d+ of \d+\) \|", identity)


def test_the_block_stands_alone_in_forty_lines(tree: Path) -> None:
    assert gate(tree).code == 0
    text = (tree / "out" / "gate.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= block.MOST_LINES
    for words in (
        "## bytegate gate: PASS",
        "| inductor, cpu | bf16 50 / fp16 50 |",
        "T 0 to 1,409, H 0 to 128",
        "D1 (vllm on gpu NVIDIA H200",
        "14 of 15 caught (K01-K14), not covered K17; 0 false alarms in 1,200 clean cases",
        "10 of 10 texts and 4,000 of 4,000 tokens bit-identical",
        "exposed 3,000 tokens, 0 differ",
        "minimum detectable shift",
        "**not covered** vLLM's loop on gpu: there is no evidence",
        "NVIDIA H200",
        COMMIT,
        f"bytegate equiv --candidate {OWN}",
        "bytegate verify gate.json",
    ):
        assert words in text, words
    assert "/data/run" not in text


@pytest.mark.parametrize("count", [1, 12, 60])
def test_the_block_fits_whatever_there_is(count: int, tree: Path) -> None:
    names = [f"kernel_{i}" for i in range(count)]
    bad = [
        candidate(
            n,
            state="failed",
            lanes=[lane("shapes", state="failed", findings=[finding("hang")] * 9, equal=1)],
            ledger=[use(f"X{i}")],
        )
        for i, n in enumerate(names)
    ]
    put(tree, equiv(verdict="FAIL", exit_code=1, candidates=bad), "cpu", "equiv")
    for i in range(count):
        command = f"bytegate equiv --seed {i}"
        made = environment("cuda:0")
        made["device"]["model"] = f"GPU {i}"
        put(tree, equiv("cuda:0", seed=i, command=command, environment=made), f"gpu{i}", "equiv")
    assert gate(tree).code == 1
    text = (tree / "out" / "gate.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= block.MOST_LINES
    assert text.rstrip().endswith("```")
    assert text.count("```") == 2


def test_the_page_needs_nothing_from_anywhere(tree: Path, page: None) -> None:
    assert gate(tree).code == 0
    text = (tree / "out" / "gate.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "default-src 'none'" in text
    for address in re.findall(r"""(?:src|href)=["']([^"']+)""", text):
        assert address.startswith("#"), address
    assert text.count("<svg") >= 10
    for words in ("Cases by kind and lane, cpu", "Base offsets", "K17", "By text", "text 9"):
        assert words in text
    assert not re.findall(r"#0(\w)0(?:\1)0(?:\1)\b", text), "every stand-in colour was replaced"


def test_the_page_writes_what_evidence_says_and_does_not_run_it(tree: Path, page: None) -> None:
    evil = "<img src=x onerror=alert(1)>"
    put(tree, loop(stand_ins=[evil]), "cpu", "loop")
    rows = [fault("K01", title=evil)]
    put(tree, faults(faults=rows), "cpu", "faults")
    assert gate(tree).code == 0
    assert "<img" not in (tree / "out" / "gate.html").read_text(encoding="utf-8")
    assert "<img" not in (tree / "out" / "gate.md").read_text(encoding="utf-8").replace("\\<", "")


def test_junit_agrees_with_the_verdict(tree: Path) -> None:
    assert gate(tree).code == 0
    root = ET.parse(tree / "out" / "gate.xml").getroot()  # noqa: S314 - our own file
    assert (root.get("failures"), root.get("errors")) == ("0", "0")
    assert root.get("skipped") == "3"
    (tree / "cpu" / "loop" / "loop.json").unlink()
    assert gate(tree).code == 4
    root = ET.parse(tree / "out" / "gate.xml").getroot()  # noqa: S314
    assert root.get("errors") == "1"
    (tree / "cpu" / "equiv" / "equiv.json").write_text("{", encoding="utf-8")
    assert gate(tree).code == 4
    root = ET.parse(tree / "out" / "gate.xml").getroot()  # noqa: S314
    assert int(root.get("errors", "0")) == 1


def test_a_ci_step_gets_the_block(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tree / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert gate(tree).code == 0
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n## bytegate gate: PASS")
    assert text.endswith((tree / "out" / "gate.md").read_text(encoding="utf-8"))


def test_the_verdict_names_every_file_by_digest_and_no_absolute_path(tree: Path) -> None:
    assert gate(tree).code == 0
    made = record.read(tree / "out" / "gate.json")
    assert len(made.files) == 7
    assert all(not f.path.startswith("/") for f in made.files)
    text = (tree / "out" / "gate.json").read_text(encoding="utf-8")
    recorded = text.replace(json.dumps(made.command), "").replace(made.command, "")
    assert str(tree) not in recorded


def test_a_moved_tree_is_verified_where_it_is(tree: Path, tmp_path: Path) -> None:
    assert gate(tree).code == 0
    verdict = tmp_path / "elsewhere" / "gate.json"
    verdict.parent.mkdir()
    shutil.move(tree / "out" / "gate.json", verdict)
    shutil.move(tree, tmp_path / "moved")
    words = ("verify", str(verdict), "--cases", "0")
    assert bytegate(*words).code == 4
    done = bytegate(*words, "--from", str(tmp_path / "moved"))
    assert done.code == 0, done.said


def test_the_schema_is_exported() -> None:
    done = bytegate("gate", "schema")
    assert done.code == 0
    assert json.loads(done.said)["properties"]["verdict"]
