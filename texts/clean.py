"""From the bytes of a file to plain text."""

from __future__ import annotations

import json
import re

from texts.errors import TextError
from texts.manifest import Part

_HEAD = re.compile(
    r"^(?:\*{3} ?START OF .*|\*END\*? ?THE SMALL PRINT.*"
    r"|[ \t]*(?:The|This is the)\b.*\bProject Gutenberg (?:Etext|EBook|release) of.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_TAIL = re.compile(
    r"^(?:\*{3} ?END OF .*|\*{0,3} ?End of (?:the|this) Project Gutenberg.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_HEAD_SHARE = 0.2
"""Gutenberg's header is looked for in this share of a file, and its footer in the last."""


def strip_gutenberg(text: str) -> str:
    """Leave out Project Gutenberg's own header and footer, where there are any."""
    for found in _TAIL.finditer(text):
        if found.start() >= len(text) * (1 - _HEAD_SHARE):
            text = text[: found.start()]
            break
    start = 0
    for found in _HEAD.finditer(text):
        if found.start() <= max(len(text) * _HEAD_SHARE, 20_000):
            start = found.end()
    return text[start:].strip("\n") + "\n" if text.strip() else ""


def decode(data: bytes, what: str) -> str:
    """Decode UTF-8, with or without a mark, and end lines with a newline alone.

    Raises
    ------
    TextError : it isn't UTF-8.

    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise TextError(f"{what}: byte {e.start} is not UTF-8; convert it first") from None
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    # Files from DOS end with a control-Z or two.
    return lines.rstrip("\x00\x1a\n") + "\n" if lines else ""


def clean(data: bytes, part: Part, what: str) -> str:
    """Return the text of a manifest's part.

    Raises
    ------
    TextError : not of the form that the manifest says, or a mark isn't there.

    """
    text = decode(data, what)
    try:
        if part.form == "verses":
            text = _verses(text)
        elif part.form == "chapters":
            text = _chapters(text)
    except (ValueError, KeyError, TypeError) as e:
        raise TextError(f"{what}: not of the form {part.form!r}: {e!r}") from None
    text = _between(strip_gutenberg(text), part, what)
    if part.drop:
        pattern = re.compile(part.drop)
        text = "".join(x for x in text.splitlines(keepends=True) if not pattern.match(x))
    return text


def _between(text: str, part: Part, what: str) -> str:
    start = _find(text, part.start, 0, what) if part.start else 0
    end = _find(text, part.end, start + 1, what) if part.end else len(text)
    return text[start:end]


def _find(text: str, mark: str, at: int, what: str) -> int:
    """Return where a line begins with the mark."""
    found = re.compile(rf"^{re.escape(mark)}(?!\w)", re.MULTILINE).search(text, at)
    if found is None:
        raise TextError(f"{what}: no line begins with {mark!r}; is it the right file?")
    return found.start()


def _verses(text: str) -> str:
    lines: list[str] = []
    at = ("", 0)
    for line in text.splitlines():
        verse = json.loads(line)
        here = (str(verse["book"]), int(verse["chapter"]))
        if here != at:
            lines.append(f"\n{here[0]} {here[1]}\n" if lines else f"{here[0]} {here[1]}\n")
            at = here
        lines.append(f"{verse['verse']} {verse['text']}")
    return "\n".join(lines) + "\n"


def _chapters(text: str) -> str:
    found = json.loads(text)
    chapters = found if isinstance(found, list) else [found]
    return "\n\n".join("\n".join([c["chapter"], *c["paragraphs"]]) for c in chapters) + "\n"
