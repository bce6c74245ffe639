"""``bytegate verify``: whether a file is whole, agrees with itself, and comes out again.

A random sample of recorded cases runs again and their hashes are compared; planted faults must
still be found on their smallest cases; every figure of the server layer is derived again from the
stored arrays; and of a gate's verdict every file must be the one that it read, and give the same
verdict. The threat is corruption and mixing. Nothing here is signed: it doesn't guard against
somebody who writes evidence on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from equiv.document import Block, Facts, Heading, Table, counted
from equiv.errors import ExitCode, UsageError
from equiv.files import sha256
from equiv.gate import agree, collect, record, servers

Outcome = Literal["holds", "differs", "damaged", "not covered"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    whole : whether it is about the file by itself, and not about what it records.

    """

    what: str
    outcome: Outcome
    detail: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Options:
    """How much to run again, and where else to look for files.

    Attributes
    ----------
    cases : recorded cases to run again, of each file.
    seed : that picks them.
    folders : where evidence and arrays lie, if they were moved.
    library : with vLLM's op, where the candidate needs it.

    """

    cases: int = 12
    seed: int = 0
    folders: tuple[Path, ...] = ()
    library: str | None = None


@dataclass
class Verified:
    """All checks of a file; ``asked`` is whether anything but the file itself was to be looked at.

    A file that is whole, and of which nothing could be made again, isn't verified: the same words
    would then be said of figures that somebody made up.
    """

    checks: list[Check] = field(default_factory=list)
    asked: bool = True

    @property
    def exit_code(self) -> ExitCode:
        """1 where something comes out otherwise, 4 where a file is damaged or nothing held.

        The verdict that the file records doesn't matter: that of FAIL can be verified.
        """
        outcomes = {c.outcome for c in self.checks}
        if "damaged" in outcomes:
            return ExitCode.INVALID
        if "differs" in outcomes:
            return ExitCode.FAIL
        held = any(c.outcome == "holds" and not (c.whole and self.asked) for c in self.checks)
        return ExitCode.PASS if held else ExitCode.INVALID

    @property
    def word(self) -> str:
        """The verdict on the file."""
        left = sum(c.outcome == "not covered" for c in self.checks)
        but = f", but for {counted(left, 'line')} NOT COVERED" if left else ""
        words = {0: f"VERIFIED{but}", 1: "DIFFERS"}
        return words.get(int(self.exit_code), "NOT VERIFIED")


def verify(path: Path, options: Options) -> Verified:
    """Check one file.

    Raises
    ------
    UsageError : there is no such file, or a folder of the options isn't there.

    """
    collect.check(options.folders)
    if not path.is_file():
        raise UsageError(
            f"{path}: there is no such file; give a gate.json, equiv.json, loop.json, faults.json "
            "or ppl.json"
        )
    if _is_verdict(path):
        return Verified(list(_gate(path, options)), asked=options.cases > 0)
    try:
        piece = collect.read(path, path.name, unsealed=True)
    except UsageError as e:
        return Verified([Check(path.name, "damaged", str(e))])
    if piece is None or piece.layer == "perf":
        raise UsageError(f"{path} isn't evidence of a layer, nor a gate's verdict")
    stores = [*_stores([path.parent]), *_stores(options.folders)]
    asked = options.cases > 0 or piece.layer == "servers"
    return Verified(list(_piece(piece, options, stores)), asked=asked)


def _is_verdict(path: Path) -> bool:
    try:
        head = path.read_bytes()
    except OSError as e:
        raise UsageError(f"can't read {path}: {e.strerror}") from None
    return b'"bytegate.gate"' in head or path.name == "gate.json"


def _stores(folders: Iterable[Path]) -> list[Path]:
    return [s for f in folders for s in collect.stores(f)]


def _piece(piece: collect.Piece, options: Options, stores: Sequence[Path]) -> list[Check]:
    """Check the evidence of one layer, which was read and so is whole."""
    told = f"{piece.sha256[:12]}; it says {piece.made.verdict}"
    whole = Check(f"{piece.name}: digest, schema, counts", "holds", told, whole=True)
    if not piece.made.content_sha256:
        text = "it has none, of an older bytegate: what leaves it consistent can't be seen"
        whole = Check(f"{piece.name}: its digest of itself", "not covered", text)
    if piece.layer == "servers":
        return [whole, _arrays(piece, stores)]
    from equiv.gate import rerun

    pick = random.Random(f"{options.seed} {piece.sha256}")
    found = [
        Check(f"{piece.name}: {what}", outcome, detail)
        for what, outcome, detail in rerun.rerun(piece, pick, options.cases, options.library)
    ]
    return [whole, *found]


def _arrays(piece: collect.Piece, stores: Sequence[Path]) -> Check:
    found = servers.check(piece, stores)
    what = f"{piece.name}: every figure, from the stored arrays"
    if found.problem:
        return Check(what, "damaged", found.problem)
    if not found.folders:
        return Check(what, "not covered", "the arrays aren't here; --from says where they are")
    if found.differ:
        more = f" (and {len(found.differ) - 3} more)" if len(found.differ) > 3 else ""  # noqa: PLR2004
        return Check(what, "differs", "; ".join(found.differ[:3]) + more)
    return Check(what, "holds", f"{len(piece.made.texts)} texts")


# -- a gate's verdict --------------------------------------------------------------------


def _gate(path: Path, options: Options) -> list[Check]:
    try:
        made = record.read(path)
    except UsageError as e:
        return [Check(path.name, "damaged", str(e))]
    checks = [Check(f"{path.name}: digest, schema, verdict", "holds", made.verdict, whole=True)]
    found = collect.Collected()
    for f in made.files:
        check, piece = _found(f, path.parent, options.folders)
        checks.append(check)
        if piece is not None and piece.layer != "perf":
            found.pieces.append(piece)
    there = {a: path.parent / a for a in made.arrays if (path.parent / a / collect.ARRAYS).is_dir()}
    found.stores = [*there.values(), *_stores(options.folders)]
    lost = [a for a in made.arrays if a not in there]
    if lost and not options.folders:
        checks.append(Check(f"arrays in {lost[0]}", "damaged", "they are gone; --from finds them"))
    if any(c.outcome == "damaged" for c in checks):
        return checks
    checks.append(_same_verdict(made, found))
    for piece in found.pieces:
        checks += _piece(piece, options, found.stores)
    return checks


def _found(
    f: record.File, beside: Path, folders: Sequence[Path]
) -> tuple[Check, collect.Piece | None]:
    """Find a file that a verdict read: where it was, else by its digest below the folders."""
    places = [beside / f.path]
    places += [p for folder in folders for p in sorted(folder.rglob(Path(f.path).name))]
    there = [p for p in places if p.is_file()]
    if not there:
        return Check(f.name, "damaged", "the file that the gate read is gone"), None
    for p in there:
        if sha256(p) != f.sha256:
            continue
        try:
            what = f"{f.name}: the file that the gate read"
            return Check(what, "holds", f.sha256[:12], whole=True), collect.read(p, f.name)
        except UsageError as e:
            return Check(f.name, "damaged", str(e)), None
    return Check(
        f.name, "damaged", "it isn't the file that the gate read: its SHA-256 is another"
    ), (None)


def _same_verdict(made: record.GateEvidence, found: collect.Collected) -> Check:
    """Judge the files again, under the recorded policy."""
    from equiv.gate.judge import judge

    again = judge(found, made.policy, commit=made.commit_wanted)
    what = "the verdict, from the files and the policy"
    if made.problems and not again.problems:
        text = f"what was amiss isn't with the files that could be read: {made.problems[0]}"
        return Check(what, "not covered", text)
    if made.problems:
        return Check(what, "holds", "; ".join(again.problems[:2]))
    word = record.verdict_of(again.cells, again.problems)
    if word != made.verdict:
        return Check(what, "differs", f"{made.verdict} is recorded, and they give {word}")

    def facts(cells: Iterable[record.Cell]) -> list[Any]:
        return sorted((c.layer, c.device, c.state, c.required, sorted(c.files)) for c in cells)

    stated = (agree.commit_of(found.pieces), any(agree.dirty(p) for p in found.pieces))
    for name, recorded, value in zip(
        ("commit", "dirty"), (made.commit, made.dirty), stated, strict=True
    ):
        if recorded != value:
            return Check(what, "differs", f"{name} {recorded} is recorded, and they state {value}")
    if facts(again.cells) != facts(made.cells):
        one = next(iter(set(map(str, facts(again.cells))) ^ set(map(str, facts(made.cells)))))
        return Check(what, "differs", f"a cell comes out otherwise: {one}")
    return Check(what, "holds", word)


def blocks(path: Path, options: Options, done: Verified) -> list[Block]:
    """Return what a terminal shows."""
    rows = tuple((c.what, c.outcome, c.detail) for c in done.checks)
    return [
        Heading(f"bytegate verify {path}", 1, done.word),
        Table(("what", "outcome", "detail"), rows),
        Facts((("cases picked by", f"--seed {options.seed}"), ("exit code", str(done.exit_code)))),
    ]
