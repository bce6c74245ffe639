"""The tail of a ``bytegate perf`` that measures serving as well, kept for the same command.

``tail.json`` is written whole as soon as the tail is measured. The same command takes it from
there; to another question the tail is measured again, and the command says so. What a question
depends on beside the command's words, ``here``, is that of serving's launches too (``ppl.kept``).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equiv import candidates, environment, evidence, seal
from equiv.errors import UsageError
from equiv.files import sha256
from equiv.perf import timing
from equiv.perf.record import Tail

_STRICT = {"extra": "forbid"}
NAME = "tail.json"
PASSING = re.compile(
    r"(CI|CUDA_MODULE_LOADING|VLLM_HOST_IP|VLLM_PORT|\w*VISIBLE_DEVICES)\Z|NVIDIA_"
)
"""Variables that a container, a host or torch itself sets anew, and that change no kernel."""


def here() -> dict[str, Any]:
    """Return what of this machine and installation a measurement depends on, by flat names.

    The device's name, versions as installed, hashes of bytegate's sources, and the variables that
    change kernels. CUDA isn't started for it, where the system names its GPUs.
    """
    found: dict[str, Any] = {"device": _device(), "version of python": platform.python_version()}
    for names in environment.DISTRIBUTIONS.values():
        for name in names:
            try:
                found[f"version of {name}"] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    variables = environment.flags().items()
    return (
        found
        | sources()
        | {f"variable {n}": value for n, value in variables if not PASSING.match(n)}
    )


def sources() -> dict[str, Any]:
    """Return hashes of bytegate's sources, by flat names."""
    found = environment.suite()["sources_sha256"]
    known = found.items() if isinstance(found, dict) else (("bytegate", found),)
    return {f"sources of {name}": digest for name, digest in known}


def _device() -> str:
    known = environment.machine()
    gpus = known["gpus"]
    if isinstance(gpus, list) and gpus:
        return ", ".join(sorted(set(gpus)))
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_properties(0).name)
    return str(known["cpu"])


def question(
    pair: str,
    names: Sequence[str],
    device: str,
    library: str | None,
    only: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    """Return all that a tail's times depend on; parameters as of ``tail.run``."""
    own = {f"source of {n}": candidates.source_sha256(n) for n in names if candidates.is_own(n)}
    found = {
        "pair": pair,
        "candidates": list(names),
        "at": device,
        "library": sha256(Path(library)) if library and Path(library).is_file() else library,
        "sizes": {name: list(values) for name, values in only.items()},
        "repetitions": [timing.REPETITIONS, timing.SAMPLES],
    }
    made: dict[str, Any] = json.loads(json.dumps(found | own | here()))
    return made


@dataclass(frozen=True)
class KeptTail:
    """``tail.json``: a tail, the question that it answers, and what of it wasn't covered."""

    __pydantic_config__ = _STRICT
    asked: dict[str, Any]
    tail: Tail
    missing: list[str]
    schema: str = "bytegate.perf.tail"
    schema_version: int = evidence.SCHEMA_VERSION
    validated: bool = field(default=False)
    content_sha256: str = ""

    def contradictions(self) -> list[str]:
        """Say what can't be true together: nothing here."""
        return []


def put(folder: Path, asked: dict[str, Any], tail: Tail, missing: list[str]) -> None:
    """Store a tail, whole and sealed."""
    with writing(folder):
        evidence.write(folder / NAME, KeptTail(asked, tail, missing))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in one line that a folder can't be written, such as where the disk is full.

    Raises
    ------
    UsageError : for any ``OSError`` of the block.

    """
    try:
        yield
    except OSError as e:
        raise UsageError(f"can't write to {e.filename2 or folder}: {e.strerror or e}") from None


def take(
    folder: Path, asked: Mapping[str, Any], progress: Callable[[str], None]
) -> tuple[Tail, list[str]] | None:
    """Return the stored tail of the same question, and what wasn't covered; None where none is.

    Raises
    ------
    UsageError : the file is damaged.

    """
    path = folder / NAME
    if not path.exists():
        return None
    if importlib.util.find_spec("pydantic") is None:
        progress(f"the tail is measured again: reading {path} needs pydantic")
        return None
    made: KeptTail = evidence.read(path, KeptTail)
    if not made.content_sha256:
        raise UsageError(f"the evidence {path} is damaged: it has no {seal.FIELD}")
    differ = [n for n in sorted({*made.asked, *asked}) if made.asked.get(n) != asked.get(n)]
    if differ:
        progress(f"the tail is measured again: {path} answers another question ({differ[0]})")
        return None
    progress(f"the tail is stored in {path}, and not measured again")
    return made.tail, made.missing


def undigested(raw: Mapping[str, Any]) -> str:
    """Say how an object departs from its digest, which it must carry; empty where it doesn't."""
    return seal.broken(raw) if raw.get(seal.FIELD) else f"it has no {seal.FIELD}"
