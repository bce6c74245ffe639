"""Results made up in memory: what the statistics are tried on, and timed with.

The noise that is drawn has the three levels that real servers show: of each token (Student's t with
3 degrees of freedom), of a launch on one text, and of a launch on all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppl.runs import Run
from ppl.store import Floats, Key, Observed, Record

RUNS: tuple[Run, ...] = (("stock", 1, 1), ("stock", 2, 1), ("fused", 1, 1), ("fused", 2, 1))
"""Each arm, and a relaunch of each."""
BUDGET = 100


@dataclass
class Results:
    """Records, and their arrays by text and run."""

    records: list[Record] = field(default_factory=list)
    arrays: dict[tuple[str, Run], Floats] = field(default_factory=dict)

    def add(self, text: str, run: Run, values: Floats, **facts: Any) -> None:
        """Add one result; facts of its key and its record replace those made up."""
        arm, launch, repeat = run
        known: dict[str, Any] = {
            "text": text,
            "ids_sha256": "0" * 64,
            "tokens": len(values) + 1,
            "model": "simulated",
            "arguments": (),
            "route": arm,
            "versions": {},
        }
        key = Key(**{name: facts.pop(name, value) for name, value in known.items()})
        rest: dict[str, Any] = {
            "exposed_from": BUDGET,
            "budget": BUDGET,
            "observed": Observed(route=arm),
        }
        record = Record.model_validate(
            {
                **rest,
                **facts,
                "key": key,
                "arm": arm,
                "launch": launch,
                "repeat": repeat,
                "rows": len(values),
                "array_sha256": "0" * 64,
            }
        )
        self.records.append(record)
        self.arrays[text, run] = values

    def load(self, record: Record) -> Floats:
        """Return the array of a record."""
        return self.arrays[record.key.text, record.run]


def base(seed: int, rows: int = 400) -> Floats:
    """Return log-probabilities such as a model gives, in nats."""
    drawn = np.random.default_rng(seed).exponential(2.0, rows)
    return -drawn.astype(np.float32)


def results(
    change: Callable[[int, Run, Floats], Floats],
    *,
    texts: int = 10,
    rows: int = 400,
    runs: Sequence[Run] = RUNS,
    **facts: Any,
) -> Results:
    """Make results of texts by changing a base: ``change(text, run, values)``."""
    made = Results()
    for text in range(texts):
        for run in runs:
            made.add(f"text{text}", run, change(text, run, base(text, rows)), **facts)
    return made


@dataclass(frozen=True)
class Noise:
    """Standard deviations in nats; ``shift`` is added to the exposed tokens of the fused arm."""

    token: float = 0.0
    launch_of_text: float = 0.0
    launch: float = 0.0
    shift: float = 0.0


def noisy(seed: int, noise: Noise, **facts: Any) -> Results:
    """Make results with drawn noise on the exposed tokens."""
    rng = np.random.default_rng(seed)
    shared = {run: rng.standard_normal() * noise.launch for run in RUNS}

    def change(_text: int, run: Run, values: Floats) -> Floats:
        exposed = len(values) - BUDGET
        level = shared[run] + rng.standard_normal() * noise.launch_of_text
        level += noise.shift * (run[0] == "fused")
        tokens = rng.standard_t(3, exposed) * (noise.token / np.sqrt(3))
        moved = values.astype(np.float64)
        moved[BUDGET:] += level + tokens
        return np.minimum(moved, 0.0).astype(np.float32)

    return results(change, **facts)
