"""Decode under decode context parallelism where PyNccl is off: what of a run it makes worthless.

vLLM combines the ranks' attention outputs of a decode step by the group's reduce-scatter. With
PyNccl off, vLLM 0.33 returns memory that nobody wrote, without an error
(docs/upstream/dcp-reduce-scatter). The route's loop doesn't use it; a step of few tokens of a text,
which runs as decode, does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ppl.facts import ServerFacts
from ppl.observe import PYNCCL, Snapshot
from ppl.plan import Planned

BACKEND = "parallel_config.dcp_comm_backend"
"""Where ``/server_info`` has the collective of a decode step; ``a2a`` isn't PyNccl's."""
OFF = "PyNccl is off, so vLLM's reduce-scatter returns uninitialised memory"
IN_A_BURST = f"{OFF} wherever a step of few tokens runs as decode, and a burst's steps aren't known"


def off(snapshot: Snapshot, whole: Mapping[str, Any]) -> bool:
    """Whether a server's decode steps give uninitialised memory; False where nobody tells.

    Parameters
    ----------
    whole : its whole configuration, flattened (``ppl.preflight.Checked``).

    """
    return snapshot.facts.get(PYNCCL) is False and whole.get(BACKEND) != "a2a"


def open_(who: str, facts: Mapping[str, Any]) -> str:
    """Return the line that every report of such a server has, below NOT COVERED."""
    most = facts.get("decode_tokens")
    steps = f"up to {most:,}" if most is not None else "few (how few isn't told)"
    cure = "vLLM 0.33 wants NCCL 2.29.7 or later"
    return f"decode under DCP on {who}: {OFF}: steps of {steps} tokens are garbage; {cure}"


def between(stock: ServerFacts, fused: ServerFacts) -> list[str]:
    """Say that PyNccl is on in one of two servers and off in the other."""
    a, b = (f.facts.get(PYNCCL) for f in (stock, fused))
    if not isinstance(a, bool) or not isinstance(b, bool) or a == b:
        return []
    x, y = ("on", "off") if a else ("off", "on")
    return [f"the arms' configurations differ: PyNccl is {x} in stock, {y} in fused"]


def of_texts(who: str, planned: Iterable[Planned], decode_tokens: int) -> list[str]:
    """Name texts with scores from a step that such a server runs as decode.

    The last position of a text isn't scored: a last step of it alone hurts nothing.
    """
    return [
        f"{who}: text {p.text}: its step of {s.tokens:,} tokens from token {s.context:,} on runs "
        f"as decode (up to {decode_tokens:,}): {OFF}, and that is what its scores there are"
        for p in planned
        for s in p.steps
        if s.tokens <= decode_tokens and s.context < p.rows
    ]


def while_serving(told: Mapping[str, Sequence[bool | None]], arguments: Sequence[str]) -> list[str]:
    """Say of which arms' servers the answers of a benchmark are garbage, whose times still count.

    Parameters
    ----------
    told : of each arm, PyNccl of each launch.
    arguments : vLLM's.

    """
    if "a2a" in {word.rpartition("=")[2] for word in arguments}:
        return []
    return [
        f"what decode under DCP answered on {arm}: {OFF}; the figures are times of such steps"
        for arm, seen in told.items()
        if False in seen
    ]
