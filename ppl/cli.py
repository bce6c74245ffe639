"""The commands of ``bytegate ppl``: run, compare and schema."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from equiv import document
from equiv.evidence import write_text
from ppl.errors import PplError
from ppl.run_cli import RunByDefault, run

ppl_app = typer.Typer(
    cls=RunByDefault,
    rich_markup_mode=None,
    help="Compare two servers token by token.",
)
CLAIMS = ("identical", "equivalent")


def _module(name: str) -> ModuleType:
    """Import a module of this room that needs more than a GPU host has."""
    try:
        return importlib.import_module(f"ppl.{name}")
    except ModuleNotFoundError as e:
        raise PplError(f"this needs {e.name}: pip install 'bytegate[ppl]'") from None


@ppl_app.callback()
def ppl() -> None:
    """Compare two servers token by token."""


ppl_app.command()(run)


@ppl_app.command()
def compare(
    folder: Annotated[
        list[Path], typer.Argument(help="Folders of stored results; together both arms.")
    ],
    *,
    claim: Annotated[str, typer.Option(help="identical or equivalent.")] = "identical",
    margin: Annotated[
        float | None,
        typer.Option(help="Nats; by default max(1e-4, 3 standard errors between launches)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for ppl.json and ppl.md.")] = Path("out/ppl"),
) -> None:
    """Compare stored results, without a server."""
    if claim not in CLAIMS:
        raise PplError(f"claim {claim!r}: expected identical or equivalent")
    made: Any = _module("judge").compare_stored(folder, claim=claim, margin=margin)
    _module("evidence").write(out / "ppl.json", made)
    blocks = _module("report").blocks(made)
    document.show(blocks, sys.stdout)
    write_text(out / "ppl.md", document.markdown(blocks))
    raise typer.Exit(made.exit_code)


@ppl_app.command()
def schema() -> None:
    """Print the JSON Schema of ppl.json."""
    sys.stdout.write(json.dumps(_module("evidence").json_schema(), indent=2) + "\n")
