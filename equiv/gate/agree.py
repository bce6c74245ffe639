"""What evidence must agree on to be judged together, and what may differ by lane.

================ =============================================================================
all of it        the commit of bytegate, and the sources of each of its packages and pairs
kernel layer     the pair, which is the policy's
one candidate    the digest of its source, wherever its module's name appears
loop layer       the pack, which is the policy's
servers          the fused arm's route, which is the policy's
one kind, CPU    the version of vLLM, of all that state one: a CPU's and a GPU's may differ
or GPU
one device and   torch, triton, vLLM, and the libraries with vLLM's op, by digest: of a campaign
layer            and of its planted faults
may differ       seeds, profiles, lanes, hosts, Python, NumPy; between a CPU and a GPU, or two
                 models of GPU, torch and everything built against it
================ =============================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from equiv.gate.collect import Piece
from equiv.gate.policy import Policy

SHORT = 12
"""Characters of a digest in a message."""
MOST_NAMES = 3
"""Files that a message names for each value."""

FAMILY = {
    "kernel": "kernel",
    "kernel_faults": "kernel",
    "loop": "loop",
    "loop_faults": "loop",
    "servers": "servers",
}


def disagreements(pieces: Sequence[Piece], policy: Policy, commit: str | None) -> list[str]:
    """Say what keeps these files from being judged together; empty where nothing does.

    Parameters
    ----------
    commit : what the evidence's has to be, where that was asked for.

    """
    found = [*_unknown(pieces), *_commits(pieces, commit)]
    if not found:
        found += _sources(pieces)
    found += _unchanged(pieces, policy)
    found += _units(pieces, policy)
    found += _candidates(pieces)
    found += _versions(pieces)
    return found


def without_folder(name: str) -> str:
    """Return the name of somebody's own kernel without the folder from which it was reached.

    ``kernels/my_pack.py:kv_pack`` and ``my_pack.py:kv_pack`` are one candidate, seen from two
    working directories; two files of one name have digests that differ.
    """
    where, colon, function = name.rpartition(":")
    return f"{Path(where).name}{colon}{function}" if where.endswith(".py") else name


def commit_of(pieces: Iterable[Piece]) -> str:
    """Return the commit that evidence states; empty where none does."""
    return next((c for p in pieces for c in _commits_of(p)), "")


def stranger(piece: Piece, pieces: Sequence[Piece]) -> str:
    """Say why a file isn't of the commit and sources of others; empty where it is, or for none."""
    if pieces and not _commits_of(piece) and not _hashes(piece):
        return f"{piece.name} doesn't say which bytegate made it"
    both = [*pieces, piece]
    return next(itertools.chain(_commits(both, None), _sources(both)), "") if pieces else ""


def dirty(piece: Piece) -> bool:
    """Whether evidence says that its tree had changes."""
    return any(suite.get("dirty") is True for suite in piece.suites)


def _commits_of(piece: Piece) -> list[str]:
    found = [str(suite.get("commit") or "") for suite in piece.suites]
    return [c for c in found if c and not c.startswith("failed")]


def _hashes(piece: Piece) -> list[tuple[str, str]]:
    """Return packages with the digests of their sources, of every bytegate that had a part."""
    tables = [suite.get("sources_sha256") for suite in piece.suites]
    found = [x for t in tables if isinstance(t, dict) for x in t.items()]
    return [(str(k), str(v)) for k, v in found if not str(v).startswith("failed")]


def _unknown(pieces: Sequence[Piece]) -> Iterator[str]:
    for p in pieces:
        if not _commits_of(p) and not _hashes(p):
            yield (
                f"{p.name} doesn't say which bytegate made it, neither commit nor sources; "
                "make it again"
            )


def _commits(pieces: Sequence[Piece], wanted: str | None) -> Iterator[str]:
    values = _grouped((c, p) for p in pieces for c in _commits_of(p))
    if len(values) > 1:
        yield f"commits differ: {_listed(values)}"
    for p in pieces:
        if wanted and not _commits_of(p):
            yield f"commit {wanted[:SHORT]} was asked for, and {p.name} states none"
    for value, names in values.items():
        if wanted and not value.startswith(wanted):
            yield (
                f"commit {wanted[:SHORT]} was asked for, and {_names(names)} is of {value[:SHORT]}"
            )


def _sources(pieces: Sequence[Piece]) -> Iterator[str]:
    packages: dict[str, list[tuple[str, Piece]]] = {}
    for p in pieces:
        for name, digest in _hashes(p):
            packages.setdefault(name, []).append((digest, p))
    for package, stated in sorted(packages.items()):
        values = _grouped(stated)
        if len(values) > 1:
            yield (
                f"sources of {package} differ, though not the commit, so one tree had changes: "
                f"{_listed(values)}"
            )


def _unchanged(pieces: Sequence[Piece], policy: Policy) -> Iterator[str]:
    if policy.clean_tree:
        changed = [p.name for p in pieces if dirty(p)]
        if changed:
            yield f"the policy wants a clean tree, and had changes: {_names(changed)}"


def _units(pieces: Sequence[Piece], policy: Policy) -> Iterator[str]:
    for p in pieces:
        if p.layer in {"kernel", "kernel_faults"} and p.made.pair != policy.kernel.pair:
            yield f"{p.name} is of the pair {p.made.pair}, the policy's is {policy.kernel.pair}"
        if p.layer == "loop" and p.made.pack != policy.loop.pack:
            yield f"{p.name} is of the pack {p.made.pack}, the policy's is {policy.loop.pack}"
        if p.layer == "servers" and p.made.verdict != "INVALID" and p.made.subject is not None:
            ran = ", ".join(p.made.subject.routes.get("fused", ())) or "none"
            if ran != policy.servers.route:
                yield f"{p.name} is of the route {ran}, the policy's is {policy.servers.route}"


def _candidates(pieces: Sequence[Piece]) -> Iterator[str]:
    """Compare the digests of own kernels by the name of their module, across layers."""
    digests: dict[str, dict[str, list[str]]] = {}
    for p in pieces:
        for name, digest in _own(p):
            module = Path(name.rpartition(":")[0].removesuffix(".py").replace(".", "/")).name
            digests.setdefault(module, {}).setdefault(digest, []).append(f"{p.name} ({name})")
    for module, values in digests.items():
        if len(values) > 1:
            yield f"candidates differ: {module} has other sources, {_listed(values)}"


def _own(piece: Piece) -> Iterator[tuple[str, str]]:
    if piece.layer == "kernel":
        yield from ((c.name, c.source_sha256) for c in piece.made.candidates if c.source_sha256)
    if piece.layer == "loop" and piece.made.pack_sha256:
        yield piece.made.pack, piece.made.pack_sha256


def _versions(pieces: Sequence[Piece]) -> Iterator[str]:
    for kind in sorted({p.kind for p in pieces}):
        mine = [p for p in pieces if p.kind == kind]
        values = _grouped((p.versions.get("vllm", ""), p) for p in mine)
        if len(values) > 1:
            yield f"versions of vllm differ on a {kind.upper()}: {_listed(values)}"
    lanes: dict[tuple[str, str], list[Piece]] = {}
    for p in pieces:
        lanes.setdefault((p.device, FAMILY[p.layer]), []).append(p)
    for (device, family), mine in sorted(lanes.items()):
        for what in ("torch", "triton"):
            values = _grouped((p.versions.get(what, ""), p) for p in mine)
            if len(values) > 1:
                yield f"versions of {what} differ on {device}, {family} layer: {_listed(values)}"
        for library in sorted({name for p in mine for name in _libraries(p)}):
            values = _grouped((_libraries(p).get(library, ""), p) for p in mine)
            if len(values) > 1:
                yield f"{library} differs on {device}, {family} layer: {_listed(values)}"


def _libraries(piece: Piece) -> dict[str, str]:
    found: Any = piece.environment.get("libraries")
    if not isinstance(found, list):
        return {}
    return {str(x.get("name")): str(x.get("sha256")) for x in found if isinstance(x, dict)}


def _grouped(stated: Iterable[tuple[str, Piece]]) -> dict[str, list[str]]:
    """Return files by a value, those that don't state it left out."""
    found: dict[str, dict[str, None]] = {}
    for value, p in stated:
        if value:
            found.setdefault(value, {})[p.name] = None
    return {value: list(names) for value, names in found.items()}


def _listed(values: dict[str, list[str]]) -> str:
    return "; ".join(f"{value[:SHORT]} in {_names(names)}" for value, names in values.items())


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
