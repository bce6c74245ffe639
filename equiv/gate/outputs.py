"""What a gate leaves beside ``gate.json``: the block, the page, junit, and a CI's step summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from equiv import junit
from equiv.errors import UsageError
from equiv.evidence import write_text
from equiv.gate import block
from equiv.gate.collect import LAYERS
from equiv.gate.record import GateEvidence
from equiv.gate.run import Gate

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable by which GitHub's runner names the file that it shows with a job."""


def write(done: Gate, out: Path) -> None:
    """Write ``gate.md``, ``gate.html`` and ``gate.xml``; add to the step summary where CI has one.

    Raises
    ------
    UsageError : a package that the page needs isn't installed, or the summary can't be written.

    """
    text = block.markdown(done.made, done.found)
    write_text(out / "gate.md", text)
    write_text(out / "gate.xml", of_gate(done.made))
    summary = os.environ.get(SUMMARY)
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as f:
                f.write(text)
        except OSError as e:
            raise UsageError(f"can't write to {SUMMARY}, {summary}: {e.strerror}") from None
    try:
        from equiv.gate import page
    except ModuleNotFoundError as e:
        (out / "gate.html").unlink(missing_ok=True)  # an earlier gate's isn't this one's
        raise UsageError(
            f"gate.html needs {e.name}: pip install 'bytegate[report]'; "
            "gate.json, gate.md and gate.xml were written"
        ) from None
    write_text(out / "gate.html", page.html(done.made, done.found, done.judged))


def of_gate(made: GateEvidence) -> str:
    """Return a gate's test cases as JUnit XML: each layer and device, and each problem."""
    return junit.xml("bytegate gate", made, list(_tests(made)))


def _tests(made: GateEvidence) -> Iterator[junit.Test]:
    for problem in made.problems:
        yield junit.Test("gate.evidence", problem[:120], 0.0, "error", "invalid", problem)
    kinds = {"failed": "failure", "invalid": "error", "inconclusive": "error", "passed": ""}
    for c in made.cells:
        kind = kinds.get(c.state, "error" if c.required else "skipped")
        name = f"{LAYERS[c.layer]} on {c.device}"
        yield junit.Test(f"gate.{c.layer}", name, 0.0, kind, c.state, "; ".join(c.reasons))
