"""The errors of this room; each is one line.

::

    UsageError (exit 2)
    └── PplError             an input that can't be used
        └── Stale            a stored result of something else than what is asked for
"""

from __future__ import annotations

from equiv.errors import UsageError


class PplError(UsageError):
    """A file, plan or option that can't be used."""


class Stale(PplError):
    """A stored result whose text, ids, model, arguments, route or versions are others."""
