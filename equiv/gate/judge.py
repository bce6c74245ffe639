"""From evidence to cells, one for each layer and device, and from cells to the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equiv.gate import agree, servers
from equiv.gate.collect import LAYERS, Collected, Piece
from equiv.gate.layers import LOOK, Findings, look_at_servers
from equiv.gate.policy import Policy
from equiv.gate.record import Cell

MOST_REASONS = 6
"""Reasons that a cell gives; the evidence has them all."""

KINDS = {"any": (), "cpu": ("cpu",), "gpu": ("gpu",), "both": ("cpu", "gpu"), "no": ()}
"""Kinds of device that a requirement names."""


@dataclass(frozen=True)
class Judged:
    """Cells, what keeps them from being one verdict, and the stores of the server layer."""

    cells: tuple[Cell, ...]
    problems: tuple[str, ...]
    arrays: Mapping[str, servers.Arrays]


def judge(
    found: Collected,
    policy: Policy,
    *,
    commit: str | None = None,
    absent: Mapping[str, str] | None = None,
) -> Judged:
    """Judge evidence under a policy.

    Parameters
    ----------
    commit : what the evidence's has to be, where that was asked for.
    absent : of layers that were run and left no evidence, why.

    """
    problems = [*found.problems, *agree.disagreements(found.pieces, policy, commit)]
    arrays = {p.name: servers.check(p, found.stores) for p in found.pieces if p.layer == "servers"}
    problems += [a.problem for a in arrays.values() if a.problem]
    problems += [
        f"{name} isn't what its arrays give: {'; '.join(a.differ[:3])}"
        for name, a in arrays.items()
        if a.differ
    ]
    if problems:
        return Judged((), tuple(dict.fromkeys(problems)), arrays)
    cells: list[Cell] = []
    for layer in LAYERS:
        mine = [p for p in found.pieces if p.layer == layer]
        made = [
            _cell(layer, device, [p for p in mine if p.device == device], policy, arrays)
            for device in dict.fromkeys(sorted(p.device for p in mine))
        ]
        cells += _required(layer, made, policy, (absent or {}).get(layer, ""))
    return Judged(tuple(cells), (), arrays)


def _cell(
    layer: str,
    device: str,
    pieces: Sequence[Piece],
    policy: Policy,
    arrays: Mapping[str, servers.Arrays],
) -> Cell:
    findings = Findings()
    if layer == "servers":
        for p in pieces:
            look_at_servers(p, policy, arrays[p.name], findings)
        if pieces and all(p.made.only_emulated for p in pieces):
            findings.missing.append(
                "only servers that emulate fp8 prefill ran: none with vLLM's own attention; run "
                "bytegate ppl without --emulate-fp8-prefill as well"
            )
    else:
        LOOK[layer](pieces, policy, findings)
    changed = [p.name for p in pieces if agree.dirty(p)]
    if changed:
        findings.remarks.append("made from a tree with uncommitted changes")
    state, reasons = findings.state()
    return Cell(
        layer=layer,
        device=device,
        state=state,
        required=False,
        reasons=tuple(_most(reasons)),
        remarks=tuple(dict.fromkeys(findings.remarks)),
        files=tuple(p.name for p in pieces),
    )


def _most(reasons: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(reasons))
    if len(distinct) <= MOST_REASONS:
        return distinct
    return [*distinct[:MOST_REASONS], f"and {len(distinct) - MOST_REASONS} more"]


def _required(layer: str, made: Sequence[Cell], policy: Policy, why: str) -> list[Cell]:
    """Mark the cells that the policy rests on, and make those that are missing."""
    asked = policy.requires(layer)
    kinds = KINDS[asked]
    passed = [c for c in made if c.state == "passed"]

    def rests(cell: Cell) -> bool:
        if asked == "any":
            return cell.state == "passed" or not passed
        return cell.device.split()[0] in kinds

    cells = [c.model_copy(update={"required": rests(c)}) for c in made]
    have = {c.device.split()[0] for c in made}
    lacking = [k for k in kinds if k not in have]
    if asked == "any" and not made:
        lacking = ["any device"]
    elif asked != "no" and "gpu" not in have and "gpu" not in lacking:
        cells.append(_absent(layer, "gpu", required=False, why=""))
    elif asked == "no" and not made:
        cells.append(_absent(layer, "any device", required=False, why=why))
    return [*cells, *[_absent(layer, k, required=True, why=why) for k in lacking]]


def _absent(layer: str, device: str, *, required: bool, why: str) -> Cell:
    reason = why or f"there is no evidence of {LAYERS[layer]} on {_article(device)}"
    return Cell(
        layer=layer, device=device, state="not covered", required=required, reasons=(reason,)
    )


def _article(device: str) -> str:
    return device if device.startswith("any") else f"a {device.upper()}"
