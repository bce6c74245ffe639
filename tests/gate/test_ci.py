"""The workflow of ``docs/ci.md``: it is YAML, hangs together, and its commands are ours."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from evidence_tree import bytegate

yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
FOUND = [part.partition("```")[0] for part in PAGE.split("```yaml\n")[1:]]
WORKFLOW = yaml.safe_load(FOUND[0])
JOBS = {**WORKFLOW["jobs"], **yaml.safe_load(FOUND[1])}


def commands(job: dict[str, Any]) -> list[list[str]]:
    """Return what a job's shell steps run, a line each."""
    shell = [step["run"] for step in job["steps"] if "run" in step]
    return [shlex.split(line) for text in shell for line in text.splitlines() if line.strip()]


def ours(words: list[str]) -> list[str]:
    """Return a command as words of bytegate's; empty where it is somebody else's."""
    if words[:2] == ["nox", "-s"]:
        return [words[2], *words[4:]]
    if words[:2] == ["python", "-m"] and words[2].startswith("equiv"):
        return [words[2].removeprefix("equiv."), *words[3:]]
    return words[1:] if words[0] == "bytegate" else []


def outs(job: dict[str, Any]) -> list[Path]:
    return [Path(w[w.index("--out") + 1]) for w in commands(job) if "--out" in w]


def test_there_is_a_workflow_and_a_job_for_servers() -> None:
    assert set(WORKFLOW["jobs"]) == {"cpu", "gpu", "gate"}
    assert set(JOBS) == {"cpu", "gpu", "gate", "servers"}
    assert "pull_request" in WORKFLOW[True], "YAML 1.1 reads the key `on` as a truth value"


@pytest.mark.parametrize("name", JOBS)
def test_a_job_hangs_together(name: str) -> None:
    job = JOBS[name]
    assert set(job.get("needs", ())) <= set(WORKFLOW["jobs"])
    for step in job["steps"]:
        assert ("run" in step) != ("uses" in step)
        assert "@v" in step.get("uses", "@v")
    uploads = [s for s in job["steps"] if s.get("uses", "").startswith("actions/upload")]
    assert len(uploads) == 1
    assert uploads[0]["if"] == "always()", "a job that failed uploads what it found"
    folder = Path(uploads[0]["with"]["path"])
    assert outs(job)
    assert all(out.is_relative_to(folder) for out in outs(job)), "all evidence is uploaded"
    assert len(set(outs(job))) == len(outs(job)), "no command overwrites another's evidence"


def test_the_last_job_reads_what_the_others_left() -> None:
    down = next(s for s in JOBS["gate"]["steps"] if "download-artifact" in s.get("uses", ""))
    (words,) = [w for w in commands(JOBS["gate"]) if "--from" in w]
    assert words[words.index("--from") + 1] == down["with"]["path"]
    assert set(JOBS["gate"]["needs"]) == {"cpu", "gpu"}


def test_every_file_that_a_command_names_is_there_or_is_said() -> None:
    (words,) = [w for w in commands(JOBS["gate"]) if "--policy" in w]
    name = words[words.index("--policy") + 1]
    assert (ROOT / name).is_file() or f"bytegate gate policy > {name}" in PAGE


@pytest.mark.parametrize("words", [w for j in JOBS.values() for w in commands(j)], ids=shlex.join)
def test_a_command_parses(words: list[str]) -> None:
    mine = ours(words)
    if not mine:
        assert words[:2] in (["python", "-m"], ["export", "PYTHONPATH=$PWD:$PWD/kernels"])
        return
    done = bytegate(*mine, "--help")
    assert done.code == 0, done.said
    assert bytegate(*mine, "--there-is-no-such-option", "--help").code == 2


@pytest.mark.parametrize(
    ("require", "code"), [((), 0), (("--require", "gpu"), 4)], ids=["cpu", "gpu"]
)
def test_the_last_step_ends_with_the_verdict(
    require: tuple[str, ...], code: int, tree: Path
) -> None:
    """As the job runs it, over the evidence of a CPU and over the same with a GPU asked for."""
    import shutil

    shutil.rmtree(tree / "gpu")
    (words,) = [ours(w) for w in commands(JOBS["gate"]) if "--from" in w]
    values = {
        "--from": str(tree),
        "--policy": str(tree / "policy.toml"),
        "--commit": "a" * 40,
        "--out": str(tree / "verdict"),
    }
    asked = ["gate", *[x for k, v in values.items() for x in (k, v)], *require]
    assert {w for w in words if w.startswith("--")} == {*values, "--require"}
    done = bytegate(*asked)
    assert done.code == code, done.said
    assert bytegate(*asked, "--commit", "b" * 40).code == 4
