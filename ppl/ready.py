"""What is found out of a server that is ready: which launch it is, and how it gives log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppl import client, scoring, sharing
from ppl.client import Method
from ppl.errors import BadAnswer
from ppl.facts import Instance, ServerFacts
from ppl.observe import PYNCCL
from ppl.order import Phase
from ppl.plan import Configuration
from ppl.servers import Server, same_process

if TYPE_CHECKING:
    from ppl.runner import Session


def recognise(s: Session, server: Server) -> None:
    """Find out which launch a server that is there belongs to."""
    assert server.snapshot is not None
    mine = [i for i in s.facts.instances if i.arm == server.arm]
    if not mine:
        server.instance = Instance(arm=server.arm, launch=1, number=1, why="found")
        return
    last = max(mine, key=lambda i: (i.launch, i.number))
    known = dict(last.identity)
    seen = [
        int(str(r.response["finished"]))
        for r in s.store.records()
        if r.arm == server.arm
        and r.launch == last.launch
        and r.response.get("instance") == last.number
        and r.response.get("finished") is not None
    ]
    known["finished"] = max([int(str(known.get("finished") or 0)), *seen])
    if same_process(known, server.snapshot):
        server.instance = last
        return
    names = [t.text for t in s.facts.texts]
    steps = Phase({server.arm: last.launch}).steps(names, s.options.repeats)
    stored = {(r.key.text, *r.run) for r in s.store.records()}
    if set(steps) <= stored and last.launch < s.options.launches:
        server.instance = Instance(
            arm=server.arm, launch=last.launch + 1, number=1, why="found launched again"
        )
    else:
        server.instance = Instance(
            arm=server.arm,
            launch=last.launch,
            number=last.number + 1,
            why="found launched again in the middle",
        )


BEST = 2
"""Tokens of each row that ``--top1`` asks for: the arg-max, and the second best for its margin."""


def best(s: Session) -> int:
    """Return how many best tokens to ask for: 0 where a server doesn't give them, by name."""
    if not s.options.top1:
        return 0
    ids = s.items[0].ids[::-1]
    for server in s.servers.values():
        assert server.checked is not None
        model = server.checked.model
        try:
            plain = client.score(server.endpoint, model, ids)
            asked = client.score(server.endpoint, model, ids, best=BEST)
        except BadAnswer as e:
            s.note(not_covered=[*s.facts.not_covered, f"top-1 agreement: {server.arm}: {e}"])
            return 0
        if plain.values.tobytes() != asked.values.tobytes():
            unlike = (
                f"log-probs with the {BEST} best tokens aren't equal bit for bit to those alone"
            )
            s.note(warnings=[*s.facts.warnings, f"{server.arm}: {unlike}"])
        scoring.settle(server)
    return BEST


def method(s: Session) -> Method:
    """Use the smaller form where every server has it and gives the same bits.

    It has no arg-maxes: where they are asked for and given it isn't used.
    """
    if s.best:
        return "prompt_logprobs"
    ids = s.items[0].ids[::-1]
    open_ = s.facts.not_covered
    for server in s.servers.values():
        assert server.checked is not None
        model = server.checked.model
        try:
            small = client.score(server.endpoint, model, ids, "prompt_logprob_token_ids")
            large = client.score(server.endpoint, model, ids, "prompt_logprobs")
        except BadAnswer as e:
            s.note(
                not_covered=[
                    *open_,
                    f"prompt_logprob_token_ids against prompt_logprobs: {server.arm}: {e}",
                ]
            )
            return "prompt_logprobs"
        if small.values.tobytes() != large.values.tobytes():
            unlike = "prompt_logprob_token_ids isn't equal bit for bit to prompt_logprobs"
            s.note(warnings=[*s.facts.warnings, f"{server.arm}: {unlike}, and isn't used"])
            return "prompt_logprobs"
        scoring.settle(server)
    return "prompt_logprob_token_ids"


def wake(server: Server, configuration: Configuration) -> None:
    """Send a request of two steps: its workspace's rows are what a server tells only then."""
    assert server.checked is not None
    tokens = configuration.budget + configuration.decode_tokens + 1
    if server.checked.channel != "collective_rpc" or tokens >= configuration.max_model_len:
        return
    ids = [3 + i % 200 for i in range(tokens)]
    try:
        client.score(server.endpoint, server.checked.model, ids)
    except BadAnswer:
        return
    scoring.settle(server)


def changed(known: ServerFacts, now: ServerFacts) -> str:
    """Say in what a server isn't the one that was there; empty where it is."""
    found = [
        f"{name} was {known.settings.get(name)} and is {now.settings.get(name)}"
        for name in sorted(set(known.settings) | set(now.settings))
        if known.settings.get(name) != now.settings.get(name)
    ]
    for name in ("model", "route", "versions", "channel", "switches", "settings_sha256"):
        before, after = getattr(known, name), getattr(now, name)
        if before != after and not (found and name == "settings_sha256"):
            found.append(f"{name} was {before} and is {after}")
    before, after = known.facts.get(PYNCCL), now.facts.get(PYNCCL)
    if None not in {before, after} and before != after:
        found.append(f"{PYNCCL} was {before} and is {after}")
    had, has = (sharing.of(f.facts) or sharing.NONE for f in (known, now))
    if had != has and sharing.tells(known) and sharing.tells(now):
        found.append(f"it had {had} and has {has}")
    return "; ".join(found[:3])
