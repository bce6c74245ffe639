"""The faults of the catalogue that act inside vLLM, by their number."""

from __future__ import annotations

from kvroute.errors import RouteError


def known(number: str) -> str:
    """Return ``number`` if the catalogue has it.

    Raises
    ------
    RouteError
        When it has not.

    """
    raise RouteError(f"fault:{number}: no such fault in the catalogue")


def pack_of(number: str) -> str | None:
    """Return the faulty pack of a fault, ``module:function``, or ``None`` where it is a patch."""
    return known(number)


def patch_of(number: str) -> str | None:
    """Return the patch of a fault, ``module:function``, or ``None`` where it is a pack."""
    return known(number)
