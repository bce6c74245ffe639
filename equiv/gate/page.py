"""``gate.html``: one page for those who look closer, without scripts and without a network."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jinja2

from equiv.errors import ExitCode
from equiv.gate import charts, facts
from equiv.gate.block import SAYS
from equiv.gate.collect import Collected
from equiv.gate.judge import Judged
from equiv.gate.record import GateEvidence

TONES = {ExitCode.PASS: "good", ExitCode.FAIL: "bad", ExitCode.INVALID: "warn"}


def html(made: GateEvidence, found: Collected, judged: Judged) -> str:
    """Return the page."""
    text = resources.files("equiv.gate").joinpath("templates/gate.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    judged_at_all = not made.problems
    seen = found if judged_at_all else Collected()
    lanes, identity = facts.identity_rows(seen)
    servers = facts.of_layer(seen, "servers")
    return environment.from_string(text).render(
        made=made,
        tone="bad" if made.problems else TONES.get(ExitCode(made.exit_code), "warn"),
        says=_sentence(SAYS[made.verdict]),
        cells=facts.cell_rows(made, found),
        lanes=lanes,
        identity=identity,
        domains=[facts.domain_sentence(p) for p in facts.of_layer(seen, "kernel")],
        coverage=charts.coverage(seen),
        lattice=charts.lattice(seen),
        declared=facts.declared(seen),
        findings=list(_findings(seen)),
        faults=charts.faults(seen),
        servers=charts.servers(seen, judged),
        texts=[row for p in servers for row in _texts(p.made)],
        statistics=[
            line
            for p in servers
            for line in (
                ("identity", facts.texts_sentence(p)),
                ("strata", facts.strata_sentence(p)),
                ("noise floor", facts.noise_sentence(p)),
            )
        ],
        speed=list(facts.perf_lines(seen)),
        environments=facts.environments(found),
        commands="\n".join([*facts.commands(made, found), "bytegate verify gate.json"]),
        policy=json.dumps(made.policy.model_dump(mode="json"), indent=1),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _findings(found: Collected) -> Any:
    for p in found.pieces:
        if p.layer == "kernel":
            lanes = [(f"{c.name} on {p.device}", x) for c in p.made.candidates for x in c.lanes]
        elif p.layer == "loop":
            lanes = [(f"vLLM's loop on {p.device}", x) for x in p.made.lanes]
        else:
            continue
        for who, x in lanes:
            for f in x.findings:
                yield f"{who}, lane {x.lane}", f.kind, f.detail, f.repro


def _texts(made: Any) -> Any:
    for t in made.texts:
        exposed, control = (
            "-" if s.mean_nats is None else f"{s.mean_nats:.3g}" for s in (t.exposed, t.unexposed)
        )
        yield (
            t.text,
            "yes" if t.bit_identical else "no",
            f"{t.rows:,}",
            f"{t.exposed.tokens:,}",
            f"{t.differing:,}",
            exposed,
            control,
        )
