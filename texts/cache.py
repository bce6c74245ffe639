"""The cache folder: where fetched texts lie, and writing to it whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from equiv.files import write_whole
from texts.errors import DigestError, TextError
from texts.manifest import Archive, Part

CACHE = "BYTEGATE_CACHE"
"""Names the cache folder; by default ``bytegate`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""


def folder() -> Path:
    """Return the folder of texts, which need not be there yet."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named).expanduser() / "texts"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    root = Path(xdg) if xdg.startswith("/") else Path.home() / ".cache"
    return root / "bytegate" / "texts"


def part_path(archive: Archive, part: Part) -> Path:
    """Return where a part lies: content decides the name, so a new digest is a new file."""
    return folder() / archive.id / f"{part.sha256[:16]}-{Path(part.path).name}"


def archive_path(archive: Archive) -> Path:
    """Return where an archive lies while it is fetched, or where a person may put it."""
    return folder() / "archives" / archive.file


def sha256(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_part(archive: Archive, part: Part) -> bytes | None:
    """Return a cached part, checked again; None where it isn't cached.

    Raises
    ------
    DigestError : it was changed on disk.

    """
    path = part_path(archive, part)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise TextError(f"can't read {path}: {e.strerror}; or set {CACHE}") from None
    found = sha256(data)
    if found != part.sha256:
        raise DigestError(
            f"cached {path}", expected=part.sha256, found=found, advice="delete it and fetch again"
        )
    return data


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    try:
        write_whole(path, data)
    except OSError as e:
        raise TextError(f"can't write {path}: {e.strerror}; set {CACHE} to a folder") from None


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Hold the cache alone: two runs that fetch at the same time take turns."""
    root = folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        f = (root / ".lock").open("a")
    except OSError as e:
        raise TextError(f"can't write to {root}: {e.strerror}; set {CACHE} to a folder") from None
    with f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
