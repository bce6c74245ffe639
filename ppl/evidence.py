"""``ppl.json``: what a comparison leaves behind."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from equiv import seal
from equiv.evidence import write_text
from ppl import emulation, sharing
from ppl.errors import PplError
from ppl.facts import RunFacts
from ppl.stats import Noise, Tost
from ppl.verdict import Claim, Verdict, exit_code


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LargestDifference(_Frozen):
    """Where the two routes differ most: row i scores token i + 1."""

    text: str
    row: int
    d_nats: float
    rows_to_chunk_cut: int | None
    exposed: bool


class Stratum(_Frozen):
    """Tokens of a text that the route can touch, or can't; means of fused minus stock."""

    tokens: int
    differing: int
    mean_nats: float | None
    mean_abs_nats: float | None


class TextResult(_Frozen):
    """One text, by the first run of each arm.

    ``bit_identical`` is of all its runs; ``differing`` counts tokens between the first two.

    Attributes
    ----------
    difference_nats : mean exposed difference over launches, which the test is of, and the least and
        the greatest of any launch of the one arm minus any of the other.
    run_distances : places of two runs in ``runs``, and the mean exposed |d| between them, in nats.

    """

    text: str
    rows: int
    exposed: Stratum
    unexposed: Stratum
    stock_nll_nats: float
    fused_nll_nats: float
    stock_perplexity: float
    fused_perplexity: float
    bit_identical: bool
    differing: int
    largest: LargestDifference | None
    ulp: dict[str, int]
    difference_nats: tuple[float, float, float] | None = None
    run_distances: list[tuple[int, int, float]] = []


class Identity(_Frozen):
    """Bit identity over all texts."""

    texts: int
    identical_texts: int
    tokens: int
    identical_tokens: int
    exposed_tokens: int
    largest: LargestDifference | None
    ulp: dict[str, int]


class Statistics(_Frozen):
    """What the exposed text means say, in nats.

    Attributes
    ----------
    margin_percent : what the margin means in perplexity.
    contrast : exposed minus unexposed mean differences, tested like the exposed ones: the unexposed
        tokens are a control that the route can't touch. None where a text has none.
    p_zero_holm : of exposed and contrast, sign flips against a mean of 0, adjusted together.
    bootstrap_95 : secondary; at 10 texts it really covers about 90 %.
    detectable_nats : smallest mean shift at 80 % power, two-sided 5 %, over texts and launches.
    leave_one_out : text left out, mean and interval without it.
    between_launch_error_nats : standard error of the mean difference from launches, and its df.
    token_rate_bound, text_rate_bound : 95 % bounds on the rate of differing tokens and texts where
        none differs, as if independent; None where one does.
    tokens_to_see_one_in_a_million : exposed tokens that show a wrong row in 10^6 with 95 %.

    """

    exposed: Tost
    margin_percent: float
    contrast: Tost | None
    p_zero: float
    p_zero_holm: dict[str, float]
    bootstrap_95: tuple[float, float] | None
    detectable_nats: float | None
    leave_one_out: dict[str, tuple[float, float, float]]
    noise: Noise | None
    between_launch_error_nats: tuple[float, int] | None
    token_rate_bound: float | None
    text_rate_bound: float | None
    tokens_to_see_one_in_a_million: int


class Subject(_Frozen):
    """What was compared, in the words of the stored keys."""

    model: str
    arguments: tuple[str, ...]
    versions: dict[str, str]
    routes: dict[str, list[str]]


class Flip(_Frozen):
    """A row whose arg-max differs; margins are of the best over the second best, in nats."""

    row: int
    exposed: bool
    stock_id: int
    fused_id: int
    stock_margin_nats: float | None
    fused_margin_nats: float | None


class TopAgreement(_Frozen):
    """Where the arg-maxes of the first run of each arm agree, for one text.

    Attributes
    ----------
    noise_agreeing : rows at which a second run of the stock arm agrees with its first; None where
        there is none, or it stored no arg-max.
    largest_margin_nats : of the stock arm at a flip; None without a flip or a second best.
    flips : those with the largest margins, at most ``ppl.top1.SHOWN``.
    later_flips : rows, over the fused arm's later runs, whose arg-max isn't the first stock run's.

    """

    text: str
    rows: int
    agreeing: int
    exposed_rows: int
    exposed_agreeing: int
    noise_agreeing: int | None
    largest_margin_nats: float | None
    flips: list[Flip]
    later_flips: int = 0


class PplEvidence(_Frozen):
    """``ppl.json``."""

    schema_name: Literal["bytegate.ppl"] = Field(default="bytegate.ppl", alias="schema")
    schema_version: Literal[1] = 1
    verdict: str
    exit_code: int
    decided: Verdict
    claim: Claim
    margin_nats: float | None
    margin_stated: bool
    runs: list[tuple[str, int, int]]
    identity: Identity | None
    pooled_perplexity: dict[str, float]
    statistics: Statistics | None
    texts: list[TextResult]
    not_covered: list[str]
    warnings: list[str]
    inputs_sha256: str
    subject: Subject | None = None
    top1: list[TopAgreement] = []
    suite: dict[str, JsonValue] = {}
    """Which bytegate compared: ``equiv.environment.suite``; empty where nobody asked."""
    content_sha256: str = ""
    run: RunFacts | None = None

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True
    )

    @property
    def marks(self) -> list[str]:
        """What sets any of its runs apart, ``run`` being the first: EMULATED, SHARED GPU."""
        marks = (emulation.MARK, sharing.MARK)
        return [m for m in marks if any(w.startswith(m) for w in self.warnings)]

    @property
    def only_emulated(self) -> bool:
        """Whether its first run emulated fp8 prefill, and nothing tells of one that didn't."""
        if self.run is None or not self.run.emulates_fp8:
            return False
        return not any(x.startswith(emulation.OPEN) for x in self.not_covered)


def contradictions(made: PplEvidence) -> list[str]:
    """Say what in the evidence can't be true together."""
    wrong = []
    decided = made.decided
    if made.verdict != decided.word or made.exit_code != decided.exit_code:
        wrong.append(f"verdict {made.verdict!r} and decided {decided.word!r}")
    if decided.exit_code != exit_code(decided.word, decided.claim) or decided.claim != made.claim:
        wrong.append(f"{decided.word} with exit code {decided.exit_code} under {made.claim!r}")
    if made.verdict == "IDENTICAL":
        if not made.texts or made.identity is None:
            wrong.append("IDENTICAL without texts")
        wrong += [f"IDENTICAL, and {t.text} isn't" for t in made.texts if not t.bit_identical]
        wrong += [
            f"IDENTICAL, and arg-maxes of {t.text} aren't"
            for t in made.top1
            if t.agreeing < t.rows or t.later_flips
        ]
    if made.verdict != "INVALID" and made.statistics is None:
        wrong.append(f"{made.verdict} without statistics")
    means = [t.difference_nats[0] for t in made.texts if t.difference_nats is not None]
    if made.statistics is not None and len(means) == len(made.texts):
        mean = made.statistics.exposed.mean
        if not math.isclose(math.fsum(means) / len(means), mean, rel_tol=1e-9, abs_tol=1e-15):
            wrong.append("the mean of the texts and that of the statistics")
    wrong += [
        f"{t.text}: arg-maxes"
        for t in made.top1
        if not (0 <= t.exposed_agreeing <= t.agreeing <= t.rows and t.exposed_rows <= t.rows)
        or (t.agreeing < t.rows) != bool(t.flips)
    ]
    if made.run is not None and made.verdict != "INVALID" and made.run.reasons():
        wrong.append(f"{made.verdict}, and the run says {made.run.reasons()[0]!r}")
    wrong += _unsaid(made)
    wrong += [f"{t.text}: ULP counts" for t in made.texts if sum(t.ulp.values()) != t.rows]
    return wrong


def _unsaid(made: PplEvidence) -> list[str]:
    """Name what a run that emulates, or whose ranks share GPUs, must say of itself and doesn't."""
    run = made.run
    if run is None:
        return []
    lists = {"warnings": made.warnings, "reasons": made.decided.reasons}
    wanted = {emulation.MARK: "fp8 prefill was emulated"} if run.emulates_fp8 else {}
    wanted |= {sharing.MARK: "ranks shared a GPU"} if run.shares_gpu else {}
    return [
        f"{what}, and the {name} don't say so"
        for mark, what in wanted.items()
        for name, lines in lists.items()
        if not any(x.startswith(mark) for x in lines)
    ]


def write(path: Path, made: PplEvidence) -> None:
    """Write evidence whole or not at all.

    Raises
    ------
    PplError : it contradicts itself.

    """
    wrong = contradictions(made)
    if wrong:
        raise PplError(f"refusing to write evidence that contradicts itself: {wrong[0]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, seal.sealed(made.model_dump_json()))
    except OSError as e:
        raise PplError(f"can't write {path}: {e.strerror}") from None


def read(path: Path) -> PplEvidence:
    """Read and check evidence.

    Raises
    ------
    PplError : unreadable, damaged, or it contradicts itself.

    """
    try:
        raw = path.read_bytes()
        made = PplEvidence.model_validate_json(raw, strict=True)
    except ValidationError as e:
        one = e.errors()[0]
        where = ".".join(str(x) for x in one["loc"])
        raise PplError(f"the evidence {path} is damaged: {where}: {one['msg']}") from None
    except OSError as e:
        raise PplError(f"can't read the evidence {path}: {e.strerror}") from None
    wrong = contradictions(made)
    if wrong:
        raise PplError(f"the evidence {path} contradicts itself: {'; '.join(wrong[:3])}")
    if damage := seal.broken(json.loads(raw)):
        raise PplError(f"the evidence {path} is damaged: {damage}")
    return made


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``ppl.json``."""
    return PplEvidence.model_json_schema()


def digest(parts: list[str]) -> str:
    """Return one SHA-256 over digests, whatever their order."""
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()
