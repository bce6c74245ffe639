"""What bursts of all texts say: each burst is drawn anew, and stock's own are the noise floor.

Where the scheduler cuts a burst depends on arrival times, and rounding follows the cuts: a burst
differs from the next of the same server. So a burst is the unit that a launch is elsewhere. Bursts
of all launches are compared pair by pair, A/A within an arm and A/B between the arms. A default
margin comes from stock's A/A alone, max(1e-4, 3 standard errors) and at most 1e-3 nats, so that a
fused arm that is noisier can't widen it.

Beside the means, a burst's results are held against the same text scored alone. One whose largest
difference is more than ``STRAY`` times what is usual among stock's is a **stray**, and named: a
mean over a text hides a few rows that are grossly wrong, and rows that a server gets wrong in both
arms are no matter of the route, but must be seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppl import verdict
from ppl.evidence import PplEvidence
from ppl.facts import Burst
from ppl.runs import Run
from ppl.stats import Tost
from ppl.store import Record, Store, Stored

STRAY = 5.0
"""Times the median of stock's largest differences, of the results that differ at all."""
SHOWN = 5
MOST_BURSTS = 1000


def judged(
    folders: Sequence[Path], alone: Stored, *, claim: verdict.Claim, margin: float | None
) -> Burst | None:
    """Compare the bursts in folders; None where none is stored.

    Parameters
    ----------
    alone : the run's own results: the same texts, one at a time.
    margin : in nats, as stated; by default from stock's bursts.

    """
    from ppl import judge

    found = judge.stored(folders)
    if not found:
        return None
    units = numbered(found)
    made = judge.judge(
        [r for _, r in units.values()],
        lambda r: units[r.key.text, r.run][0].values(r),
        claim=claim,
        margin=margin,
        amiss=_other_ids(found, alone),
        floor=("stock",),
    )
    launches = max(r.launch for _, r in found.values())
    each = max(r.repeat for _, r in found.values())
    test = made.statistics.exposed if made.statistics is not None else None
    noise = made.statistics.noise if made.statistics is not None else None
    error = made.statistics.between_launch_error_nats if made.statistics is not None else None
    strays = _strays(found, alone)
    finite = test is not None and test.texts > 1
    return Burst(
        word=made.verdict,
        reasons=(*made.decided.reasons, *_more(made, each), *strays),
        launches=launches,
        bursts=each,
        identical_texts=made.identity.identical_texts if made.identity else 0,
        texts=made.identity.texts if made.identity else 0,
        mean_nats=test.mean if test is not None else None,
        interval_nats=(test.low, test.high) if test is not None and finite else None,
        margin_nats=test.margin if test is not None else None,
        floor_nats=error[0] if error else None,
        within_nats=(min(noise.within), max(noise.within)) if noise else None,
        across_nats=(min(noise.across), max(noise.across)) if noise else None,
        strays=strays,
    )


def _other_ids(found: Stored, alone: Stored) -> list[str]:
    """Name texts whose ids in a burst aren't those of the same text alone."""
    ids = {r.key.text: r.key.ids_sha256 for _, r in alone.values()}
    names = {
        r.key.text: None
        for _, r in found.values()
        if ids.get(r.key.text, r.key.ids_sha256) != r.key.ids_sha256
    }
    return [f"text {name}: ids differ between a burst and the same text alone" for name in names]


def numbered(found: Stored) -> Stored:
    """Return results whose launch counts the bursts of an arm, over all its launches."""
    places = sorted({r.run for _, r in found.values()})
    number: dict[Run, int] = {}
    for run in places:
        number[run] = 1 + sum(other[0] == run[0] for other in number)
    made: Stored = {}
    for store, r in found.values():
        unit = r.model_copy(update={"launch": number[r.run], "repeat": 1})
        made[unit.key.text, unit.run] = (store, unit)
    return made


# -- how many more --------------------------------------------------------------------


def needed(test: Tost, error: float, bursts: int) -> int | None:
    """Return the bursts a launch at which noise alone would lie inside the margin; None: too many.

    Noise of the mean and of its interval shrinks with the root of their number, and so does the
    margin down to 1e-4 nats.
    """
    reach = max(abs(test.low), abs(test.high))
    for n in range(bursts, MOST_BURSTS):
        less = math.sqrt(bursts / n)
        if reach * less < verdict.default_margin(error * less):
            return n
    return None


def _more(made: PplEvidence, bursts: int) -> list[str]:
    """Say where nothing is decided how many bursts would, if all that is seen is noise."""
    s = made.statistics
    if made.verdict != "INCONCLUSIVE" or s is None or s.exposed.texts < 2:  # noqa: PLR2004 - no interval
        return []
    if s.between_launch_error_nats is None:
        return ["stock was scored in one burst: its noise is unknown; give --bursts at least 2"]
    error = s.between_launch_error_nats[0]
    n = needed(s.exposed, error, bursts)
    enough = f"about {n:,} a launch" if n else f"more than {MOST_BURSTS:,} a launch"
    own = f"stock's own bursts have a standard error of {error:.3g} nats"
    return [f"{own}; if all that is seen is noise, {enough} would tell (--bursts)"]


# -- strays ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Far:
    """The largest difference of one result of a burst from the same text alone."""

    record: Record
    row: int
    nats: float


def _strays(found: Stored, alone: Stored) -> tuple[str, ...]:
    far = [f for store, r in found.values() if (f := _far(store, r, alone)) is not None]
    usual = [abs(f.nats) for f in far if f.record.arm == "stock" and f.nats]
    bound = STRAY * statistics.median(usual) if usual else 0.0
    mine = sorted((f for f in far if abs(f.nats) > bound), key=lambda f: -abs(f.nats))
    said = [
        f"{f.record.arm} launch {f.record.launch} burst {f.record.repeat}, text "
        f"{f.record.key.text}: row {f.row:,} lies {f.nats:.3g} nats from the text scored alone, "
        + (f"usual in stock's bursts is {bound / STRAY:.2g}" if bound else "stock's bursts don't")
        for f in mine[:SHOWN]
    ]
    if len(mine) > SHOWN:
        said.append(f"and {len(mine) - SHOWN:,} more results of bursts that lie so far off")
    return tuple(said)


def _far(store: Store, record: Record, alone: Stored) -> _Far | None:
    place = (record.key.text, (record.arm, 1, 1))
    other = alone.get(place)
    if other is None or other[1].rows != record.rows:
        return None
    d = store.values(record).astype(np.float64) - other[0].values(other[1])
    row = int(np.abs(d).argmax())
    return _Far(record, row, float(d[row]))
