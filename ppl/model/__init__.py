"""bytegate's own small model: where it is, which one it is, and the tokens that it takes.

It reads bytes: token ``i`` below 256 is the byte ``i``, and 256 stands between two documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from equiv import files

NAME = "bytegate-bytes-5m"
"""How reports call it."""

BYTES = 256
END = 256
"""The token between two documents, and the only special one that training has seen."""
VOCABULARY = 260
"""A multiple of 4, so that every tensor divides by four ranks."""

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
RECORD = "widened.json"
"""Lies beside the weights that ``ppl.model.widen`` made."""

MOST_BYTES = 10_000_000
"""What the folder may weigh."""


def folder() -> Path:
    """Return the folder that vLLM and Hugging Face transformers take as a model."""
    return Path(__file__).parent


def widened(folder: Path) -> bool:
    """Whether ``ppl.model.widen`` made the model in a folder."""
    return (folder / RECORD).is_file()


def sha256(of: Path | None = None) -> str:
    """Return the SHA-256 of the weights' file: which model this is; by default our own."""
    return files.sha256((of or folder()) / WEIGHTS)


def encode(text: str) -> Sequence[int]:
    """Return a text's tokens: its UTF-8 bytes. No special token stands before the first."""
    return text.encode()


def decode(ids: Sequence[int]) -> str:
    """Return the text of tokens; special ones end nothing and are left out.

    Raises
    ------
    ValueError : an id that is no token.

    """
    if any(not 0 <= i < VOCABULARY for i in ids):
        raise ValueError(f"token ids lie in 0 .. {VOCABULARY - 1}")
    return bytes(i for i in ids if i < BYTES).decode("utf-8", "replace")
