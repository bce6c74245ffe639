"""What a run of the faults has done so far, on disk: a kill keeps it, and the next run goes on.

``faults.partial.json`` is written whole after each job and taken away when ``faults.json`` is
there. A later run takes from it what was made of the same things: sources, versions, variables,
machine, device, profile, seed and amounts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from equiv import environment, evidence, seal
from equiv.loop.campaign import Options

SCHEMA = "bytegate.loop-faults-partial"
ALARMS = "false alarms"
"""The false-alarm run's name beside the faults' numbers."""


class Kept:
    """The results of finished jobs by name, in memory and on disk."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self._path = folder / "faults.partial.json"
        self._key: dict[str, Any] = json.loads(json.dumps(key, default=str))
        self._done: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            raw = seal.loads(self._path.read_text(encoding="utf-8"))
            if raw["schema"] == SCHEMA and raw["key"] == self._key and not seal.broken(raw):
                self._done = dict(raw["done"])
        self.before = tuple(self._done)
        """Names of the jobs that an earlier run did."""

    def __contains__(self, name: str) -> bool:
        """Whether a job is done."""
        return name in self._done

    def row(self, name: str) -> evidence.FaultRow:
        """Return a fault's row."""
        return evidence.FaultRow(**self._done[name])

    def alarms(self) -> dict[str, Any]:
        """Return what the false-alarm run found; empty where there was none."""
        return dict(self._done.get(ALARMS, {}))

    def add(self, name: str, result: Any) -> None:
        """Keep a job's result."""
        row = isinstance(result, evidence.FaultRow)
        self._done[name] = dataclasses.asdict(result) if row else result
        raw = {"schema": SCHEMA, "key": self._key, "done": self._done}
        evidence.write_text(self._path, seal.sealed(json.dumps(raw, allow_nan=False)))

    def forget(self) -> None:
        """Take the file away: its results are in the evidence."""
        self._path.unlink(missing_ok=True)


def key_of(options: Options, **amounts: int) -> dict[str, Any]:
    """Return what must be the same for a result to be used again; CUDA isn't started for it."""
    return {
        "device": options.device,
        "profile": dataclasses.asdict(options.profile),
        "seed": options.seed,
        "pack": options.name,
        "lanes": list(options.lanes),
        "amounts": amounts,
        "machine": environment.machine(),
        "versions": environment.versions(),
        "flags": environment.flags(),
        "sources": environment.suite()["sources_sha256"],
    }
