"""What a run has so far: written when it begins, and whenever a lane ends or finds something.

So a run that is killed leaves its finished lanes, and never the PASS of an earlier run. Whatever
isn't finished is a lane that is not covered, by name: such evidence can't pass.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from equiv import evidence
from equiv.files import write_whole
from equiv.ledger import Seen

UNFINISHED = "not finished when this was written: its run went on then, or was killed"

Found = Mapping[str, tuple[evidence.Candidate, Mapping[str, Seen]]]
"""What there is of each candidate, by its name: its evidence, and the ledger entries met."""

Keep = Callable[[evidence.Candidate, Mapping[str, Seen]], None]
"""Takes what there is of one candidate so far."""


def forget(candidate: evidence.Candidate, seen: Mapping[str, Seen]) -> None:
    """Keep nothing of a campaign that goes on."""
    del candidate, seen


def lane(name: str, why: str) -> evidence.Lane:
    """Return the evidence of a lane that wasn't begun, or of which nothing is known yet."""
    return evidence.Lane(
        lane=name,
        state="not covered",
        cases=0,
        enumerated=0,
        drawn=0,
        equal=0,
        refused=0,
        declared=0,
        undefined=0,
        oracle_checked=0,
        guarded=0,
        bytes_compared=0,
        seconds=0.0,
        kinds={},
        least={},
        ranges={},
        median_rows=0,
        layouts_differ={},
        missing=[why],
        left_out=[],
        bound=None,
        findings=[],
        samples=[],
    )


def candidate(name: str, lanes: Sequence[str], why: str) -> evidence.Candidate:
    """Return the evidence of a candidate of which no lane is known yet."""
    left = [lane(x, why) for x in lanes]
    return evidence.Candidate(name, "not covered", why, "", {}, left, [], 0, 0)


class Earlier:
    """An earlier run's files, gone from their folder before anything is written in their place.

    So none of them stays where a run is killed while it loads, or finds the disk full.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        paths = [folder / name for name in names]
        self._files = {p: p.read_bytes() for p in paths if p.is_file()}
        self._paths = paths
        for path in self._files:
            path.unlink()

    def put_back(self) -> None:
        """Put them back, for a run that turned out to be bad usage before anything ran."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        for path, data in self._files.items():
            write_whole(path, data)


class SoFar:
    """What a run has of its candidates; campaigns in several threads may add to it.

    Parameters
    ----------
    names, lanes : of the candidates that were asked for.
    save : writes what there is; is never called twice at once.

    Attributes
    ----------
    began : whether a candidate was loaded.

    """

    def __init__(
        self, names: Sequence[str], lanes: Sequence[str], save: Callable[[Found], None]
    ) -> None:
        self._found: dict[str, tuple[evidence.Candidate, Mapping[str, Seen]]] = {
            name: (candidate(name, lanes, UNFINISHED), {}) for name in names
        }
        self._save = save
        self._lock = threading.Lock()
        self.began = False

    def keep(self, made: evidence.Candidate, seen: Mapping[str, Seen]) -> None:
        """Add what there is of one candidate, in place of what there was, and write it."""
        with self._lock:
            self.began = True
            self._found[made.name] = (made, copy.deepcopy(dict(seen)))
            self._save(self._found)

    def write(self) -> None:
        """Write what there is."""
        with self._lock:
            self._save(self._found)
