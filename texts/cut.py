"""Cutting a text by the tokens of the model under test."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from texts.errors import TextError

LEAST, MOST = 30_000, 36_000
"""Tokens of a text."""
LONG_LEAST, LONG_MOST = 100_000, 104_000
"""Tokens of a long one: at vLLM's defaults its context needs a continuation past 81,920."""

Tokenizer = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""

_CHARACTERS = 6
"""Characters a token first taken for granted; more are read where they don't suffice."""


@dataclass(frozen=True)
class Cut:
    """The beginning of a text, as token ids; ``ids_sha256`` is of them as little-endian int64."""

    text: str
    ids: tuple[int, ...]
    ids_sha256: str


def utf8_bytes(text: str) -> Sequence[int]:
    """Tokenize by UTF-8 bytes: for models that are served without a tokenizer."""
    return text.encode()


def ids_sha256(ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids as little-endian int64."""
    import sys

    values = array("q", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return hashlib.sha256(values.tobytes()).hexdigest()


def wanted_tokens(name: str, least: int, most: int) -> int:
    """Return the length for a text: drawn from its name, so that lengths differ and repeat."""
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return least + draw % (most - least + 1)


def cut(
    name: str,
    text: str,
    tokenizer: Tokenizer = utf8_bytes,
    *,
    least: int = LEAST,
    most: int = MOST,
) -> Cut:
    """Cut a text to between ``least`` and ``most`` tokens, from its beginning.

    The length is ``wanted_tokens`` where the text has as many, else all it has.

    Raises
    ------
    TextError : the text is shorter than ``least`` tokens.

    """
    if not 0 < least <= most:
        raise TextError(f"from {least} to {most} tokens: expected 0 < least <= most")
    tokens = wanted_tokens(name, least, most)
    characters = tokens * _CHARACTERS
    while True:
        # A text that is cut may end in other tokens than the whole would have there.
        ids = tokenizer(text[:characters])
        if len(ids) >= tokens + 64 or characters >= len(text):
            break
        characters *= 2
    if len(ids) < least:
        raise TextError(
            f"text {name} has {len(ids):,} tokens, expected at least {least:,}; join it with "
            "another, or ask for fewer"
        )
    kept = tuple(int(i) for i in ids[:tokens])
    return Cut(name, kept, ids_sha256(kept))
