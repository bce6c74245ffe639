"""Files: written whole or not at all, and their digests. Light: the standard library alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a name to write a file under; put it in its place, flushed, when the block ends well.

    Parameters
    ----------
    path : the file; its folder is made where it is missing.

    Raises
    ------
    OSError
        Whatever the system said; the old file, or none, is then still there.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    os.close(handle)
    fresh = Path(name)
    try:
        yield fresh
        with fresh.open("rb+") as f:
            os.fsync(f.fileno())
        fresh.chmod(0o644)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a name of its own, flushed to the disk, and then put it in its place.

    Parameters and errors are those of ``whole``.
    """
    with whole(path) as fresh:
        fresh.write_bytes(data)
