"""What one case came to: plain values that travel from a worker to the campaign."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equiv.compare import Difference

EQUAL = "equal"
REFUSED = "refused"
UNDEFINED = "undefined"
DECLARED = "declared"
PASSING = (EQUAL, REFUSED, UNDEFINED, DECLARED)

NOT_ALONE = "only after other cases in the same process: alone it passes"
"""What a finding says of itself that its case alone doesn't show."""

FINDINGS = {
    "divergence": "bytes differ from the reference",
    "unwritten": "bytes of the output were never written",
    "unstable": "two calls on the same operands gave other bytes",
    "input_changed": "an input was changed",
    "out_of_bounds": "a write landed outside every operand and output",
    "overwritten": "a later call changed an earlier call's result",
    "raised": "an exception where equal bytes are claimed",
    "crash": "the process died, or the CUDA context was lost",
    "hang": "no result within the time limit",
    "last_error": "an error was left behind for whoever asks CUDA next",
    "not_run": "the named kernel did not run",
    "wrong_type": "the result isn't what the pair returns",
    "wrong_shape": "an output has another shape",
    "wrong_dtype": "an output has another dtype",
    "wrong_device": "an output is on another device",
    "global_state": "torch's global state was changed",
    "reference": "the reference departs from the oracle",
    "reference_raised": "the reference itself failed",
}
"""Kinds of findings. Each but the last two is the candidate's."""


@dataclass(frozen=True)
class LedgerHit:
    """Elements or events of one case that one entry declares.

    ``patterns`` holds distinct input patterns by ``"dtype position"``.
    """

    entry: str
    elements: int
    patterns: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One case's outcome.

    Attributes
    ----------
    status : one of ``PASSING``, or a key of ``FINDINGS``.
    detail : one line on a finding or refusal; empty when equal.
    difference : first differing element, where bytes differ.
    others : the first of each other category of difference (``equiv.compare.CATEGORIES``).
    voices : who the oracle says is wrong.
    raised_in : ``module:function`` in which an exception was raised.
    bytes_compared : output bytes compared with the reference, both colours.
    input_hash, output_hash : xxh3-128 of the logical input and reference output bytes; empty
        for the largest cases.
    outputs_guarded : whether every fresh output lay in guarded memory.
    ledger : declared divergences met.
    eligible : ids of ledger entries whose case predicate this case met.
    oracle_checked : whether the reference was compared with the oracle.
    layouts : outputs whose pitches are not the reference's (bytes equal, layout not).
    guard : how outputs are guarded from now on, see ``equiv.execute.Loaded``.
    spent : whether its process has to serve no further case, see ``equiv.execute.Executor``.

    """

    status: str
    detail: str = ""
    difference: Difference | None = None
    others: tuple[Difference, ...] = ()
    voices: str = ""
    raised_in: str = ""
    bytes_compared: int = 0
    input_hash: str = ""
    output_hash: str = ""
    outputs_guarded: bool = False
    ledger: tuple[LedgerHit, ...] = ()
    eligible: tuple[str, ...] = ()
    oracle_checked: bool = False
    layouts: tuple[str, ...] = ()
    guard: str = ""
    seconds: float = 0.0
    spent: bool = False

    @property
    def failed(self) -> bool:
        """Whether this is a finding."""
        return self.status not in PASSING

    @property
    def signatures(self) -> tuple[tuple[str, str], ...]:
        """What makes two findings the same one: kind, and category of difference or place."""
        if self.difference is None:
            return ((self.status, self.raised_in),)
        return tuple((self.status, d.category) for d in (self.difference, *self.others))

    def of(self, signature: tuple[str, str]) -> Difference | None:
        """Return the difference that a signature is about."""
        differences = (self.difference, *self.others)
        return next((d for d in differences if d is not None and d.category == signature[1]), None)
