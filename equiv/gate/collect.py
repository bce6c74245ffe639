"""Evidence on disk: every file of it below some folders, read, checked, and told apart.

A file is known by the schema that it states, wherever it lies and whatever it is called. One that
can't be read, that isn't what was written, contradicts itself, or is of a schema that this version
doesn't know, is a problem by its name: nothing is judged then.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equiv import evidence, seal
from equiv.errors import BytegateError, UsageError
from equiv.gate import consistent

LAYERS = {
    "kernel": "kernel",
    "kernel_faults": "kernel faults",
    "loop": "vLLM's loop",
    "loop_faults": "loop faults",
    "servers": "servers",
}
"""The layers that a gate judges, and what they are called."""

NAMES = ("equiv.json", "loop.json", "faults.json", "ppl.json", "perf.json")
"""What commands call their evidence: a file of such a name has to be evidence."""

KINDS: dict[str, type] = {
    "bytegate.equiv": evidence.EquivEvidence,
    "bytegate.faults": evidence.FaultsEvidence,
    "bytegate.loop": evidence.LoopEvidence,
}
SERVERS = "bytegate.ppl"
SHOWN = "bytegate.perf"
"""Shown, and never decides."""
PASSED_OVER = (
    "bytegate.gate",
    "bytegate.ppl.",
    "bytegate.perf.",
    "bytegate.doctor",
    "bytegate.bench",
)
"""How schemas of ours begin that aren't evidence of a layer: a run's own state, for one."""

LOOP_PAIR = "loop"
"""What the loop's planted faults call their pair."""
ARRAYS = "scores"
"""The folder of a store in which stored arrays lie."""


class NotShown(UsageError):
    """A measurement of speed that can't be read: it is left out, since it never decides."""


@dataclass(frozen=True)
class Piece:
    """One file of evidence.

    Attributes
    ----------
    path, name : where it lies, and how it is called: from the folder that was given.
    sha256 : of the file.
    layer : a key of ``LAYERS``, or ``"perf"``.
    made : what it holds.

    """

    path: Path
    name: str
    sha256: str
    layer: str
    made: Any

    @property
    def environment(self) -> Mapping[str, Any]:
        """What the evidence says of where it was made; of servers, where their client ran."""
        run = getattr(self.made, "run", None)
        return _mapping(getattr(run or self.made, "environment", None))

    @property
    def suites(self) -> tuple[Mapping[str, Any], ...]:
        """Which bytegate made it; of servers which one ran, and which compared."""
        found = [_mapping(self.environment.get("suite"))]
        if self.layer == "servers":
            found.append(_mapping(self.made.suite))
        return tuple(s for s in found if s) or ({},)

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of packages, without what stands after a blank."""
        found: Any = self.environment.get("versions")
        if self.layer == "servers":
            subject = getattr(self.made, "subject", None)
            found = subject.versions if subject else {}
        return {k: str(v).split()[0] for k, v in _mapping(found).items() if v}

    @property
    def kind(self) -> str:
        """``"cpu"`` or ``"gpu"``; ``"unstated"`` where servers don't say."""
        return self.device.split()[0]

    @property
    def device(self) -> str:
        """``"cpu"``, or ``"gpu"`` and the model; of servers also ``"unstated"``."""
        if self.layer == "servers":
            return servers_device(self.versions, getattr(self.made, "run", None))
        if not str(self.made.device).startswith("cuda"):
            return "cpu"
        model = _mapping(self.environment.get("device")).get("model", "of an unknown model")
        return f"gpu {model}"


@dataclass
class Collected:
    """What lies below some folders; ``stores`` are folders of stored arrays."""

    pieces: list[Piece] = field(default_factory=list)
    perf: list[Piece] = field(default_factory=list)
    stores: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(folders: Sequence[Path]) -> None:
    """Check that folders are there.

    Raises
    ------
    UsageError : one isn't.

    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"--from {folder}: there is no such folder; give the --out of a run, or a folder "
                "with several of them"
            )


def collect(folders: Sequence[Path]) -> Collected:
    """Read all evidence below folders.

    Raises
    ------
    UsageError : a folder isn't there.

    """
    check(folders)
    found = Collected()
    seen: dict[Path, None] = {}
    digests: dict[str, str] = {}
    taken: set[str] = set()
    for folder in folders:
        for path in _files(folder):
            if path.resolve() in seen:
                continue
            seen[path.resolve()] = None
            name = _plain(_shown(path, folder, taken))
            taken.add(name)
            try:
                piece = read(path, name)
            except NotShown as e:
                found.notes.append(f"speed isn't shown: {e}")
                continue
            except BytegateError as e:
                found.problems.append(str(e))
                continue
            if piece is None:
                continue
            if _plain(str(path)) != str(path):
                found.problems.append(
                    f"{name} has a name that is no UTF-8, so it can't be recorded"
                )
                continue
            # Laid out in another way, it is a copy all the same: its digest is of the content.
            content = piece.made.content_sha256 or piece.sha256
            if content in digests:
                found.notes.append(f"{name} is a copy of {digests[content]}, and counts once")
                continue
            digests[content] = name
            (found.perf if piece.layer == "perf" else found.pieces).append(piece)
        found.stores += [
            s for s in stores(folder) if s.resolve() not in {x.resolve() for x in found.stores}
        ]
    return found


def read(path: Path, name: str, *, unsealed: bool = False) -> Piece | None:
    """Read one file; None where it isn't evidence of a layer.

    Parameters
    ----------
    unsealed : whether one without a digest of itself is taken, of before evidence had them.

    Raises
    ------
    BytegateError : with the file's name: it can't be judged.

    """
    known = path.name in NAMES
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{name} can't be read: it is no regular file")
        data = path.read_bytes()
    except OSError as e:
        raise UsageError(f"{name} can't be read: {e.strerror}") from None
    try:
        raw = seal.loads(data)
    except (ValueError, RecursionError) as e:
        if not known and not _looks_ours(data):
            return None
        raise UsageError(f"{name} is damaged, it is no JSON: {e}") from None
    schema = _plain(str(raw.get("schema", ""))) if isinstance(raw, dict) else ""
    if not schema.startswith("bytegate."):
        if not known and not _was_ours(raw):
            return None
        raise UsageError(f"{name} states no schema of bytegate's, {schema or 'none'}")
    if schema.startswith(PASSED_OVER):
        return None
    digest = hashlib.sha256(data).hexdigest()
    if schema == SHOWN:
        return Piece(path, name, digest, "perf", _perf(path, name))
    return _sealed(path, name, digest, raw, unsealed=unsealed)


def _sealed(path: Path, name: str, digest: str, raw: dict[str, Any], *, unsealed: bool) -> Piece:
    """Read evidence of a layer, once it was seen to be what was written."""
    schema = raw["schema"]
    if schema not in {*KINDS, SERVERS}:
        raise UsageError(
            f"{name} is of an unknown schema, {_plain(schema)}; did a newer bytegate make it?"
        )
    if damage := seal.broken(raw):
        raise UsageError(f"{name} is damaged: {damage}")
    if not raw.get(seal.FIELD) and not unsealed:
        raise UsageError(
            f"{name} carries no digest of itself ({seal.FIELD}): an older bytegate made it, so "
            "damage couldn't be seen; make it again"
        )
    if schema == SERVERS:
        return Piece(path, name, digest, "servers", _ppl(path, name))
    made = _evidence(path, name, KINDS[schema])
    if against := consistent.contradictions(made):
        raise UsageError(f"the evidence {name} contradicts itself: {'; '.join(against[:3])}")
    return Piece(path, name, digest, layer_of(made), made)


def layer_of(made: Any) -> str:
    """Return the layer of an evidence value of the engine's."""
    if isinstance(made, evidence.LoopEvidence):
        return "loop"
    if isinstance(made, evidence.FaultsEvidence):
        return "loop_faults" if made.pair == LOOP_PAIR else "kernel_faults"
    return "kernel"


def _evidence(path: Path, name: str, kind: type) -> Any:
    try:
        return evidence.read(path, kind)
    except UsageError as e:
        raise UsageError(str(e).replace(str(path), name)) from None


def _perf(path: Path, name: str) -> Any:
    from equiv.perf.record import PerfEvidence

    try:
        return _evidence(path, name, PerfEvidence)
    except UsageError as e:
        raise NotShown(str(e)) from None


def _ppl(path: Path, name: str) -> Any:
    try:
        from ppl import evidence as ppl_evidence
    except ModuleNotFoundError as e:
        raise UsageError(f"{name} needs {e.name} to be read: pip install 'bytegate[ppl]'") from None
    try:
        return ppl_evidence.read(path)
    except UsageError as e:
        raise UsageError(str(e).replace(str(path), name)) from None


def _folders(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield folders, what lies in them, once each: through links, but not the hidden ones."""
    seen: set[Path] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root)
        if here.resolve() in seen:
            folders[:] = []
            continue
        seen.add(here.resolve())
        inside = sorted(x for x in folders if not x.startswith("."))
        folders[:] = [x for x in inside if x != ARRAYS]
        yield here, inside, sorted(files)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the JSON files below a folder, but for stored results and what is hidden."""
    for root, _, files in _folders(folder):
        yield from (root / x for x in files if x.endswith(".json"))


def stores(folder: Path) -> list[Path]:
    """Return the folders of stored arrays below a folder."""
    return [root for root, inside, _ in _folders(folder) if ARRAYS in inside]


def _shown(path: Path, folder: Path, taken: Container[str]) -> str:
    """Name a file from the folder that was given, or from above it where that is another's name."""
    inside = path.relative_to(folder)
    name = str(Path(folder.name or folder.resolve().name, inside))
    above = folder.absolute().parts
    for n in range(2, len(above) + 1):
        if name not in taken:
            break
        name = str(Path(*above[-n:], inside))
    return name


def _looks_ours(data: bytes) -> bool:
    return b'"bytegate.' in data or (b'"verdict"' in data and b'"exit_code"' in data)


def _was_ours(raw: Any) -> bool:
    """Whether a file has the fields of evidence, though not the schema any more."""
    return isinstance(raw, dict) and (
        seal.FIELD in raw or {"verdict", "exit_code", "schema_version"} <= raw.keys()
    )


def _plain(text: str) -> str:
    """Write what no text file can hold (bytes of a name that are no UTF-8) as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


GATHERS = {"nccl": "gpu", "symmetric": "gpu", "gloo": "cpu"}
"""What a rank's counters call the gather that ran, and where that runs."""


def servers_device(versions: Mapping[str, str], run: Any) -> str:
    """Tell where servers ran: from the torch of the stored keys, else from the gather that ran."""
    torch = versions.get("torch", "")
    for mark, device in (("+cpu", "cpu"), ("+cu", "gpu"), ("+rocm", "gpu")):
        if mark in torch:
            return device
    for server in getattr(run, "servers", ()):
        gather = str(server.facts.get("gather", ""))
        for mark, device in GATHERS.items():
            if mark in gather:
                return device
    return "unstated"
