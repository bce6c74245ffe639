"""The ladder from a comparison to one word and an exit code."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from scipy import stats

from equiv.errors import ExitCode
from ppl.errors import PplError
from ppl.stats import Noise, Tost

Claim = Literal["identical", "equivalent"]
Word = Literal["INVALID", "IDENTICAL", "WITHIN_NOISE", "EQUIVALENT", "INCONCLUSIVE", "DIFFERENT"]

LEAST_MARGIN = 1e-4
"""Nats; 0.01 % of perplexity."""
NOISE_MARGINS = 3.0
"""Standard errors between launches that a default margin spans."""
MOST_MARGIN = 1e-3
"""A default margin grows with the servers' own noise, but no further than this."""
MOST_STATED = 100.0
"""Nats; perplexities that far apart aren't numbers any more."""
LAUNCH_LEVEL = 1e-4
"""Chance at which launches alone may look like a difference beyond the margin, two-sided.

Two launches an arm leave two degrees of freedom, so a difference must exceed the margin by 100 of
its standard errors between launches: short of that, launch the servers more often."""

APART = "launches of one route agree with each other, the routes don't"

_EXIT: dict[str, tuple[ExitCode, ExitCode]] = {
    "INVALID": (ExitCode.INVALID, ExitCode.INVALID),
    "IDENTICAL": (ExitCode.PASS, ExitCode.PASS),
    "WITHIN_NOISE": (ExitCode.PASS, ExitCode.PASS),
    "EQUIVALENT": (ExitCode.FAIL, ExitCode.PASS),
    "INCONCLUSIVE": (ExitCode.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
    "DIFFERENT": (ExitCode.FAIL, ExitCode.FAIL),
}


class Verdict(BaseModel):
    """One word, why, and the exit code under the claim that was stated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    word: Word
    claim: Claim
    exit_code: int
    reasons: tuple[str, ...]


def exit_code(word: Word, claim: Claim) -> int:
    """Return the exit code of a verdict under a claim."""
    return int(_EXIT[word][claim == "equivalent"])


def check_margin(margin: float) -> None:
    """Refuse a margin that bounds nothing.

    Raises
    ------
    PplError : not positive, or so large that no difference of log-probabilities exceeds it.

    """
    if not margin > 0:
        raise PplError(f"margin {margin}: expected a positive number of nats")
    if not margin <= MOST_STATED:
        raise PplError(f"margin {margin}: expected at most {MOST_STATED:g} nats")


def default_margin(between_launches: float | None) -> float:
    """Return the margin in nats: max(1e-4, 3 standard errors between launches), at most 1e-3."""
    return min(max(LEAST_MARGIN, NOISE_MARGINS * (between_launches or 0.0)), MOST_MARGIN)


def decide(
    *,
    claim: Claim,
    invalid: tuple[str, ...],
    identical: bool,
    test: Tost | None,
    noise: Noise | None,
    launches: tuple[float, int] | None,
    apart: str = "",
    lone: str = "",
) -> Verdict:
    """Go down the ladder.

    Parameters
    ----------
    claim : stated before the run.
    invalid : what was amiss; anything in it overrides the rest.
    identical : whether every scored token of every run is bit-equal.
    test : of the exposed text means; None where there are none.
    noise : A/B against between-launch A/A; None without a relaunch.
    launches : standard error between launches of the mean difference, and degrees of freedom.
    apart : how many tokens differ and by how much, in words; told where nothing is decided.
    lone : that the fused arm varies and stock doesn't, in words; then it isn't called noise.

    """

    def made(word: Word, *reasons: str) -> Verdict:
        return Verdict(word=word, claim=claim, exit_code=exit_code(word, claim), reasons=reasons)

    if invalid:
        return made("INVALID", *invalid)
    if test is None:
        return made("INVALID", "no exposed token was scored: there is nothing to decide on")
    if identical:
        return made("IDENTICAL", "every scored token of every run is bit-equal")
    word, *reasons = _by_interval(test, noise, launches, claim)
    if word == "WITHIN_NOISE" and lone:
        word = "EQUIVALENT" if claim == "equivalent" else "INCONCLUSIVE"
        reasons = [reasons[0], lone]
    if word in {"INCONCLUSIVE", "EQUIVALENT"} and apart:
        reasons.append(apart)
    return made(word, *reasons)


def _by_interval(
    test: Tost, noise: Noise | None, launches: tuple[float, int] | None, claim: Claim
) -> tuple[Word, *tuple[str, ...]]:
    if test.texts == 1:
        return (
            "INCONCLUSIVE",
            f"one text has no interval (mean {test.mean:.3g} nats): score more texts",
        )
    margin, middle, half = test.margin, abs(test.mean), test.half_of_texts
    if middle - half > margin:
        return _outside(test, launches)
    interval = f"the 90 % interval [{test.low:.3g}, {test.high:.3g}] nats"
    if not (-margin < test.low and test.high < margin):
        apart = noise is not None and noise.distinguishable
        crosses = f"{interval} crosses +-{margin:.3g}: {_more(test)}"
        return "INCONCLUSIVE", crosses, *((f"not identical: {APART}",) if apart else ())
    inside = f"{interval} lies inside +-{margin:.3g}"
    if noise is None:
        why = "neither noise nor identity can be claimed without a relaunch"
        if test.launches is None:  # then no level can be kept
            inside += ", of these launches alone: what a launch does to all texts isn't in it"
            why += ", nor equivalence"
        equivalent = claim == "equivalent" and test.launches is not None
        return ("EQUIVALENT" if equivalent else "INCONCLUSIVE"), inside, why
    if noise.distinguishable:
        return "EQUIVALENT", inside, APART
    return (
        "WITHIN_NOISE",
        inside,
        f"A/B isn't told apart from A/A between launches, p {noise.p:.2g}",
    )


def _more(test: Tost) -> str:
    """Say of what more is needed: launches where theirs is the greater error, else texts."""
    of_launches = test.half_of_launches
    if of_launches <= test.half_of_texts:
        return "score more texts"
    degrees = test.launches.degrees if test.launches is not None else 0
    return (
        f"launch both servers more often (launches alone are +-{of_launches:.2g} nats, {degrees} "
        f"degrees of freedom; texts alone +-{test.half_of_texts:.2g})"
    )


def _outside(test: Tost, launches: tuple[float, int] | None) -> tuple[Word, *tuple[str, ...]]:
    """Decide where the interval over texts lies outside: what launches explain is held apart."""
    half = test.half_of_texts
    low, high = test.mean - half, test.mean + half
    interval = f"the 90 % interval over texts [{low:.3g}, {high:.3g}] nats"
    why = f"{interval} lies outside +-{test.margin:.3g}"
    if launches is None:
        return "DIFFERENT", why, "no server was launched again: what launches do is unknown"
    beyond = abs(test.mean) - half - test.margin
    explained = float(stats.t.isf(LAUNCH_LEVEL / 2, launches[1])) * launches[0]
    if launches[0] > 0 and beyond <= explained:
        less = f"by less than launches alone can explain ({beyond:.3g} of {explained:.3g} nats)"
        return "INCONCLUSIVE", f"{why}, but {less}: launch both servers more often"
    return "DIFFERENT", why
