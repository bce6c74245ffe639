"""A run: servers, preflight, scores, and a verdict; killed at any moment, it goes on from there.

What is stored is the state: ``run.json`` says what was asked for and what was found, and a score
is stored once its request is done. A run that is started again asks for what is missing.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from equiv import environment
from ppl import burst, emulation, inputs, judge, order, top1, transport
from ppl import facts as facts_of
from ppl.client import Best, Method
from ppl.errors import Stale
from ppl.evidence import PplEvidence
from ppl.facts import Arm, Failure, Instance, RunFacts, Timing
from ppl.inputs import Input
from ppl.kept import alone
from ppl.options import Options, check, lengths, model_identity
from ppl.order import Phase, Step
from ppl.pace import Pace
from ppl.phase import Stop, Work
from ppl.plan import Configuration, Plan, Planned, plan
from ppl.preflight import Checked
from ppl.servers import Attached, Launched, Server, end_leftovers
from ppl.store import Floats, Key, Store


def run(options: Options, pace: Pace) -> PplEvidence:
    """Carry out a run, or what is left of it, and judge what is stored.

    Raises
    ------
    UsageError : options, texts or servers that can't be used; stored results of another run.

    """
    check(options)
    transport.no_retry_logs()
    with alone(options.out):
        session = Session(options, pace)
        try:
            session.work()
        finally:
            session.close()
    return judge.compare_stored(
        [options.out], claim=options.claim, margin=options.margin, partial=True
    )


class Session:
    """One start of a run, until its end or its death."""

    def __init__(self, options: Options, pace: Pace) -> None:
        self.options = options
        self.pace = pace
        self.store = Store(options.out)
        self.servers: dict[Arm, Server] = {}
        self.documents, left_out = inputs.documents(options, pace.say)
        self.left_out = [*emulation.warnings(asked=options.emulate_fp8), *left_out]
        self.model = options.model
        self.source = self._source()
        asked = self._asked()
        self.facts = self._continue(asked)
        gone = end_leftovers([i for i in self.facts.instances if not i.stopped])
        if gone:
            pace.say(f"ended {gone} processes of servers that a killed run had left")
        ended = [i.model_copy(update={"stopped": True}) for i in self.facts.instances if i.pid]
        others = [i for i in self.facts.instances if not i.pid]
        self.facts = self.facts.model_copy(update={"instances": [*ended, *others]})
        self.items: list[Input] = []
        self.planned: Plan | None = None
        self.checked: dict[Arm, Checked] = {}
        self.method: Method | None = None
        self.best = 0
        self.tokens = 0
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[Any] | None = None
        self.requests_s = self.wall_s = 0.0

    # -- what is asked for ------------------------------------------------------------

    def _source(self) -> Attached | Launched:
        if self.options.attached:
            return Attached(self.options)
        from kvroute.serve import detect_device
        from ppl.options import default_model

        self.model = self.model or str(default_model())
        source = Launched(self.options, self.model, detect_device())
        source.check()
        return source

    def _asked(self) -> dict[str, Any]:
        o = self.options
        asked: dict[str, Any] = {
            "texts": {d.id: d.sha256 for d in self.documents},
            "tokens": list(o.tokens) if o.tokens else None,
            "full": o.full,
            "repeats": o.repeats,
            "launches": o.launches,
            "burst": o.bursts if o.burst else 0,
            "route": o.route,
            "workspace": o.workspace,
            "arguments": list(o.arguments),
            **({"top1": True} if o.top1 else {}),  # runs of before it was an option go on
        }
        if o.emulate_fp8:
            asked["emulate_fp8_prefill"] = True
        if o.share_gpu:
            asked["share_gpu"] = True
        if isinstance(self.source, Attached):
            from texts.index import shown

            return asked | {"stock": shown(o.stock), "fused": shown(o.fused)}
        found = environment.versions()
        return asked | {
            "model": model_identity(str(self.model)),
            "arguments": list(self.source.arguments),
            "workspace": self.source.workspace,
            "tp": o.tp,
            "dcp": o.dcp,
            "one_at_a_time": o.one_at_a_time,
            "versions": {name: found.get(name) for name in ("python", "torch", "vllm")},
            "sources": _sources(),
        }

    def _continue(self, asked: dict[str, Any]) -> RunFacts:
        """Return the facts of the run that is to go on, or of a new one."""
        o = self.options
        known = facts_of.read(o.out)
        if known is None:
            if next(self.store.records(), None) is not None:
                raise Stale(
                    f"{o.out} holds results without a {facts_of.NAME}: they are of no run that can "
                    "go on; give --out another folder"
                )
            return RunFacts(
                asked=asked,
                command=o.command,
                claim=o.claim,
                margin_nats=o.margin,
                environment=environment.collect("cpu", None),
                order=order.describe(
                    attached=o.attached, one_at_a_time=o.one_at_a_time, repeats=o.repeats
                ),
                warnings=self.left_out,
            )
        unlike = facts_of.differences(known.asked, asked)
        if unlike:
            raise Stale(
                f"{o.out} holds another run: {'; '.join(unlike[:3])}; give --out another folder"
            )
        if (known.claim, known.margin_nats) != (o.claim, o.margin):
            raise Stale(
                f"the run in {o.out} stated the claim {known.claim} and the margin "
                f"{known.margin_nats} before it looked; for others see bytegate ppl compare"
            )
        return known

    # -- work -------------------------------------------------------------------------

    def work(self) -> None:
        """Score what is missing."""
        if self._nothing_left():
            self.pace.say("every result is stored: nothing is asked of a server")
            return
        self.facts = self.facts.model_copy(update={"amiss": []})
        self.save()
        try:
            if isinstance(self.source, Attached):
                self._attached(self.source)
            else:
                self._launched(self.source)
        except Stop as e:
            self.pace.say(str(e))
            self.note(amiss=[*self.facts.amiss, *e.reasons])

    def _nothing_left(self) -> bool:
        """Whether a launched run is complete: then no server has to be started to see it."""
        if isinstance(self.source, Attached) or self.facts.amiss or not self.facts.texts:
            return False
        return not any(self._missing(phase) for phase in self._phases())

    def done(self) -> set[Step]:
        """Return the steps whose results are stored, or which failed."""
        found: set[Step] = {(r.key.text, r.arm, r.launch, r.repeat) for r in self.store.records()}
        return found | {(f.text, f.arm, f.launch, f.repeat) for f in self.facts.failures}

    def _phases(self) -> list[Phase]:
        o = self.options
        return order.phases(o.launches, one_at_a_time=o.one_at_a_time)

    def _launched(self, source: Launched) -> None:
        for phase in self._phases():
            if self.facts.texts and not self._missing(phase):
                continue
            names = " and ".join(f"{a} launch {n}" for a, n in phase.launches.items())
            self.pace.say(f"starting {names}")
            made = {arm: self.instance(arm, launch) for arm, launch in phase.launches.items()}
            self.servers = source.get(tuple(made), made.__getitem__)
            for server in self.servers.values():
                self.add_instance(server.instance)
            up = max(s.instance.up_s or 0.0 for s in self.servers.values())
            self.pace.say(f"up after {up:.0f} s")
            self._phase(phase)
            self.stop_servers()

    def _attached(self, source: Attached) -> None:
        self.servers = source.get(
            facts_of.ARMS, lambda arm: Instance(arm=arm, launch=1, number=1, why="attached")
        )
        self._phase(Phase({}))

    def _phase(self, phase: Phase) -> None:
        work = Work(self, phase)
        began = time.monotonic()
        work.prepare()
        self._expect([work.phase] if self.options.attached else self._phases())
        try:
            work.score()
        finally:
            self.wall_s += time.monotonic() - began

    def _missing(self, phase: Phase) -> list[Step]:
        names = [t.text for t in self.facts.texts]
        done = self.done()
        steps = [s for s in phase.steps(names, self.options.repeats) if s not in done]
        if not steps and self.options.burst:
            have = {(r.key.text, *r.run) for r in Store(self.options.out / burst.FOLDER).records()}
            failed = {(f.arm, f.launch) for f in self.facts.failures if not f.repeat}
            steps = [
                (n, arm, launch, number)
                for n in names
                for arm, launch in phase.launches.items()
                for number in range(1, self.options.bursts + 1)
                if (n, arm, launch, number) not in have and (arm, launch) not in failed
            ]
        return steps

    def _expect(self, phases: list[Phase]) -> None:
        """Tell the progress how much there is."""
        tokens = {t.text: t.tokens for t in self.facts.texts}
        steps = [s for p in phases for s in p.steps(list(tokens), self.options.repeats)]
        done = self.done()
        left = [s for s in steps if s not in done]
        self.pace.expect(len(steps), sum(tokens[s[0]] for s in left), len(steps) - len(left))

    # -- what a phase needs -----------------------------------------------------------

    def cut(self, configuration: Configuration) -> None:
        """Cut texts, once the servers tell what decides their length, and plan their requests."""
        least, most = lengths(self.options, configuration.budget)
        endpoints = [
            (s.endpoint, s.checked.model) for s in self.servers.values() if s.checked is not None
        ]
        folder = self.model if self.model and Path(self.model).is_dir() else None
        tokenize, name, amiss = inputs.tokenizer(endpoints, folder)
        if amiss:
            raise Stop("the servers' tokenizers disagree", amiss)
        self.items = inputs.cut(self.documents, tokenize, least, most)
        made = [i.facts for i in self.items]
        if self.facts.texts and made != self.facts.texts:
            unlike = [a.text for a, b in zip(made, self.facts.texts, strict=False) if a != b]
            raise Stale(
                f"the ids of {', '.join(unlike[:3]) or 'the texts'} aren't those of the run in "
                f"{self.options.out}: the tokenizer changed; give --out another folder"
            )
        self.planned = plan({i.name: len(i.ids) for i in self.items}, configuration)
        warnings = [*self.left_out, *self.planned.warnings]
        self.note(texts=made, tokenizer=name, warnings=warnings, configuration=configuration)

    def plan_of(self, name: str) -> Planned:
        """Return the plan of a text's request."""
        assert self.planned is not None
        return next(p for p in self.planned.requests if p.text == name)

    def key(self, server: Server, item: Input) -> Key:
        """Return what must be the same for a stored result to be used again."""
        assert server.checked is not None
        f = server.checked.facts
        settings = [f"{k}={v}" for k, v in sorted(f.settings.items())]
        model = self.facts.asked.get("model")
        return Key(
            text=item.name,
            ids_sha256=item.facts.ids_sha256,
            tokens=len(item.ids),
            model=str(model or f.model),
            arguments=(*settings, f"configuration={(f.settings_sha256 or 'unknown')[:16]}"),
            route=self.route(server.arm),
            versions=f.versions,
        )

    def route(self, arm: Arm) -> str:
        """Return the route that an arm is asked for."""
        return "stock" if arm == "stock" else self.options.route

    def instance(self, arm: Arm, launch: int) -> Instance:
        """Return the next process of an arm's launch."""
        before = [i for i in self.facts.instances if (i.arm, i.launch) == (arm, launch)]
        why = "planned" if not before else "the run was started again"
        return Instance(arm=arm, launch=launch, number=len(before) + 1, why=why)

    def add_instance(self, instance: Instance) -> None:
        """Note a process that will be scored on, before it is."""
        others = [
            i
            for i in self.facts.instances
            if (i.arm, i.launch, i.number) != (instance.arm, instance.launch, instance.number)
        ]
        self.note(instances=[*others, instance])

    def failed(self, step: Step, reason: str) -> None:
        """Note a request whose answer must not be scored."""
        text, arm, launch, repeat = step
        failure = Failure(text=text, arm=arm, launch=launch, repeat=repeat, reason=reason)
        self.note(failures=[*self.facts.failures, failure])
        self.pace.say(f"FAILED {text}, {arm} launch {launch} repeat {repeat}: {reason}")

    def note(self, **changes: Any) -> None:
        """Change facts, and write them."""
        self.facts = self.facts.model_copy(update=changes)
        self.save()

    def save(self) -> None:
        """Write ``run.json``."""
        facts_of.write(self.options.out, self.facts)

    def put(self, values: Floats, best: Best | None = None, **facts: Any) -> None:
        """Store a result while the next request runs: flushing to the disk takes its time."""
        self.flush()
        self._pending = self._writer.submit(self._store, values, best, facts)

    def _store(self, values: Floats, best: Best | None, facts: dict[str, Any]) -> None:
        """Store arg-maxes first: a record that names them has them, whenever this is killed."""
        if best is not None:
            named = {"top": top1.put(self.store, facts["key"].text, *best)}
            facts = {**facts, "response": {**facts["response"], **named}}
        self.store.put(values, **facts)

    def flush(self) -> None:
        """Wait until every result is stored."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def stop_servers(self) -> None:
        """Stop servers of our own and note that they are."""
        retries = dict(self.facts.retries)
        for server in self.servers.values():
            server.stop()
            for why, n in server.endpoint.retries.items():
                retries[why] = retries.get(why, 0) + n
        ours = {
            (s.arm, s.instance.launch, s.instance.number)
            for s in self.servers.values()
            if s.process is not None
        }
        instances = [
            i.model_copy(update={"stopped": True}) if (i.arm, i.launch, i.number) in ours else i
            for i in self.facts.instances
        ]
        self.servers = {}
        self.note(retries=retries, instances=instances)

    def close(self) -> None:
        """Stop what runs, and note how long it took."""
        self.flush()
        self._writer.shutdown()
        if self.servers:
            self.stop_servers()
        if self.requests_s:
            timing = Timing(
                scored_tokens=self.tokens,
                requests_s=round(self.requests_s, 3),
                wall_s=round(self.wall_s, 3),
            )
            self.note(timing=[*self.facts.timing, timing])


def _sources() -> dict[str, str]:
    """Hash what runs inside vLLM: the route switch and its packs."""
    import importlib.util

    found = {}
    for package in ("kvroute", "kvpack"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            found[package] = environment.sources_hash(Path(folder))
    return found
