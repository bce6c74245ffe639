"""The errors of this room; each is one line: what, what was expected, what to do.

::

    UsageError (exit 2)
    └── TextError            a text that can't be had, read or cut
        └── DigestError      a file that isn't the one the manifest names
"""

from __future__ import annotations

from equiv.errors import UsageError


class TextError(UsageError):
    """A text that can't be had, read or cut to length."""


class DigestError(TextError):
    """A file whose SHA-256 is not the one expected; both are in the message."""

    def __init__(self, what: str, *, expected: str, found: str, advice: str) -> None:
        super().__init__(f"{what}: expected SHA-256 {expected}, found {found}; {advice}")
        self.expected = expected
        self.found = found
