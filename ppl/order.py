"""In which order texts, arms and repeats are scored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ppl.facts import ARMS, Arm, RunFacts

Step = tuple[str, Arm, int, int]
"""Text, arm, launch, repeat."""


@dataclass(frozen=True)
class Phase:
    """Servers that are up together: the launch of each arm."""

    launches: dict[Arm, int]

    def steps(self, texts: Sequence[str], repeats: int) -> Iterator[Step]:
        """Yield the steps: ABBA and BAAB by turns, text by text.

        The first launch is scored ``repeats`` times, later ones once. Drift over time, and what a
        server does to its own next request, then falls on both arms alike.
        """
        for i, text in enumerate(texts):
            first, second = ARMS if i % 2 == 0 else ARMS[::-1]
            for repeat in range(1, repeats + 1):
                turn = (first, second) if repeat % 2 else (second, first)
                for arm in turn:
                    launch = self.launches.get(arm)
                    if launch is not None and repeat <= repeats_of(launch, repeats):
                        yield text, arm, launch, repeat


def repeats_of(launch: int, repeats: int) -> int:
    """Return how often a launch scores each text."""
    return repeats if launch == 1 else 1


def phases(launches: int, *, one_at_a_time: bool) -> list[Phase]:
    """Return the phases of servers that are launched: both arms, or ABBA one at a time."""
    if not one_at_a_time:
        return [Phase({"stock": n, "fused": n}) for n in range(1, launches + 1)]
    made = []
    for n in range(1, launches + 1):
        made += [Phase({arm: n}) for arm in (ARMS if n % 2 else ARMS[::-1])]
    return made


def missing(
    run: RunFacts, stored: Collection[Step], in_bursts: Collection[Step]
) -> tuple[list[Step], list[Step]]:
    """Return the steps of a run, and of its bursts, that are neither stored nor failed.

    Servers that are there are scored a launch at a time: of those a first launch is enough.
    """
    asked = run.asked
    if not all(isinstance(asked.get(name), int) for name in ("launches", "repeats")):
        return [], []
    launches = 1 if "stock" in asked else int(str(asked["launches"]))
    names = [t.text for t in run.texts]
    failed = {(f.text, f.arm, f.launch, f.repeat) for f in run.failures}
    alone = [
        step
        for phase in phases(launches, one_at_a_time=False)
        for step in phase.steps(names, int(str(asked["repeats"])))
        if step not in stored and step not in failed
    ]
    failed_bursts = {(f.arm, f.launch) for f in run.failures if not f.repeat}
    burst = asked.get("burst")
    bursts = int(burst) if isinstance(burst, int) else 0
    together = [
        (name, arm, launch, number)
        for name in names
        for launch in range(1, launches + 1)
        for arm in ARMS
        for number in range(1, bursts + 1)
        if (name, arm, launch, number) not in in_bursts and (arm, launch) not in failed_bursts
    ]
    return alone, together


def describe(*, attached: bool, one_at_a_time: bool, repeats: int) -> str:
    """Say the order in words, for the evidence."""
    where = "servers found at addresses" if attached else "launched side by side"
    if one_at_a_time:
        return f"launched one after the other, ABBA; {repeats} repeats in the first launch"
    return (
        f"{where}; text by text ABBA and BAAB by turns; {repeats} repeats in the first launch, "
        "one in each other; a warm-up request of each process is discarded"
    )
