"""From folders of stored results to a verdict and its evidence, without a server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from equiv import environment
from equiv.document import counted
from ppl import between, compare, facts, of_run, order, stats, top1, validity, verdict
from ppl.compare import Compared
from ppl.errors import PplError
from ppl.evidence import PplEvidence, Statistics, Subject, digest
from ppl.facts import RunFacts
from ppl.runs import Run
from ppl.store import Record, Store, Stored

ONE_IN_A_MILLION = 1e-6


def gather(folders: Sequence[Path]) -> Stored:
    """Return the results in folders.

    Raises
    ------
    PplError : a folder without results, a damaged record, or two of the same run.

    """
    found: Stored = {}
    for folder in folders:
        store = Store(folder)
        records = list(store.records())
        if not records:
            raise PplError(
                f"{folder} holds no stored results; give the --out of a bytegate ppl run"
            )
        for r in records:
            place = (r.key.text, r.run)
            if place in found:
                raise PplError(
                    f"text {r.key.text}, {r.arm} launch {r.launch} repeat {r.repeat} is stored in "
                    f"{found[place][0].folder} and in {folder}; give folders that don't overlap"
                )
            found[place] = (store, r)
    return found


def stored(folders: Sequence[Path]) -> Stored:
    """Return the results in folders, of which some or all may have none.

    Raises
    ------
    PplError : a damaged record, or two of the same run.

    """
    return gather([folder for folder in folders if any(Store(folder).records())])


def stated(
    folders: Sequence[Path], claim: verdict.Claim | None, margin: float | None
) -> tuple[verdict.Claim, float | None]:
    """Return claim and margin: as given, else as the first run among folders stated them."""
    runs = [run for folder in folders if (run := facts.read(folder)) is not None]
    if runs:
        claim = claim or runs[0].claim
        margin = runs[0].margin_nats if margin is None else margin
    return claim or "identical", margin


def compare_stored(
    folders: Sequence[Path],
    *,
    claim: verdict.Claim = "identical",
    margin: float | None = None,
    partial: bool = False,
) -> PplEvidence:
    """Compare what is stored in folders.

    Parameters
    ----------
    folders : one or more; together they hold both arms.
    claim : stated before looking.
    margin : in nats; ``verdict.default_margin`` where it is None.
    partial : also judge folders without results, as a run's own is where something was amiss.

    Raises
    ------
    PplError : what is stored can't be read, or the margin isn't positive.

    """
    if margin is not None:
        verdict.check_margin(margin)
    known = {folder: facts.read(folder) for folder in folders}
    runs = [run for run in known.values() if run is not None]
    held = [f for f in folders if any(Store(f).records()) or not (partial or known[f] is not None)]
    found = gather(held)
    records = [r for _, r in found.values()]
    lost, untold = _without_facts(found, known)
    made = judge(
        records,
        lambda r: found[r.key.text, r.run][0].values(r),
        claim=claim,
        margin=margin,
        amiss=[
            *lost,
            *(
                x
                for folder, run in known.items()
                if run is not None
                for x in run.reasons() or _unfinished(run, records, folder / "burst")
            ),
        ],
    )
    agreements = top1.agreements(made, found)
    decided = top1.decided(made.decided, agreements)
    made = made.model_copy(
        update={
            "verdict": decided.word,
            "exit_code": decided.exit_code,
            "decided": decided,
            "top1": agreements,
            "not_covered": [*untold, *made.not_covered],
            "suite": environment.suite(),
        }
    )
    bursts = [folder / "burst" for folder in folders if (folder / "burst").is_dir()]
    if not runs:
        return made
    used: set[Run] = {(r.arm, r.launch, int(str(r.response.get("instance", 1)))) for r in records}
    return of_run.complete(made, runs, bursts, claim=claim, margin=margin, used=used, alone=found)


def _without_facts(
    found: Stored, known: dict[Path, RunFacts | None]
) -> tuple[list[str], list[str]]:
    """Say of how many results nothing tells what else was asked for: amiss, and not covered.

    What a run stores names the server process that it is from; such a result without the facts of
    its run was parted from them. Results that others stored never had any.
    """
    alone = [r for store, r in found.values() if known[store.folder] is None]
    parted = sum("instance" in r.response for r in alone)
    why = f"without a {facts.NAME}: what else was asked for, failed or is missing is unknown"
    return (
        [f"{counted(parted, 'result')} of a run {why}"] if parted else [],
        [f"whether the results are whole: {len(alone) - parted} of {len(found)} are {why}"]
        if len(alone) > parted
        else [],
    )


def _unfinished(run: RunFacts, records: Sequence[Record], bursts: Path) -> list[str]:
    """Say what a run that was stopped hasn't scored: what is stored is not all that was asked."""
    lacking, together = order.missing(run, _steps(records), _steps(Store(bursts).records()))
    return [
        f"the run isn't finished: {len(steps)} results{where} are missing, first text {text}, "
        f"{arm} launch {launch} {what} {number}: run it again"
        for steps, where, what in ((lacking, "", "repeat"), (together, " in bursts", "burst"))
        for text, arm, launch, number in steps[:1]
    ]


def _steps(records: Iterable[Record]) -> set[order.Step]:
    return {(r.key.text, r.arm, r.launch, r.repeat) for r in records}


def judge(
    records: Sequence[Record],
    load: compare.Load,
    *,
    claim: verdict.Claim,
    margin: float | None,
    amiss: Sequence[str] = (),
    floor: Sequence[facts.Arm] = facts.ARMS,
) -> PplEvidence:
    """Compare results wherever they are held.

    Parameters
    ----------
    load : returns the array of a record.
    amiss : what is known beside the results and makes them invalid.
    floor : arms whose spread between launches sets a default margin, and what launches explain.

    """
    # Without results because something was amiss: that is the reason, and not their lack.
    wrong = list(validity.amiss(records)) if records or not amiss else []
    invalid = [*amiss, *wrong]
    done: list[Compared] = []
    if records and not wrong:
        for text, mine in validity.by_text(records).items():
            made = compare.compare_text(mine, load)
            invalid += [
                f"text {text}: {arm} launch {launch} repeat {repeat} {how}"
                for (arm, launch, repeat), how in made.misplaced.items()
            ]
            done.append(made)
    runs = sorted({r.run for r in records}, key=lambda r: (r[0] != "stock", *r[1:]))
    statistics = _statistics(done, runs, margin, floor) if done else None
    decided = verdict.decide(
        claim=claim,
        invalid=tuple(invalid),
        identical=bool(done) and not any(c.unequal for c in done),
        test=statistics.exposed if statistics else None,
        noise=statistics.noise if statistics else None,
        launches=statistics.between_launch_error_nats if statistics else None,
        apart=_apart(done),
        # Two bursts of one server differ by where they were cut, or happen not to.
        lone=compare.unlike_stock(done) if set(floor) == set(facts.ARMS) else "",
    )
    results = [c.result for c in done]
    return PplEvidence(
        verdict=decided.word,
        exit_code=decided.exit_code,
        decided=decided,
        claim=claim,
        margin_nats=statistics.exposed.margin if statistics else margin,
        margin_stated=margin is not None,
        runs=runs,
        identity=compare.identity(results) if results else None,
        pooled_perplexity=_pooled(done),
        statistics=statistics,
        texts=results,
        not_covered=validity.not_covered(records),
        warnings=_warnings(records, done),
        inputs_sha256=digest([r.array_sha256 for r in records]),
        subject=_subject(records),
    )


def _apart(done: Sequence[Compared]) -> str:
    """Say how many exposed tokens differ between the first run of each arm, and by how much."""
    exposed = [c.result.exposed for c in done]
    differing, tokens = sum(x.differing for x in exposed), sum(x.tokens for x in exposed)
    places = [c.result.largest.d_nats for c in done if c.result.largest is not None]
    largest = max((abs(d) for d in places), default=0.0)
    if not differing:
        return ""
    return f"{differing:,} of {tokens:,} exposed tokens differ, by up to {largest:.3g} nats"


def _subject(records: Sequence[Record]) -> Subject | None:
    """Return what was compared: of the first record, since others must agree with it."""
    if not records:
        return None
    key = records[0].key
    routes: dict[str, set[str]] = {}
    for r in records:
        routes.setdefault(r.arm, set()).add(r.key.route)
    return Subject(
        model=key.model,
        arguments=key.arguments,
        versions=key.versions,
        routes={arm: sorted(routes[arm]) for arm in sorted(routes, reverse=True)},
    )


def _warnings(records: Sequence[Record], done: Sequence[Compared]) -> list[str]:
    warnings = []
    if not any(r.launch > 1 for r in records):
        warnings.append("no server was launched again: there is no noise floor")
    touched = {c.result.text: c.result.unexposed.differing for c in done}
    if any(touched.values()):
        names = ", ".join(name for name, n in touched.items() if n)
        warnings.append(
            f"{sum(touched.values()):,} unexposed tokens differ between the arms, which the route "
            f"can't touch: {names}"
        )
    return warnings


def _pooled(done: Sequence[Compared]) -> dict[str, float]:
    rows = sum(c.result.rows for c in done)
    if not rows:
        return {}
    return {
        "stock": math.exp(math.fsum(c.result.stock_nll_nats * c.result.rows for c in done) / rows),
        "fused": math.exp(math.fsum(c.result.fused_nll_nats * c.result.rows for c in done) / rows),
    }


def _launches(runs: Sequence[Run]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((arm, launch) for arm, launch, _ in runs))


def _statistics(
    done: Sequence[Compared],
    runs: Sequence[Run],
    margin: float | None,
    floor: Sequence[facts.Arm],
) -> Statistics:
    means = [compare.difference(c.means)[0] for c in done]
    launches = _launches(runs)
    levels = [compare.by_launch(c.means) for c in done]
    whole = {k: math.fsum(x[k] for x in levels) / len(levels) for k in launches}
    error = stats.launch_error(
        [[whole[k] for k in launches if k[0] == arm] for arm in facts.ARMS],
        [arm in floor for arm in facts.ARMS],
    )
    chosen = verdict.default_margin(error[0] if error else None) if margin is None else margin
    arms = _arms(levels, launches)
    exposed = stats.tost(means, chosen, between.between(arms))
    contrast = None
    zero = {"exposed": stats.sign_flip(means)}
    if all(c.result.unexposed.tokens for c in done):
        controls = [compare.by_launch(c.controls) for c in done]
        apart = [m - compare.difference(c.controls)[0] for m, c in zip(means, done, strict=True)]
        both = zip(arms, _arms(controls, launches), strict=True)
        contrast = stats.tost(apart, chosen, between.between([x - y for x, y in both]))
        zero["contrast"] = stats.sign_flip(apart)
    left = stats.leave_one_out(means, chosen, arms)
    equal = not any(c.unequal for c in done)
    return Statistics(
        exposed=exposed,
        margin_percent=100 * math.expm1(chosen),
        contrast=contrast,
        p_zero=zero["exposed"],
        p_zero_holm=dict(zip(zero, stats.holm(list(zero.values())), strict=True)),
        bootstrap_95=stats.bootstrap(means),
        detectable_nats=stats.detectable_shift(means, exposed.launches),
        leave_one_out={
            c.result.text: (t.mean, t.low, t.high) for c, t in zip(done, left, strict=False)
        },
        noise=stats.noise(_launch_distances(done, launches), [a == "fused" for a, _ in launches]),
        between_launch_error_nats=error,
        token_rate_bound=stats.rate_bound(sum(c.result.exposed.tokens for c in done))
        if equal
        else None,
        text_rate_bound=stats.rate_bound(len(done)) if equal else None,
        tokens_to_see_one_in_a_million=stats.draws_to_see(ONE_IN_A_MILLION),
    )


def _arms(
    levels: Sequence[dict[tuple[str, int], float]], launches: Sequence[tuple[str, int]]
) -> list[stats.ArrayF8]:
    """Return each arm's levels, ``[launches, texts]``."""
    return [
        np.asarray([[x[k] for x in levels] for k in launches if k[0] == arm]) for arm in facts.ARMS
    ]


def _launch_distances(
    done: Sequence[Compared], launches: Sequence[tuple[str, int]]
) -> stats.ArrayF8:
    """Average the distances between runs over texts, and over the runs of two launches."""
    n = len(launches)
    sums, counts = np.zeros((n, n)), np.zeros((n, n))
    place = {k: i for i, k in enumerate(launches)}
    for c in done:
        for pair, distance in c.distances.items():
            (i, j) = sorted(place[run[:2]] for run in pair)
            sums[i, j] += distance
            counts[i, j] += 1
    upper = np.divide(sums, counts, out=np.zeros((n, n)), where=counts > 0)
    return np.asarray(np.triu(upper, 1) + np.triu(upper, 1).T)
