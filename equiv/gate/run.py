"""``bytegate gate``: run what the policy asks for, or take what is there; judge; write."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from equiv import environment, evidence
from equiv.errors import BytegateError, UsageError
from equiv.gate import agree, collect, record
from equiv.gate import judge as judging
from equiv.gate.policy import Policy

LEFT = ("gate.json", "gate.md", "gate.xml", "gate.html")
"""What a gate leaves in its folder."""


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    policy: Policy
    folders: tuple[Path, ...] = ()
    out: Path = Path("out/gate")
    commit: str | None = None
    command: str = "bytegate gate"


@dataclass(frozen=True)
class Step:
    """One command of a run.

    Attributes
    ----------
    layer : that it leaves evidence of.
    words : of the command line, after ``bytegate``; the folder for its evidence is added.
    file : that it leaves in its folder.

    """

    layer: str
    folder: str
    words: tuple[str, ...]
    file: str


def steps(policy: Policy) -> Iterator[Step]:
    """Yield what a run of the gate runs, in order: the quickest layers first."""
    k, s = policy.kernel, policy.servers
    chosen = [w for name in k.candidates for w in ("--candidate", name)]
    lanes = [w for name in k.lanes for w in ("--lane", name)]
    if k.required != "no":
        words = ("equiv", "--pair", k.pair, "--profile", k.profile, *chosen, *lanes)
        yield Step("kernel", "equiv", words, "equiv.json")
    if policy.loop.required != "no":
        words = ("loop", "--profile", policy.loop.profile, "--pack", policy.loop.pack)
        yield Step("loop", "loop", words, "loop.json")
    clean = ("--clean-cases", str(policy.faults.clean_cases))
    if policy.faults.kernel != "no":
        words = ("equiv", "faults", "--pair", k.pair, *clean)
        yield Step("kernel_faults", "faults", words, "faults.json")
    if policy.faults.loop != "no":
        words = ("loop", "faults", "--profile", policy.loop.profile)
        yield Step("loop_faults", "loop-faults", words, "faults.json")
    if s.required != "no":
        words = ("ppl", "run", "--route", s.route, "--claim", s.claim, *s.arguments)
        yield Step("servers", "ppl", words, "ppl.json")


ENTRY = "import sys; from equiv.cli import main; main(sys.argv[1:])"
"""How a step enters: by the same door as a person's command, in this Python."""


def run_step(step: Step, out: Path) -> tuple[int, str]:
    """Run one command; return its exit code, and what it said last where it left no evidence."""
    folder = out / step.folder
    (folder / step.file).unlink(missing_ok=True)  # an earlier run's isn't this one's
    command = [sys.executable, "-c", ENTRY, *step.words, "--out", str(folder)]
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(  # noqa: S603 - our own commands
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    said = [line.removeprefix("bytegate: ") for line in done.stderr.splitlines() if line.strip()]
    if (folder / step.file).is_file():
        return done.returncode, ""
    return done.returncode, f"exit code {done.returncode}: {said[-1] if said else 'no word'}"


Announce = Callable[[str], None]


@dataclass(frozen=True)
class Gate:
    """A verdict, and the evidence that it was made from."""

    made: record.GateEvidence
    found: collect.Collected
    judged: judging.Judged


def gate(request: Request, announce: Announce = lambda _: None) -> Gate:
    """Run what is to be run, judge all evidence, and write ``gate.json``.

    Raises
    ------
    UsageError : a folder isn't there, or can't be written to.

    """
    started, start = datetime.now(UTC), time.monotonic()
    collect.check(request.folders)
    evidence.check_folder(request.out)
    for name in LEFT:
        if (request.out / name).is_dir():
            raise UsageError(f"--out {request.out}: {name} in it is a folder; give another one")
    ran: list[tuple[str, int]] = []
    absent: dict[str, str] = {}
    folders: Sequence[Path] = request.folders
    if not folders:
        todo = list(steps(request.policy))
        for i, step in enumerate(todo):
            announce(f"[{i + 1} of {len(todo)}] bytegate {' '.join(step.words)}")
            code, why = run_step(step, request.out)
            ran.append((" ".join(("bytegate", *step.words)), code))
            if why:
                absent[step.layer] = why
        folders = [request.out / step.folder for step in todo]
        folders = [f for f in folders if f.is_dir()]
    found = collect.collect(folders)
    judged = judging.judge(found, request.policy, commit=request.commit, absent=absent)
    if not judged.problems:
        for p in list(found.perf):
            if why := agree.stranger(p, found.pieces):
                found.perf.remove(p)
                found.notes.append(f"speed isn't shown: {why}")
    made = assemble(request, found, judged)
    made = made.model_copy(
        update={
            "ran": tuple(ran),
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - start, 3),
        }
    )
    record.write(request.out / "gate.json", made)
    return Gate(made, found, judged)


def assemble(
    request: Request, found: collect.Collected, judged: judging.Judged
) -> record.GateEvidence:
    """Put a verdict together; when it was made is added by whoever knows."""
    word = record.verdict_of(judged.cells, judged.problems)
    pieces = [*found.pieces, *found.perf]
    commit = agree.commit_of(found.pieces)
    suite = environment.suite()
    notes = list(found.notes)
    own = suite.get("commit")
    if commit and own and own != commit and not judged.problems:
        notes.append(f"judged by bytegate of another commit, {str(own)[:12]}")
    return record.GateEvidence(
        verdict=word,
        exit_code=int(record.CODES[word]),
        reasons=tuple(reasons(judged)),
        cells=judged.cells,
        problems=judged.problems,
        not_covered=tuple(not_covered(judged)),
        notes=tuple(notes),
        policy=request.policy,
        policy_sha256=request.policy.sha256(),
        commit=commit,
        commit_wanted=request.commit,
        dirty=any(agree.dirty(p) for p in found.pieces),
        files=tuple(_file(p, request.out) for p in pieces),
        arrays=tuple(
            dict.fromkeys(
                _relative(f, request.out) for a in judged.arrays.values() for f in a.folders
            )
        ),
        ran=(),
        suite=suite,
        started="",
        seconds=0.0,
        command=request.command,
    )


def reasons(judged: judging.Judged) -> Iterator[str]:
    """Yield why the verdict isn't PASS: the problems, else each cell that decides."""
    if judged.problems:
        yield from judged.problems
        return
    for c in judged.cells:
        if c.state in {"failed", "invalid", "inconclusive"} or (
            c.state == "not covered" and c.required
        ):
            why = "; ".join(c.reasons) or "no reason given"
            yield f"{collect.LAYERS[c.layer]} on {c.device}: {c.state}: {why}"


def not_covered(judged: judging.Judged) -> Iterator[str]:
    """Name everything that wasn't covered, required or not; whole cells come first."""
    where = {id(c): f"{collect.LAYERS[c.layer]} on {c.device}" for c in judged.cells}
    for c in judged.cells:
        if c.state == "not covered":
            yield f"{where[id(c)]}: {'; '.join(c.reasons)}"
    for c in judged.cells:
        yield from (f"{where[id(c)]}: {r}" for r in c.remarks)


def _file(piece: collect.Piece, out: Path) -> record.File:
    return record.File(
        name=piece.name,
        path=_relative(piece.path, out),
        sha256=piece.sha256,
        layer=piece.layer,
    )


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()


def one_line(error: BytegateError) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


def show(made: record.GateEvidence, path: Path) -> list[Any]:
    """Return the blocks for a terminal: verdict, reasons, cells, and where the rest lies."""
    from equiv.document import Facts, Heading, Items, Line, Table

    head = f"bytegate gate: {made.verdict}"
    blocks: list[Any] = [Heading(head, 1)]
    if made.reasons:
        blocks.append(Items(made.reasons))
    if made.cells:
        rows = tuple(
            (
                collect.LAYERS[c.layer],
                c.device,
                c.state,
                "yes" if c.required else "no",
                "; ".join(c.reasons),
            )
            for c in made.cells
        )
        blocks.append(Table(("layer", "device", "state", "required", "why"), rows))
    if made.notes:
        blocks += [Heading("Notes"), Items(made.notes)]
    blocks.append(Facts((("verdict", f"{made.verdict}, exit code {made.exit_code}"),)))
    blocks.append(Line(f"exit code {made.exit_code}; gate.json, gate.md and gate.html in {path}"))
    return blocks
