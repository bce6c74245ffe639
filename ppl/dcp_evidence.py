"""``dcp.json``: a sharded server against one of tensor parallelism alone, and the verdict on it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from equiv import document, environment, seal
from equiv.document import Block, Exact, Facts, Heading, Items, Table
from equiv.errors import ExitCode
from equiv.evidence import write_text
from ppl import rounding, sharing
from ppl.errors import PplError
from ppl.rounding import Mask, Tolerance
from ppl.stats import ArrayF8

Word = Literal["WITHIN", "OUTSIDE", "NOT_COVERED", "INVALID"]
EXIT: dict[Word, ExitCode] = {
    "WITHIN": ExitCode.PASS,
    "OUTSIDE": ExitCode.FAIL,
    "NOT_COVERED": ExitCode.INVALID,
    "INVALID": ExitCode.INVALID,
}


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextFigures(_Frozen):
    """Sharded minus alone, in nats, of one text.

    Attributes
    ----------
    judged : tokens with a context behind them in both servers' loops; all figures but those of the
        control and of decode are of them.
    merged : of those, tokens whose context takes a continuation in the sharded server.
    control, control_differing : tokens with nothing behind their chunk, and how many of them
        aren't bit-equal: sharding can't touch them.
    decode : tokens of a tail that runs as decode; not judged.
    rms_allowed, largest_allowed, mean_error : as of ``ppl.rounding.Tolerance``.

    """

    text: str
    rows: int
    judged: int
    merged: int
    differing: int
    mean_nats: float
    sd_nats: float
    rms_nats: float
    largest_nats: float
    largest_row: int
    control: int
    control_differing: int
    control_largest_nats: float
    decode: int
    decode_largest_nats: float
    rms_allowed: float | None
    largest_allowed: float | None
    mean_error: float | None

    @classmethod
    def of(
        cls,
        name: str,
        d: ArrayF8,
        *,
        loop: Mask,
        behind: Mask,
        differing: NDArray[np.bool_],
        merged_from: int,
        allowed: Tolerance | None,
    ) -> Self:
        """Sum up a text's differences ``d``; masks are over its rows."""
        mine = d[loop]
        control, decode = np.abs(d[~behind]), np.abs(d[behind & ~loop])
        rows = np.flatnonzero(loop)
        row = int(rows[np.abs(mine).argmax()]) if len(mine) else 0
        return cls(
            text=name,
            rows=len(d),
            judged=len(mine),
            merged=int(loop[merged_from:].sum()),
            differing=int(differing[loop].sum()),
            mean_nats=float(mine.mean()) if len(mine) else 0.0,
            sd_nats=float(mine.std()) if len(mine) else 0.0,
            rms_nats=rounding.rms(mine) if len(mine) else 0.0,
            largest_nats=float(d[row]),
            largest_row=row,
            control=len(control),
            control_differing=int(differing[~behind].sum()),
            control_largest_nats=float(control.max(initial=0.0)),
            decode=len(decode),
            decode_largest_nats=float(decode.max(initial=0.0)),
            rms_allowed=allowed.rms if allowed else None,
            largest_allowed=allowed.largest if allowed else None,
            mean_error=allowed.mean_error if allowed else None,
        )

    def outside(self) -> list[str]:
        """Say in what the text is outside its tolerance."""
        if self.rms_allowed is None:
            return []
        found = []
        if self.rms_nats > self.rms_allowed:
            found.append(
                f"text {self.text}: root mean square {self.rms_nats:.3g} nats, roundings allow "
                f"{self.rms_allowed:.3g}"
            )
        largest = max(abs(self.largest_nats), self.control_largest_nats)
        if self.largest_allowed is not None and largest > self.largest_allowed:
            found.append(
                f"text {self.text}: a token moved by {largest:.3g} nats, roundings allow "
                f"{self.largest_allowed:.3g}"
            )
        return found

    def decoding(self) -> list[str]:
        """Say where a tail that runs as decode is further off than roundings carry the loop."""
        if self.largest_allowed is None or self.decode_largest_nats <= self.largest_allowed:
            return []
        moved = f"moves by up to {self.decode_largest_nats:.3g} nats"
        allowed = f"where roundings allow the loop {self.largest_allowed:.3g}"
        tail = f"text {self.text}: its tail of {self.decode:,} tokens runs as decode, past the loop"
        return [f"{tail}, and {moved}, {allowed}: that decode isn't judged"]


class DcpEvidence(_Frozen):
    """The comparison: ``mean_nats`` is the mean over texts of their means."""

    schema_name: Literal["bytegate.ppl.dcp"] = Field(default="bytegate.ppl.dcp", alias="schema")
    schema_version: Literal[1] = 1
    verdict: Word
    exit_code: int
    reasons: list[str]
    mean_nats: float | None
    mean_allowed: float | None
    texts: list[TextFigures]
    not_covered: list[str]
    facts: dict[str, JsonValue]
    suite: dict[str, JsonValue] = {}
    content_sha256: str = ""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        outside = [x for t in self.texts for x in t.outside()]
        if self.exit_code != int(EXIT[self.verdict]):
            raise ValueError(f"exit code {self.exit_code} of {self.verdict}")
        if self.verdict == "WITHIN" and (outside or not self.texts or self.mean_allowed is None):
            raise ValueError(f"WITHIN, and {outside[0] if outside else 'nothing shows it'}")
        if _sharing(self.facts) and not any(x.startswith(sharing.MARK) for x in self.reasons):
            raise ValueError("ranks shared a GPU, and the reasons don't say so")
        return self


def _sharing(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the facts of the servers whose ranks shared GPUs (``ppl.sharing``)."""
    servers = [x.get("facts") for x in facts.values() if isinstance(x, dict)]
    return [x for x in servers if isinstance(x, dict) and sharing.of(x)]


def figures(
    texts: Sequence[TextFigures],
    *,
    amiss: Sequence[str],
    not_covered: Sequence[str],
    facts: dict[str, Any],
    twins: int = rounding.TWINS,
) -> DcpEvidence:
    """Judge what was measured: invalid, not covered, outside or within what roundings allow.

    Parameters
    ----------
    twins : from how many a text's ``mean_error`` comes.

    """
    errors = [t.mean_error for t in texts if t.mean_error is not None]
    mean = math.fsum(t.mean_nats for t in texts) / len(texts) if texts else None
    allowed = (
        rounding.mean_tolerance(errors, twins) if texts and len(errors) == len(texts) else None
    )
    outside = [x for t in texts for x in t.outside()]
    if mean is not None and allowed is not None and abs(mean) > allowed:
        outside.insert(0, f"mean over texts {mean:.3g} nats, roundings allow {allowed:.3g}")
    word: Word
    if amiss or not texts:
        word, reasons = "INVALID", list(amiss) or ["no text was scored on both servers"]
    elif allowed is None:
        word, reasons = "NOT_COVERED", ["no tolerance could be derived for this model"]
    elif outside:
        word, reasons = "OUTSIDE", outside
    else:
        word = "WITHIN"
        reasons = ["every text, and the mean over texts, lies within what roundings allow"]
    reasons += sharing.warnings(shared=bool(_sharing(facts)))
    return DcpEvidence(
        verdict=word,
        exit_code=int(EXIT[word]),
        reasons=reasons,
        mean_nats=mean,
        mean_allowed=allowed,
        texts=list(texts),
        not_covered=list(dict.fromkeys([*not_covered, *(x for t in texts for x in t.decoding())])),
        facts=facts,
        suite=environment.suite(),
    )


def write(folder: Path, made: DcpEvidence, command: str) -> None:
    """Write ``dcp.md`` and ``dcp.json``, each whole or not at all.

    Raises
    ------
    PplError : a file can't be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "dcp.md", document.markdown(blocks(made, command)))
        write_text(folder / "dcp.json", seal.sealed(made.model_dump_json()))
    except OSError as e:
        raise PplError(f"can't write to {folder}: {e.strerror}") from None


def read(path: Path) -> DcpEvidence:
    """Read ``dcp.json``.

    Raises
    ------
    PplError : unreadable, damaged, or it contradicts itself.

    """
    try:
        raw = path.read_bytes()
        made = DcpEvidence.model_validate_json(raw)
    except OSError as e:
        raise PplError(f"can't read {path}: {e.strerror}") from None
    except ValidationError as e:
        raise PplError(f"{path} is damaged: {e.errors()[0]['msg']}") from None
    if damage := seal.broken(json.loads(raw)):
        raise PplError(f"{path} is damaged: {damage}")
    return made


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def blocks(made: DcpEvidence, command: str = "") -> list[Block]:
    """Return the report, for a terminal and for Markdown."""
    sums = [sum(getattr(t, n) for t in made.texts) for n in ("judged", "merged", "differing")]
    control = [sum(getattr(t, n) for t in made.texts) for n in ("control", "control_differing")]
    shared = _sharing(made.facts)
    found: list[Block] = [
        Heading("bytegate ppl dcp", 1, made.verdict),
        Items(tuple(made.reasons[:20])),
        Facts(
            (
                ("model", str(made.facts.get("model", ""))),
                ("tokens judged", f"{sums[0]:,}, {sums[1]:,} of them past a continuation"),
                ("of them not bit-equal", f"{sums[2]:,}"),
                ("control, nothing behind the chunk", f"{control[0]:,}"),
                ("of it not bit-equal", f"{control[1]:,}"),
                ("mean over texts, nats", _nats(made.mean_nats)),
                ("roundings allow", _nats(made.mean_allowed)),
                ("tolerance from", str(made.facts.get("tolerance", "nothing"))),
                *((("GPUs", sharing.line(shared)),) if shared else ()),
            )
        ),
    ]
    columns = ("text", "judged", "mean", "sd", "rms", "allowed", "largest", "allowed ", "at row")
    rows = tuple(
        (
            t.text,
            f"{t.judged:,}",
            _nats(t.mean_nats),
            _nats(t.sd_nats),
            _nats(t.rms_nats),
            _nats(t.rms_allowed),
            _nats(t.largest_nats),
            _nats(t.largest_allowed),
            f"{t.largest_row:,}",
        )
        for t in made.texts
    )
    if rows:
        found += [Heading("By text: sharded minus alone, nats"), Table(columns, rows, columns[1:])]
    if made.not_covered:
        found += [
            Heading("Not covered"),
            Items(tuple(f"NOT COVERED: {x}" for x in made.not_covered)),
        ]
    if command:
        found += [Heading("Repeat it"), Exact((command,))]
    return found
