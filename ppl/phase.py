"""One phase of a run: servers that are up together, from their preflight to their last text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppl import burst, emulation, options, preflight, pynccl, ready, scoring, validity
from ppl.errors import BadAnswer, PplError, Unreachable
from ppl.facts import Arm, Instance
from ppl.inputs import Input
from ppl.observe import Snapshot, difference
from ppl.order import Phase, Step
from ppl.plan import Configuration, request
from ppl.preflight import Checked
from ppl.scoring import Restarted
from ppl.servers import Launched, Server, identity

if TYPE_CHECKING:
    from ppl.runner import Session

MOST_REPLACED = 3
"""Times that a server of one launch that died is started again, or may have been by others."""


class Stop(Exception):
    """A run that can't go on now; ``reasons`` make its verdict invalid, the message says why."""

    def __init__(self, message: str, reasons: list[str]) -> None:
        super().__init__(message)
        self.reasons = reasons


class Work:
    """What is done with the servers of a phase."""

    def __init__(self, session: Session, phase: Phase) -> None:
        self.session = session
        self.phase = phase
        self.down: dict[Arm, str] = {}
        self.died: dict[Arm, int] = {}

    # -- preflight --------------------------------------------------------------------

    def prepare(self) -> None:
        """Look at the servers, cut the texts to them, and warm them up.

        A server of our own that dies meanwhile is replaced, and all is done again.

        Raises
        ------
        Stop : something is amiss, or a server that isn't ours doesn't answer.

        """
        while True:
            try:
                self._prepare()
            except Unreachable as e:
                server = next(x for x in self.session.servers.values() if x.endpoint.url == e.url)
                if server.process is None:
                    why = f"the {server.arm} server doesn't answer: {e}"
                    raise Stop(why, [why]) from None
                self._replace(server, f"while it was made ready: {e}")
            else:
                return

    def _prepare(self) -> None:
        s = self.session
        for server in s.servers.values():
            self._inspect(server)
        self._compare()
        if s.options.attached:
            for server in s.servers.values():
                ready.recognise(s, server)
            self.phase = Phase({x.arm: x.instance.launch for x in s.servers.values()})
        if not s.items:
            first = next(iter(s.servers.values()))
            assert first.checked is not None
            made = self._configuration(first.checked)
            if s.options.attached and made.workspace_rows is None:
                ready.wake(first, made)
                made = self._configuration(first.checked, first.snapshot)
            s.cut(made)
        self._decoding()
        for server in s.servers.values():
            self._note_instance(server)
        if s.method is None:
            s.best = ready.best(s)
            s.method = ready.method(s)
            s.note(method=s.method)
        for server in s.servers.values():
            self._warm(server)

    def _configuration(self, checked: Checked, now: Snapshot | None = None) -> Configuration:
        """Return what the plan is made from; a snapshot from after a request knows more."""
        s = self.session
        workspace = s.source.workspace if isinstance(s.source, Launched) else s.options.workspace
        made = preflight.configuration(checked.facts, workspace)
        if workspace is None and s.options.attached:
            rows = (now or checked.snapshot).facts.get("workspace_rows")
            if isinstance(rows, int) and made.ranks > 1:
                # It was allocated as rows + rows / D; a server that has never prefilled tells none.
                made = made.model_copy(
                    update={"workspace_rows": rows * made.ranks // (made.ranks + 1)}
                )
        return made

    def _inspect(self, server: Server) -> None:
        s = self.session
        stated = options.stated(s.options.arguments) if s.options.attached else {}
        checked = preflight.check(
            server.arm,
            server.endpoint,
            launched=server.process is not None,
            wanted=s.route(server.arm),
            stated=stated,
            emulate_fp8=s.options.emulate_fp8,
            share_gpu=s.options.share_gpu,
        )
        server.checked, server.snapshot = checked, checked.snapshot
        known = next((f for f in s.facts.servers if f.arm == server.arm), None)
        if known is not None:
            unlike = ready.changed(known, checked.facts)
            if unlike:
                raise Stop(
                    f"{server.arm}: the server's configuration changed",
                    [f"{server.arm}: restarted half-way with another configuration: {unlike}"],
                )
        s.checked[server.arm] = checked
        servers = [f for f in s.facts.servers if f.arm != server.arm]
        if not checked.amiss or known is None:
            s.note(servers=sorted([*servers, checked.facts], key=lambda f: f.arm != "stock"))

    def _compare(self) -> None:
        s = self.session
        amiss = [x for c in s.checked.values() for x in c.amiss]
        open_ = [x for c in s.checked.values() for x in c.not_covered]
        if len(s.checked) > 1:
            more, blanks = preflight.compare(s.checked["stock"], s.checked["fused"])
            amiss, open_ = [*more, *amiss], [*open_, *blanks]
        s.note(not_covered=list(dict.fromkeys([*s.facts.not_covered, *open_])))
        if amiss:
            self._forget()
            raise Stop(f"preflight: {amiss[0]}", amiss)

    def _decoding(self) -> None:
        """Refuse texts with steps that a server of these can't compute (``ppl.pynccl``)."""
        s = self.session
        assert s.planned is not None
        requests, most = s.planned.requests, s.planned.configuration.decode_tokens
        amiss = [
            x
            for arm, c in s.checked.items()
            if arm in s.servers and pynccl.off(c.snapshot, c.whole)
            for x in pynccl.of_texts(arm, requests, most)
        ]
        if amiss:
            self._forget()
            raise Stop(f"preflight: {amiss[0]}", amiss)

    def _forget(self) -> None:
        """Forget servers of which nothing is stored: the next may be others."""
        s = self.session
        held = {r.arm for r in s.store.records()}
        s.note(servers=[f for f in s.facts.servers if f.arm in held])

    def _note_instance(self, server: Server) -> None:
        assert server.snapshot is not None
        instance = server.instance.model_copy(update={"identity": identity(server.snapshot)})
        server.instance = instance
        self.session.add_instance(instance)

    # -- method and warm-up -----------------------------------------------------------

    def _warm(self, server: Server) -> None:
        """Send one request whose result is discarded, and see that its counters are as planned."""
        s = self.session
        first = s.items[0]
        item = Input(first.facts.model_copy(update={"text": "warm-up"}), first.ids[::-1])
        assert s.planned is not None
        planned = request("warm-up", len(item.ids), s.planned.configuration)
        assert s.method is not None
        before = scoring.settle(server)
        try:
            result = scoring.measure(server, planned, item, s.method)
        except (BadAnswer, Restarted) as e:
            raise Stop(f"{server.arm}: {e}", [f"{server.arm}, warm-up: {e}"]) from None
        wrong = validity.deviations(
            result.observed,
            route=s.route(server.arm),
            tokens=len(item.ids),
            budget=s.planned.configuration.budget,
        )
        assert server.snapshot is not None
        seen = scoring.workspace_seen(server.snapshot, s.planned.configuration)
        wrong += [seen] if seen else []
        packs = preflight.packs(server.snapshot.route)
        if s.options.emulate_fp8:
            wrong[:0] = emulation.unreached(difference(before, server.snapshot), packs=packs)
        elif server.arm == "fused":
            open_ = emulation.open_(server.snapshot)
            s.note(not_covered=list(dict.fromkeys([*s.facts.not_covered, *open_])))
        server.warm = (item.ids, result.scored.values)
        if wrong:
            raise Stop(f"{server.arm}: {wrong[0]}", [f"{server.arm}, warm-up: {x}" for x in wrong])
        s.note(
            servers=[
                f.model_copy(update={"facts": {**f.facts, **server.snapshot.facts}})
                if f.arm == server.arm
                else f
                for f in s.facts.servers
            ]
        )

    # -- scores -----------------------------------------------------------------------

    def score(self) -> None:
        """Score what is missing of this phase.

        Raises
        ------
        Stop : a server is gone, and what could be done without it is done.

        """
        s = self.session
        items = {i.name: i for i in s.items}
        failed = {(f.text, f.arm, f.launch, f.repeat) for f in s.facts.failures}
        for step in self.phase.steps(list(items), s.options.repeats):
            text, arm, launch, repeat = step
            if arm in self.down or step in failed:
                continue
            key = s.key(s.servers[arm], items[text])
            if s.store.find(key, arm, launch, repeat) is None:
                self.one(step, items[text])
        s.flush()
        for number in range(1, s.options.bursts + 1) if s.options.burst else ():
            self._burst(number)
        if self.down:
            self._stopped()

    def _burst(self, number: int) -> None:
        """Score all texts at once on each arm's server, the arms in turns."""
        s = self.session
        arms = list(self.phase.launches.items())
        for arm, launch in arms if number % 2 else arms[::-1]:
            if any(f.arm == arm and not f.repeat for f in s.facts.failures):
                continue
            while arm not in self.down and not burst.score(s, arm, launch, number):
                self.gone(s.servers[arm], "in a burst of all texts")

    def one(self, step: Step, item: Input) -> float:
        """Score one text, on whatever process the arm has by the end; the request's seconds."""
        s = self.session
        text, arm, launch, repeat = step
        assert s.method is not None
        while arm not in self.down:
            server = s.servers[arm]
            try:
                result = scoring.measure(server, s.plan_of(text), item, s.method, s.best)
                scoring.own(server, item, result.scored.values)
            except BadAnswer as e:
                s.failed(step, str(e))
                return 0.0
            except Unreachable as e:
                self.gone(server, f"while scoring {text}: {e}")
                continue
            except Restarted as e:
                self._again(server, f"seen while scoring {text}: {e}")
                continue
            planned = s.plan_of(text)
            s.put(
                result.scored.values,
                key=s.key(server, item),
                arm=arm,
                launch=launch,
                repeat=repeat,
                exposed_from=planned.exposed_from,
                budget=planned.steps[0].tokens if planned.steps else 1,
                observed=result.observed,
                best=result.scored.best,
                request={"method": s.method},
                response={
                    "wall_s": round(result.scored.wall_s, 6),
                    "bytes": result.scored.answer_bytes,
                    "instance": server.instance.number,
                    "finished": result.finished,
                },
            )
            s.tokens += len(item.ids)
            s.requests_s += result.scored.wall_s
            what = f"{text}, {arm} launch {launch} repeat {repeat}"
            s.pace.scored(what, len(item.ids), result.scored.wall_s)
            return result.scored.wall_s
        return 0.0

    # -- servers that go away ---------------------------------------------------------

    def gone(self, server: Server, why: str) -> None:
        """Replace a server of our own that died; let one that isn't ours be down."""
        s = self.session
        if not isinstance(s.source, Launched):
            self.down[server.arm] = why
            s.pace.say(f"{server.arm} is down, {why}")
            return
        fresh = self._replace(server, why)
        while True:
            try:
                self._ready(fresh)
            except Unreachable as e:
                fresh = self._replace(fresh, f"while it was made ready: {e}")
            else:
                return

    def _replace(self, server: Server, why: str) -> Server:
        """Start a server of our own in the place of one that died."""
        s = self.session
        assert isinstance(s.source, Launched)
        code = server.process.code() if server.process is not None else None
        what = f"ended with {code}" if code is not None else "stopped answering"
        when = why.partition(":")[0]
        s.pace.say(f"{server.arm} {what} {when}: starting it again")
        server.stop()
        s.add_instance(server.instance.model_copy(update={"stopped": True}))
        self.died[server.arm] = self.died.get(server.arm, 0) + 1
        if self.died[server.arm] > MOST_REPLACED:
            times = f"died {self.died[server.arm]} times in one launch"
            raise Stop(f"{server.arm} {times}", [f"{server.arm}: {times}, the last {why}"])
        fresh = Instance(
            arm=server.arm,
            launch=server.instance.launch,
            number=server.instance.number + 1,
            why=f"the one before {what} {when}",
        )
        try:
            s.servers[server.arm] = s.source.get((server.arm,), lambda _: fresh)[server.arm]
        except PplError as e:
            raise Stop(str(e), [f"{server.arm}: it didn't come back: {e}"]) from None
        s.add_instance(s.servers[server.arm].instance)
        return s.servers[server.arm]

    def _again(self, server: Server, why: str) -> None:
        """Look anew at a server that was started again; its configuration may be another."""
        s = self.session
        s.pace.say(f"{server.arm} was started again, {why}")
        self.died[server.arm] = self.died.get(server.arm, 0) + 1
        if self.died[server.arm] > MOST_REPLACED:
            times = f"was started again {self.died[server.arm]} times in one launch"
            raise Stop(f"{server.arm} {times}", [f"{server.arm} {times}, the last {why}"])
        server.layers = {}
        server.instance = Instance(
            arm=server.arm,
            launch=server.instance.launch,
            number=server.instance.number + 1,
            why=f"started again, {why}",
        )
        try:
            self._ready(server)
        except Unreachable as e:
            self.gone(server, f"after a restart: {e}")

    def _ready(self, server: Server) -> None:
        self._inspect(server)
        self._compare()
        self._decoding()
        self._note_instance(server)
        self._warm(server)

    def _stopped(self) -> None:
        """Say how to go on."""
        s = self.session
        reasons = []
        for arm, why in self.down.items():
            url = s.servers[arm].endpoint.url
            reasons.append(f"the {arm} server at {url} went away {why}")
        s.flush()
        stored = sum(1 for _ in s.store.records())
        raise Stop(
            f"{' and '.join(self.down)} went away; {stored} results are stored: start the server "
            "again and run the same command, which asks only for what is missing",
            reasons,
        )
