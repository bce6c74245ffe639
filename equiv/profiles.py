"""The three profiles: how much of the domain a run draws, and hypothesis's settings for it.

They are registered with hypothesis under names of their own and chosen explicitly: where the
variable ``CI`` is set, hypothesis would load a profile that neither explores nor remembers.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from equiv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Profile:
    """How much to run.

    Attributes
    ----------
    draws : cases that hypothesis draws, by lane.
    lane_seconds : after so many a lane stops drawing; what it then lacks is NOT COVERED.
    max_rows : of enumerated cases; larger ones are left to a larger profile or a GPU.
    largest_rows : of the one production shape above ``max_rows`` that runs all the same.
    drawn_rows : of drawn cases.
    sweep_seeds : exhaustive pattern sweeps, each with other neighbours.
    lattice : whether alignment runs every combination of two operands' offsets.
    dense_sizes : whether outputs past 2^31 elements are written in full.
    shrink_seconds : spent on one finding at the most.

    """

    name: str
    draws: Mapping[str, int]
    lane_seconds: float
    max_rows: int
    largest_rows: int
    drawn_rows: int
    sweep_seeds: int
    lattice: bool
    dense_sizes: bool
    shrink_seconds: float


PROFILES = {
    p.name: p
    for p in (
        Profile(
            "dev",
            {"shapes": 400, "strides": 400, "modes": 60},
            lane_seconds=8.0,
            max_rows=36_000,
            largest_rows=0,
            drawn_rows=36_000,
            sweep_seeds=1,
            lattice=False,
            dense_sizes=False,
            shrink_seconds=15.0,
        ),
        Profile(
            "gate",
            {"shapes": 3_000, "strides": 3_000, "modes": 500},
            lane_seconds=30.0,
            max_rows=140_000,
            largest_rows=800_000,
            drawn_rows=68_000,
            sweep_seeds=2,
            lattice=True,
            dense_sizes=False,
            shrink_seconds=30.0,
        ),
        Profile(
            "nightly",
            {"shapes": 40_000, "strides": 40_000, "modes": 6_000},
            lane_seconds=900.0,
            max_rows=1_600_000,
            largest_rows=8_500_000,
            drawn_rows=800_000,
            sweep_seeds=8,
            lattice=True,
            dense_sizes=True,
            shrink_seconds=120.0,
        ),
    )
}

DATABASE = Path(".bytegate") / "examples"
"""Where hypothesis keeps the examples that failed, below the working folder."""


def default_name() -> str:
    """Return ``"gate"`` where ``CI`` is set, else ``"dev"``."""
    return "gate" if os.environ.get("CI") else "dev"


def profile_of(name: str) -> Profile:
    """Look a profile up.

    Raises
    ------
    UsageError : unknown.

    """
    if name not in PROFILES:
        msg = f"unknown profile {name!r}: expected one of {', '.join(PROFILES)}"
        raise UsageError(msg)
    return PROFILES[name]


def examples() -> DirectoryBasedExampleDatabase:
    """Return hypothesis's database of examples, in which cases that failed are kept, as lines.

    They are saved by us: ``hypothesis.find`` with a seed leaves the database alone.
    """
    return DirectoryBasedExampleDatabase(DATABASE)


def register() -> None:
    """Register the profiles with hypothesis as ``bytegate-dev`` and so on."""
    for p in PROFILES.values():
        settings.register_profile(
            f"bytegate-{p.name}",
            max_examples=max(p.draws.values()),
            deadline=None,
            derandomize=False,
            database=DirectoryBasedExampleDatabase(DATABASE),
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
            print_blob=False,
        )


def settings_of(profile: Profile, max_examples: int) -> settings:
    """Return hypothesis's settings for one lane of a profile."""
    register()
    return settings(settings.get_profile(f"bytegate-{profile.name}"), max_examples=max_examples)


def seed_of(profile: Profile, seed: int | None) -> int:
    """Return the seed of a run: the one given, else 0; a nightly explores anew every time."""
    if seed is not None:
        return seed
    return secrets.randbits(32) if profile.name == "nightly" else 0
