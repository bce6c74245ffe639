"""Files that are written whole or not at all. Light: nothing but the standard library."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a name of its own, flushed to the disk, and then put it in its place.

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
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
