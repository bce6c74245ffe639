"""The CUDA runtime that torch loaded, by ctypes: the last error, which torch doesn't show."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path


@cache
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    """Every libcudart mapped into this process: each keeps a last error of its own."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return ()
    paths = {
        line.split()[-1]
        for line in maps.read_text(encoding="utf-8").splitlines()
        if "libcudart" in line
    }
    found = []
    for path in sorted(paths):
        lib = ctypes.CDLL(path)
        lib.cudaGetErrorName.restype = ctypes.c_char_p
        found.append(lib)
    return tuple(found)


def take_last_error() -> str:
    """Return and clear the name of the last error, ``""`` where there is none."""
    for lib in _runtimes():
        code = lib.cudaGetLastError()
        if code:
            name: bytes = lib.cudaGetErrorName(code)
            return name.decode()
    return ""
