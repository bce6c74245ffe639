"""What one case of the loop came to."""

from __future__ import annotations

from dataclasses import dataclass

from equiv.compare import Difference

EQUAL, REFUSED = "equal", "refused"
FINDINGS = {
    "divergence": "the loop gives other bytes with the pack than without it",
    "collective": "the loop gives other bytes on real ranks than with served peers",
    "reference": "the loop lies outside the dense reference's bound",
    "ranks": "two ranks' metadata disagree, or a rank is lost in a collective",
    "plan": "fields of a context chunk contradict the requests or each other",
    "out_of_bounds": "a row beside the workspace was written",
    "input_changed": "the cache, the query, or what the pack was given was changed",
    "not_run": "the pack was not called once for each context chunk",
    "wrong_operands": "the pack got something else than the projection and the gathered key",
    "dropped": "the pack's key and value did not reach the prefill backend",
    "not_refused": "a case that is declared refused gave a result",
    "crash": "the process died",
    "hang": "no result in time",
    "raised": "an exception where a result is claimed",
}
"""Kinds of findings."""


@dataclass(frozen=True)
class Result:
    """One case's outcome.

    Attributes
    ----------
    status : ``equal``, ``refused``, or a key of ``FINDINGS``.
    detail : one line on a finding or refusal.
    difference : first differing element, where there is one.
    raised_in : ``module:function`` of vLLM's, or of a patch's, in which an exception was raised.
    kinds : what the case exercised, for the lanes' least counts.
    chunks : context chunks of the plan.
    input_hash, output_hash : xxh3-128 of cache and query, and of the loop's output and lse.

    """

    status: str
    detail: str = ""
    difference: Difference | None = None
    raised_in: str = ""
    kinds: tuple[str, ...] = ()
    chunks: int = 0
    bytes_compared: int = 0
    input_hash: str = ""
    output_hash: str = ""
    worst: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether this is a finding."""
        return self.status not in (EQUAL, REFUSED)

    @property
    def signature(self) -> tuple[str, str]:
        """What makes two findings the same one."""
        return self.status, self.difference.output if self.difference else self.raised_in


class Finding(Exception):
    """Ends a case early with a finding."""

    def __init__(self, status: str, detail: str, difference: Difference | None = None) -> None:
        super().__init__(detail)
        self.result = Result(status, detail, difference)
