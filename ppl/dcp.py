"""Decode context parallelism against tensor parallelism alone: one function, other roundings.

Two servers of one model and one set of vLLM's arguments, one with ``--decode-context-parallel-size
D`` and one with 1, score each text once. They compute the same function, so their log-probabilities
may differ by roundings alone, and ``ppl.rounding`` derives how far those carry: nothing is chosen.
A text is outside its tolerance where the root mean square or the largest of its differences is; the
comparison also where the mean over texts is. For a model that the reference network can't stand
for, tensor parallelism alone at half the budget tells how far other roundings carry. Only tokens
that both servers compute with a context behind them, by the loop, are judged; the others are the
control, and a tail that runs as decode is counted apart.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equiv import environment
from kvroute import serve
from ppl import inputs, options, preflight, rounding, scoring, sharing, transport, validity
from ppl.client import Scored
from ppl.dcp_evidence import DcpEvidence, TextFigures, figures
from ppl.errors import BadAnswer, PplError, Unreachable
from ppl.facts import ARMS, Arm, Instance
from ppl.inputs import Input
from ppl.options import Options, check, lengths, model_identity
from ppl.pace import Pace
from ppl.plan import Plan, Planned, plan, request
from ppl.scoring import Restarted
from ppl.servers import Attached, Launched, Server
from ppl.store import Floats

if TYPE_CHECKING:
    from ppl.model.network import Network
    from ppl.plan import Configuration

ALONE: Arm = "stock"
"""The arm of tensor parallelism alone, in the words of ``ppl.facts``; the other is sharded."""
NAMES: dict[Arm, str] = {"stock": "alone", "fused": "sharded"}
BUDGET = "--max-num-batched-tokens"
SHARDING = re.compile(
    r"(decode_context_parallel|cp_kv_cache_interleave|attention_block|hash_block)_size$|\.dcp_"
)
"""Settings in which the two servers are meant to differ."""


class Pair(Launched):
    """Two servers that differ in the decode context parallel size."""

    def serve_options(self, arm: Arm) -> serve.ServeOptions:
        """Return how an arm is served: alone on the stock route, sharded on the one asked for."""
        made = super().serve_options(arm)
        return dataclasses.replace(made, dcp=1) if arm == ALONE else made


@dataclass
class Found:
    """What a comparison has found so far.

    Attributes
    ----------
    scores : of each text, both arms' log-probabilities.
    amiss : what makes it invalid, by name.

    """

    scores: dict[str, dict[Arm, Floats]] = field(default_factory=dict)
    plans: dict[Arm, Plan] = field(default_factory=dict)
    amiss: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


Allowed = dict[str, Callable[[rounding.Mask], rounding.Tolerance]]
"""Each text's tolerance, as a function of the tokens that are judged."""


def run(asked: Options, pace: Pace, *, stands_for: str | None = None) -> DcpEvidence:
    """Score the texts on both servers, derive what roundings allow, and compare.

    Parameters
    ----------
    stands_for : the model's folder, where the servers are there already.

    Raises
    ------
    UsageError : options, texts, a model or servers that can't be used.

    """
    check(asked)
    if asked.dcp < 2 and not asked.attached:  # noqa: PLR2004 - one rank shares with nobody
        raise PplError(f"--dcp {asked.dcp}: expected at least 2, to be compared with 1")
    transport.no_retry_logs()
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise PplError(f"can't write to {asked.out}: {e.strerror}") from None
    documents, warnings = inputs.documents(asked, pace.say)
    model = asked.model or stands_for
    if model is None and not asked.attached:
        model = str(options.default_model())
    source: Attached | Pair = Attached(asked)
    if not asked.attached:
        assert model is not None
        source = Pair(asked, model, serve.detect_device())
        source.check()
        pace.say("starting a server of tensor parallelism alone, and a sharded one")
    servers = source.get(ARMS, lambda arm: Instance(arm=arm, launch=1, number=1, why="planned"))
    found = Found(not_covered=warnings)
    items: list[Input] = []
    try:
        items = _work(asked, model, source, servers, documents, found, pace)
    except Unreachable as e:
        found.amiss.append(str(e))
    finally:
        for server in servers.values():
            server.stop()
    whole = [i for i in items if len(found.scores.get(i.name, {})) == len(ARMS)]
    tolerances: Allowed = {}
    twins = rounding.TWINS
    if whole and not found.amiss:
        tolerances = _of_network(asked, model, whole, found, pace)
        if not tolerances and isinstance(source, Pair):
            tolerances, twins = _of_rechunking(asked, source, whole, found, pace), 2
    identity = model_identity(model) if model else str(found.facts.get("model", ""))
    return figures(
        [_text(i, found, tolerances.get(i.name)) for i in whole],
        amiss=found.amiss,
        not_covered=found.not_covered,
        twins=twins,
        facts={**found.facts, "model": identity, "environment": environment.collect("cpu", None)},
    )


# -- servers --------------------------------------------------------------------------


def _work(
    asked: Options,
    model: str | None,
    source: Attached | Pair,
    servers: Mapping[Arm, Server],
    documents: Sequence[Any],
    found: Found,
    pace: Pace,
) -> list[Input]:
    """Look at both servers, cut the texts, warm up, and score."""
    ups = [s.instance.up_s for s in servers.values() if s.instance.up_s is not None]
    if ups:
        pace.say(f"up after {max(ups):.0f} s")
    made = {a: _inspect(asked, source, s, NAMES[a], found) for a, s in servers.items()}
    _unlike(servers, found)
    if found.amiss:
        return []
    least, most = lengths(asked, max(c.budget for c in made.values()))
    endpoints = [(s.endpoint, s.checked.model) for s in servers.values() if s.checked is not None]
    folder = model if model and Path(model).is_dir() else None
    tokenize, name, wrong = inputs.tokenizer(endpoints, folder)
    found.amiss += wrong
    items = inputs.cut(documents, tokenize, least, most)
    found.plans = {a: plan({i.name: len(i.ids) for i in items}, c) for a, c in made.items()}
    found.not_covered += [f"{NAMES[a]}: {w}" for a, p in found.plans.items() for w in p.warnings]
    found.facts |= {"tokenizer": name, "texts": [i.facts.model_dump() for i in items]}
    for arm, server in servers.items():
        backwards = Input(items[0].facts, items[0].ids[::-1])
        planned = request("warm-up", len(backwards.ids), made[arm])
        _score(server, planned, backwards, "warm-up", found)
    pace.expect(len(items) * len(ARMS), sum(len(i.ids) for i in items) * len(ARMS), 0)
    for n, item in enumerate(items):
        for arm in ARMS if n % 2 == 0 else ARMS[::-1]:
            planned = next(p for p in found.plans[arm].requests if p.text == item.name)
            done = _score(servers[arm], planned, item, f"text {item.name}", found)
            if done is not None:
                found.scores.setdefault(item.name, {})[arm] = done.values
                pace.scored(f"{item.name}, {NAMES[arm]}", len(item.ids), done.wall_s)
    return items


def _inspect(
    asked: Options, source: Attached | Pair, server: Server, who: str, found: Found
) -> Configuration:
    """Look at one server, and return what its plan is made from."""
    arm = server.arm
    stated = options.stated(asked.arguments) if asked.attached else {}
    stated.pop("decode_context_parallel_size", None)
    wanted = "untouched" if arm == ALONE else asked.route
    server.checked = preflight.check(
        arm,
        server.endpoint,
        launched=not asked.attached,
        wanted=wanted,
        stated=stated,
        share_gpu=asked.share_gpu,
    )
    server.snapshot = server.checked.snapshot
    facts = server.checked.facts
    for mine, told in (
        (found.amiss, server.checked.amiss),
        (found.not_covered, server.checked.not_covered),
    ):
        mine += [re.sub(f"^((?:decode under DCP on )?){arm}: ", rf"\g<1>{who}: ", x) for x in told]
    if arm == ALONE:
        found.not_covered.append(
            f"{who}: loop calls and context chunks, which nothing counts there"
        )
    made = preflight.configuration(
        facts, source.workspace if isinstance(source, Pair) else asked.workspace
    )
    if (made.ranks > 1) == (arm == ALONE):
        found.amiss.append(f"{who}: its decode context parallel size is {made.ranks}")
    found.facts[who] = {
        "settings": facts.settings,
        "facts": facts.facts,
        "versions": facts.versions,
        "environment": facts.environment,
        "route": facts.route,
        "configuration": made.model_dump(),
        "up_s": server.instance.up_s,
    }
    found.facts.setdefault("model", facts.model)
    return made


def _unlike(servers: Mapping[Arm, Server], found: Found) -> None:
    """Note in what the servers differ beside the sharding, and what vLLM may derive from it."""
    one, other = (s.checked for s in servers.values())
    assert one is not None
    assert other is not None
    unlike = [x for x in preflight.unlike(one, other) if not SHARDING.search(x[0])]
    matter = {*preflight.SETTINGS, *preflight.SETTINGS.values()}
    wrong = [f"{n} ({x} and {y})" for n, x, y in unlike if n in matter]
    if wrong:
        found.amiss.append(f"the servers' configurations differ: {', '.join(wrong[:5])}")
    found.amiss += sharing.between(one.facts, other.facts, NAMES.values())
    rest = [f"{n} ({x} and {y})" for n, x, y in unlike if n not in matter]
    if rest:
        found.not_covered.append(f"whether it is for the sharding that these differ: {rest}")


def _score(server: Server, planned: Planned, item: Input, what: str, found: Found) -> Scored | None:
    """Score a text once; what is amiss with it is noted, and None returned where it has none."""
    assert server.checked is not None
    who = NAMES[server.arm]
    try:
        done = scoring.measure(server, planned, item, "prompt_logprobs")
    except (BadAnswer, Restarted) as e:
        found.amiss.append(f"{what}, {who}: {e}")
        return None
    seen = done.observed
    if server.arm == ALONE:
        seen = seen.model_copy(update={"counters": None, "planned": None})
    wrong = validity.deviations(
        seen,
        route=server.checked.facts.route or "",
        tokens=len(item.ids),
        budget=planned.steps[0].tokens,
    )
    found.amiss += [f"{what}, {who}: {x}" for x in wrong]
    return done.scored


# -- what roundings allow -------------------------------------------------------------


def _of_network(
    asked: Options, model: str | None, items: Sequence[Input], found: Found, pace: Pace
) -> Allowed:
    """Derive tolerances from twins of the reference network; nothing for another architecture."""
    from ppl.model import network

    try:
        if model is None:
            raise PplError("name the folder of the model that the servers have: --model")
        mine = rounding.covered(network.load(Path(model), device=serve.detect_device()))
    except PplError as e:
        found.not_covered.append(f"tolerances from twins of ppl.model.network: {e}")
        return {}
    found.facts["tolerance"] = f"{rounding.TWINS} twins of ppl.model.network"
    made: Allowed = {}
    for item in items:
        twins = rounding.twins(mine, item.ids, ranks=asked.tp)
        made[item.name] = partial(rounding.tolerance, twins)
        found.amiss += _reference(mine, item, twins, found)
        pace.say(f"{item.name}: {rounding.TWINS} twins with random roundings")
    return made


def _reference(mine: Network, item: Input, twins: Floats, found: Found) -> list[str]:
    """Hold tensor parallelism alone against the network without roundings, which stands for it."""
    exact = rounding.log_probs(mine, item.ids, lambda x: x)
    away = rounding.rms(found.scores[item.name][ALONE].astype(np.float64) - exact)
    allowed = rounding.tolerance(twins, np.ones(len(exact), dtype=np.bool_)).rms
    found.facts.setdefault("from_reference_rms_nats", {})[item.name] = [away, allowed]
    why = (
        f"text {item.name}: tensor parallelism alone lies {away:.3g} nats from the reference "
        f"network, roundings allow {allowed:.3g}: it doesn't compute this model"
    )
    return [] if away <= allowed else [why]


def _of_rechunking(
    asked: Options, source: Pair, items: Sequence[Input], found: Found, pace: Pace
) -> Allowed:
    """Measure tolerances: how far tensor parallelism alone moves where it takes half the budget."""
    budget = found.plans[ALONE].configuration.budget
    again = dataclasses.replace(
        asked,
        arguments=with_budget(source.arguments, budget // 2),
        workspace=source.workspace,
    )
    other = Pair(again, source.model, source.device)
    who = f"alone, {budget // 2:,} tokens a step"
    pace.say(f"another architecture: starting a server {who}")
    server = other.get((ALONE,), lambda arm: Instance(arm=arm, launch=1, number=2, why=who))[ALONE]
    made: Allowed = {}
    try:
        configuration = _inspect(again, other, server, who, found)
        for item in items:
            planned = request(item.name, len(item.ids), configuration)
            done = _score(server, planned, item, f"text {item.name}", found)
            if done is None:
                return {}
            pace.scored(f"{item.name}, {who}", len(item.ids), done.wall_s)
            apart = done.values.astype(np.float64) - found.scores[item.name][ALONE]
            made[item.name] = partial(rounding.of_rechunking, apart)
    except Unreachable as e:
        found.amiss.append(str(e))
        return {}
    finally:
        server.stop()
    found.facts["tolerance"] = f"tensor parallelism alone at {budget // 2:,} tokens a step"
    return made


def with_budget(arguments: Sequence[str], tokens: int) -> tuple[str, ...]:
    """Return vLLM's arguments with another ``--max-num-batched-tokens``."""
    kept = [
        word
        for n, word in enumerate(arguments)
        if word.partition("=")[0] != BUDGET and (n == 0 or arguments[n - 1] != BUDGET)
    ]
    return (*kept, BUDGET, str(tokens))


def _text(
    item: Input, found: Found, allowed: Callable[[rounding.Mask], rounding.Tolerance] | None
) -> TextFigures:
    """Set one text's two scores side by side."""
    plans = [next(p for p in found.plans[a].requests if p.text == item.name) for a in ARMS]
    loop = np.ones(len(item.ids) - 1, dtype=np.bool_)
    behind = np.zeros_like(loop)
    for planned in plans:
        mine = np.zeros_like(loop)
        for step in planned.steps:
            rows = slice(step.context, step.context + step.tokens)
            behind[rows] |= step.context > 0
            mine[rows] = bool(step.context_chunks)
        loop &= mine
    scores = found.scores[item.name]
    d = scores["fused"].astype(np.float64) - scores["stock"]
    bits = scores["fused"].view(np.uint32) != scores["stock"].view(np.uint32)
    return TextFigures.of(
        item.name,
        d,
        loop=loop,
        behind=behind,
        differing=bits,
        merged_from=plans[1].merged_from,
        allowed=allowed(loop) if allowed is not None and loop.any() else None,
    )
