"""The lane ``gloo``: real ranks on the CPU, each a process, against the served ones."""

from __future__ import annotations

from equiv import evidence
from equiv.loop import campaign, harmless, ranks
from equiv.loop.campaign import Options
from equiv.loop.rank import Backend

CASES = {
    "dev": {2: 12, 3: 12, 4: 12},
    "gate": {2: 60, 3: 60, 4: 60, 8: 12},
    "nightly": {2: 600, 3: 600, 4: 600, 8: 100},
}
"""Cases of each size of group, by profile: eight processes mostly wait for their cores."""
BACKEND = Backend("gloo", "gloo")


def lane(
    options: Options, progress: campaign.Progress = campaign.silent
) -> tuple[evidence.Lane, float]:
    """Run the lane ``gloo``: cases of the ragged lane on real ranks."""
    counts = CASES[options.profile.name]
    least = {f"D={size}": min(count, 8) for size, count in counts.items()}
    plan = ranks.RanksPlan(
        cases={size: harmless.draw(options, n, ranks=(size,)) for size, n in counts.items()},
        drawn=counts,
        least=least | {"continuation": 3, "no context": 3},
        left_out=[] if 8 in counts else ["D = 8 on real ranks (profile gate)"],  # noqa: PLR2004
    )
    return ranks.run_lane(BACKEND, options, plan, progress)
