"""Arg-maxes: whether both arms rank the same token first, and by how much each flip was decided.

They are optional (``bytegate ppl run --top1``). A result whose server was asked for them has a file
of them beside its array, which its record names in ``response["top"]``: ids ``[rows, k]`` int32,
then log-probabilities ``[rows, k]`` float32, little-endian, best first. Two (k = 2) give the margin
of the first over the second; one gives the flips alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from equiv.files import write_whole
from ppl.errors import PplError
from ppl.evidence import Flip, PplEvidence, TopAgreement
from ppl.runs import Run
from ppl.store import MOST, Floats, Record, Store, Stored
from ppl.verdict import Verdict, exit_code

SHOWN = 20
"""Flips listed for a text; all of them are in tokens.parquet."""


@dataclass(frozen=True)
class Top:
    """The best ids of each row and their log-probabilities, ``[rows, k]``, best first."""

    ids: NDArray[np.int32]
    logprobs: Floats

    @property
    def margins(self) -> Floats | None:
        """Log-probability of the best above the second best, in nats; None where k is 1."""
        if self.ids.shape[1] == 1:
            return None
        return np.asarray(self.logprobs[:, 0] - self.logprobs[:, 1])


def _check(top: Top, rows: int, what: str) -> Top:
    ids, logprobs = top.ids, top.logprobs
    if ids.shape != logprobs.shape or ids.ndim != 2 or len(ids) != rows or not ids.size:  # noqa: PLR2004
        raise PplError(f"{what}: arg-maxes of shape {ids.shape}, expected {rows:,} rows and 1 to k")
    good = np.isfinite(logprobs) & (logprobs <= MOST) & (ids >= 0)
    good[:, 1:] &= logprobs[:, 1:] <= logprobs[:, :-1]
    if not good.all():
        row = int(good.all(axis=1).argmin())
        raise PplError(f"{what}: row {row} of the arg-maxes isn't finite, at most 0, best first")
    return top


def put(store: Store, text: str, ids: NDArray[np.int32], logprobs: Floats) -> JsonValue:
    """Write arg-maxes beside a text's results, and return what ``response["top"]`` must hold.

    Call it before ``Store.put``, so that a record that is there has its arg-maxes.

    Parameters
    ----------
    ids, logprobs : ``[rows, k]``, int32 and float32, best first.

    Raises
    ------
    PplError : shapes, order or values that can't be, or the file can't be written.

    """
    top = _check(Top(ids.astype("<i4"), logprobs.astype("<f4")), len(ids), f"text {text}")
    data = top.ids.tobytes() + top.logprobs.tobytes()
    digest = hashlib.sha256(data).hexdigest()
    try:
        write_whole(store.text_folder(text) / f"{digest[:32]}.top", data)
    except OSError as e:
        raise PplError(f"can't write to {store.folder}: {e.strerror}") from None
    return {"sha256": digest, "k": top.ids.shape[1]}


def load(store: Store, record: Record) -> Top | None:
    """Return a result's arg-maxes, checked against their digest; None where it has none.

    Raises
    ------
    PplError : missing, damaged, or values that can't be.

    """
    named = record.response.get("top")
    if named is None:
        return None
    what = f"text {record.key.text}, {record.arm} launch {record.launch} repeat {record.repeat}"
    digest, k = (named.get("sha256"), named.get("k")) if isinstance(named, dict) else (None, None)
    if not isinstance(digest, str) or not isinstance(k, int) or k < 1:
        raise PplError(f"{what}: response.top is {named!r}, expected its sha256 and k")
    path = store.text_folder(record.key.text) / f"{digest[:32]}.top"
    try:
        data = path.read_bytes()
    except OSError as e:
        raise PplError(f"can't read {path}: {e.strerror}") from None
    if hashlib.sha256(data).hexdigest() != digest or len(data) != record.rows * k * 8:
        raise PplError(f"{path} is damaged: its SHA-256 isn't its record's; score it again")
    half = len(data) // 2
    ids = np.frombuffer(data[:half], "<i4").reshape(-1, k)
    logprobs = np.frombuffer(data[half:], "<f4").reshape(-1, k)
    return _check(Top(ids, logprobs), record.rows, what)


def decided(so_far: Verdict, found: Sequence[TopAgreement]) -> Verdict:
    """Return a verdict that knows of flips: equal scores with another arg-max aren't IDENTICAL.

    The scores of a text's own tokens can't tell what a server would say next in their place.
    """
    flipped = sum(t.rows - t.agreeing for t in found)
    later = sum(t.later_flips for t in found)
    if so_far.word != "IDENTICAL" or not flipped + later:
        return so_far
    margins = [t.largest_margin_nats for t in found if t.largest_margin_nats is not None]
    by = f", by up to {max(margins):.3g} nats" if margins else ""
    rows = sum(t.rows for t in found)
    parts = [f"the arg-max of {flipped:,} of {rows:,} rows isn't the same{by}"] if flipped else []
    parts += [f"the arg-max of {later:,} rows of later fused runs isn't stock's"] if later else []
    why = f"every scored token is bit-equal, but {' and '.join(parts)}"
    return so_far.model_copy(
        update={
            "word": "EQUIVALENT",
            "exit_code": exit_code("EQUIVALENT", so_far.claim),
            "reasons": (why,),
        }
    )


def agreements(made: PplEvidence, found: Stored) -> list[TopAgreement]:
    """Compare the arg-maxes of each arm's first run, for each text whose runs stored them.

    Of later runs of the fused arm flips are counted: a relaunch may rank otherwise.
    """
    stock = [r for r in made.runs if r[0] == "stock"]
    fused = [r for r in made.runs if r[0] == "fused"]
    results = []
    for text in made.texts:
        first, other = (_of(found, text.text, runs[0]) for runs in (stock, fused))
        if first is not None and other is not None:
            # A relaunch tells more than a repeat.
            again = max(stock[1:], key=lambda r: (r[1] != stock[0][1], -r[1], -r[2]), default=None)
            noise = None if again is None else _of(found, text.text, again)
            record = found[text.text, stock[0]][1]
            one = _agreement(text.text, record.exposed_from, first, other, noise)
            later = (_of(found, text.text, r) for r in fused[1:])
            flips = sum(
                int((first.ids[:, 0] != top.ids[:, 0]).sum()) for top in later if top is not None
            )
            results.append(one.model_copy(update={"later_flips": flips}))
    return results


def _of(found: Mapping[tuple[str, Run], tuple[Store, Record]], text: str, run: Run) -> Top | None:
    return load(*found[text, run])


def _agreement(
    text: str, exposed_from: int, stock: Top, fused: Top, noise: Top | None
) -> TopAgreement:
    same = stock.ids[:, 0] == fused.ids[:, 0]
    rows = np.flatnonzero(~same)
    margins = (stock.margins, fused.margins)
    if margins[0] is not None:
        rows = rows[np.argsort(-margins[0][rows], kind="stable")]

    def margin(which: int, row: int) -> float | None:
        values = margins[which]
        return None if values is None else float(values[row])

    return TopAgreement(
        text=text,
        rows=len(same),
        agreeing=int(same.sum()),
        exposed_rows=len(same) - exposed_from,
        exposed_agreeing=int(same[exposed_from:].sum()),
        noise_agreeing=None if noise is None else int((stock.ids[:, 0] == noise.ids[:, 0]).sum()),
        largest_margin_nats=margin(0, int(rows[0])) if len(rows) else None,
        flips=[
            Flip(
                row=row,
                exposed=row >= exposed_from,
                stock_id=int(stock.ids[row, 0]),
                fused_id=int(fused.ids[row, 0]),
                stock_margin_nats=margin(0, row),
                fused_margin_nats=margin(1, row),
            )
            for row in rows[:SHOWN].tolist()
        ],
    )
