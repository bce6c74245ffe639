"""What a comparison leaves in its folder: tokens.parquet, ppl.html, ppl.md and ppl.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from equiv import document
from equiv.evidence import write_text
from ppl import charts, evidence, facts, page, report, tokens
from ppl.errors import PplError
from ppl.evidence import PplEvidence
from ppl.store import Stored


def spare(out: Path, made: PplEvidence, folders: Sequence[Path]) -> None:
    """Refuse a folder that holds the report, or the state, of other results than were compared.

    Parameters
    ----------
    folders : those that were compared: a report may always stand beside its results.

    Raises
    ------
    PplError : it does.

    """
    if out.resolve() in {folder.resolve() for folder in folders}:
        return
    held = ""
    if (out / facts.NAME).exists() or (out / "scores").exists():
        held = "the results of another run"
    elif (out / "ppl.json").exists():
        try:
            other = evidence.read(out / "ppl.json").inputs_sha256 != made.inputs_sha256
        except PplError:
            other = True
        held = "the report of other results" if other else ""
    if held:
        raise PplError(f"{out} holds {held}, which would be lost: give --out another folder")


def leave(out: Path, made: PplEvidence, found: Stored, *, command: str = "") -> None:
    """Write the four files, each whole or not at all; ppl.json last.

    Where no text could be compared there is no tokens.parquet, nor one of an earlier comparison.

    Parameters
    ----------
    found : the stored results that the evidence was made from.
    command : how to make it again.

    Raises
    ------
    PplError : a stored result is damaged, the evidence contradicts itself, or a file can't be
        written.

    """
    drawn = charts.draw(made, found)
    try:
        if made.texts:
            tokens.write(out / "tokens.parquet", made, found)
        else:
            (out / "tokens.parquet").unlink(missing_ok=True)
        write_text(out / "ppl.html", page.html(made, drawn, command))
        write_text(out / "ppl.md", document.markdown(report.blocks(made, command)))
    except OSError as e:
        raise PplError(f"can't write to {out}: {e.strerror}") from None
    evidence.write(out / "ppl.json", made)
