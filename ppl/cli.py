"""The commands of ``bytegate ppl``: run, dcp, compare and schema."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from equiv import document
from ppl.dcp_cli import dcp
from ppl.errors import PplError
from ppl.run_cli import RunByDefault, module, run

ppl_app = typer.Typer(
    cls=RunByDefault,
    rich_markup_mode=None,
    help="Compare two servers token by token.",
)
CLAIMS = ("identical", "equivalent")


@ppl_app.callback()
def ppl() -> None:
    """Compare two servers token by token."""


ppl_app.command()(run)
ppl_app.command()(dcp)


@ppl_app.command()
def compare(
    folder: Annotated[
        list[Path], typer.Argument(help="Folders of stored results; together both arms.")
    ],
    *,
    claim: Annotated[
        str | None,
        typer.Option(help="identical or equivalent; default: what the run stated, or identical."),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="Nats; default: what the run stated, or max(1e-4, 3 standard errors between "
            "launches)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for ppl.json, .md, .html and tokens.parquet; default: compare, in the "
            "first FOLDER."
        ),
    ] = None,
) -> None:
    """Compare stored results, without a server."""
    if claim not in {None, *CLAIMS}:
        raise PplError(f"claim {claim!r}: expected identical or equivalent")
    outputs, judge = module("outputs"), module("judge")
    claim, margin = judge.stated(folder, claim, margin)
    made: Any = judge.compare_stored(folder, claim=claim, margin=margin)
    out = out or folder[0] / "compare"
    outputs.spare(out, made, folder)
    words = ["bytegate", "ppl", "compare", *map(str, folder), "--claim", claim]
    words += [] if margin is None else ["--margin", repr(margin)]
    words += ["--out", str(out)]
    outputs.leave(out, made, judge.gather(folder), command=shlex.join(words))
    document.show(module("report").blocks(made), sys.stdout)
    raise typer.Exit(made.exit_code)


@ppl_app.command()
def schema() -> None:
    """Print the JSON Schema of ppl.json."""
    sys.stdout.write(json.dumps(module("evidence").json_schema(), indent=2) + "\n")
