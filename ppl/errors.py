"""The errors of this room; each is one line.

::

    UsageError (exit 2)
    └── PplError             an input that can't be used
        ├── Stale            a stored result of something else than what is asked for
        ├── Unreachable      a server that doesn't answer, after every retry
        └── BadAnswer        an answer that must not be scored; its message is the failure's name
"""

from __future__ import annotations

from equiv.errors import UsageError


class PplError(UsageError):
    """A file, plan or option that can't be used."""


class Stale(PplError):
    """A stored result whose text, ids, model, arguments, route or versions are others."""


class Unreachable(PplError):
    """A server that can't be reached, or broke off, after every retry; ``url`` is its address."""

    def __init__(self, url: str, path: str, why: str) -> None:
        super().__init__(f"{url}{path}: no answer ({why})")
        self.url = url


class BadAnswer(PplError):
    """An answer that must not be scored: refused, of other ids, short, shifted, or empty."""
