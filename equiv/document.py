"""A report as blocks, and the two ways to write them: for a terminal, and as Markdown.

On a terminal tables fit its width and states are coloured; elsewhere nothing is wrapped, coloured
or padded. ``Exact`` lines are never wrapped anywhere, so that they can be copied.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

UNBOUNDED = 1 << 16
"""Columns of an output that isn't a terminal: wider than any row."""

STYLES = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "NOT COVERED": "bold yellow",
    "passed": "green",
    "caught": "green",
    "clean": "green",
    "seen": "green",
    "failed": "red",
    "missed": "red",
    "gone": "red",
    "not covered": "yellow",
    "covered": "green",
    "partly": "yellow",
    "not exercised": "yellow",
}
"""Colours of words that are states."""


@dataclass(frozen=True)
class Heading:
    """A heading; its state, where it has one, follows in its colour."""

    text: str
    level: int = 2
    state: str = ""


@dataclass(frozen=True)
class Line:
    """A paragraph, after a state in its colour."""

    text: str
    state: str = ""


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Exact:
    """Lines to be copied as they are."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Labels and values. A value in a tuple of its own is code, such as a case's line."""

    facts: tuple[tuple[str, str | tuple[str]], ...]


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; ``numbers`` are the columns aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[str, ...] = ()


Block = Heading | Line | Items | Exact | Facts | Table


def printable(text: str) -> str:
    r"""Write characters that would move a cursor, or end a line, as ``\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(n: int, what: str) -> str:
    """Return ``"1 case"``, ``"1,234 cases"``."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# -- terminal -----------------------------------------------------------------------


def console_for(file: TextIO) -> Console:
    """Return a rich console that colours and wraps on a terminal only."""
    terminal = file.isatty()
    return Console(
        file=file,
        force_terminal=terminal,
        no_color=not terminal or bool(os.environ.get("NO_COLOR")),
        width=None if terminal else UNBOUNDED,
        highlight=False,
        markup=False,
        emoji=False,
    )


def show(blocks: Iterable[Block], file: TextIO) -> None:
    """Print blocks to a file, as its kind allows."""
    if file.isatty():
        console = console_for(file)
        for block in blocks:
            _print(console, block)
        return
    # Rendered apart, because rich pads tables with blanks and can't write to every encoding.
    text = io.StringIO()
    console = console_for(text)
    for block in blocks:
        _print(console, block)
    lines = "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(lines.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


def _print(console: Console, block: Block) -> None:
    match block:
        case Heading(text, level, state):
            console.print()
            line = Text(printable(text), "bold" if level <= 2 else "")  # noqa: PLR2004 - sections
            _unwrapped(console, line.append(f": {state}", STYLES.get(state)) if state else line)
        case Line(text, state):
            line = Text(state, STYLES.get(state, "bold")) if state else Text()
            _unwrapped(console, line.append(f"  {printable(text)}" if state else printable(text)))
        case Items(items):
            for item in items:
                _unwrapped(console, Text(f"  - {printable(item)}"))
        case Exact(lines):
            for exact in lines:
                _unwrapped(console, Text(f"  {printable(exact)}", "cyan"))
        case Facts(facts):
            width = max((len(label) for label, _ in facts), default=0)
            for label, value in facts:
                plain = value if isinstance(value, str) else value[0]
                line = Text().append(f"  {label:<{width}}  ", "dim")
                style = "" if isinstance(value, str) else "cyan"
                _unwrapped(console, line.append(printable(plain), style))
        case Table():
            console.print(Padding(_table(block), (0, 0, 0, 2), expand=False))


def _unwrapped(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def _table(block: Table) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in block.columns:
        right = name in block.numbers
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for column in table.columns[:2]:
        column.no_wrap = True  # the names of lanes and states
    for row in block.rows:
        table.add_row(*[Text(printable(cell), STYLES.get(cell, "")) for cell in row])
    return table


# -- Markdown -----------------------------------------------------------------------

_SPECIAL = re.compile(r"[\\`*<>\[\]|~]|^#|(?<!\w)_|_(?!\w)")


def markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as GitHub's Markdown."""
    return "\n".join(_markdown(block) for block in blocks)


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level, state):
            return f"{'#' * level} {_escaped(text)}{f': {state}' if state else ''}\n"
        case Line(text, state):
            return f"**{state}** {_escaped(text)}\n" if state else f"{_escaped(text)}\n"
        case Items(items):
            return "".join(f"- {_escaped(item)}\n" for item in items)
        case Exact(lines):
            body = "\n".join(printable(line) for line in lines)
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
            return f"{fence}text\n{body}\n{fence}\n"
        case Facts(facts):
            # A fact without a label is more of the one before it.
            return "".join(
                f"- **{_escaped(label)}** {_value(value)}\n" if label else f"  - {_value(value)}\n"
                for label, value in facts
            )
        case Table(columns, rows, numbers):
            marks = ("---:" if name in numbers else "---" for name in columns)
            cells = [tuple(map(_escaped, columns)), tuple(marks)]
            cells += [tuple(map(_escaped, row)) for row in rows]
            return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _value(value: str | tuple[str]) -> str:
    return _escaped(value) if isinstance(value, str) else code(value[0])


def code(text: str) -> str:
    """Return a span of code, whatever backticks the text has."""
    plain = printable(text)
    ticks = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    room = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{ticks}{room}{plain}{room}{ticks}"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", printable(text))
