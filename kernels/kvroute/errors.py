"""The errors of this package.

::

    RouteError(ValueError)    a request that can't be carried out: one line, what and what to do
    └── UnknownVLLM           the vLLM that runs is not one that a patch was written for
"""

from __future__ import annotations


class RouteError(ValueError):
    """A route, patch or setting that can't be used; the message is one line."""


class UnknownVLLM(RouteError):
    """The vLLM at hand differs from the one a patch knows; nothing was changed."""
