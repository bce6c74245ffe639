"""The faults of the catalogue that act inside vLLM, by their number.

L faults are patches of vLLM's functions. K faults are faulty packs, which ``kvpack`` brings, and
which a server can take as its route.
"""

from __future__ import annotations

from kvroute.errors import RouteError

LOOP_TITLES = {
    "L01": "a rank's chunk clipped without its start",
    "L02": "chunks split at the page, not lcm(page, D.I)",
    "L03": "padded local length = this rank's real length",
    "L04": "owner of a token from the page size, not the interleave",
    "L05": "rank order permuted for kv_c and not for k_pe",
    "L06": "k_scale taken as 1",
    "L07": "start offset 0 from the second chunk on",
    "L08": "projection input not cast",
    "L09": "rows of requests without context not neutralised",
    "L10": "log-sum-exp in base 2",
    "L11": "a continuation overwrites instead of merging",
    "L12": "last row of the last rank dropped",
    "L13": "padding rows kept and masked by a weight of 0",
    "L14": "merge takes the suffix stride from the prefix",
}
"""Faults of the loop, in a few words."""


def known(number: str) -> str:
    """Return ``number`` if the catalogue has it.

    Raises
    ------
    RouteError
        When it has not.

    """
    if number in LOOP_TITLES or number in _packs():
        return number
    numbers = ", ".join([*LOOP_TITLES, *sorted(_packs())])
    raise RouteError(f"fault:{number}: no such fault; known are {numbers}")


def pack_of(number: str) -> str | None:
    """Return the faulty pack of a fault, ``module:function``, or ``None`` where it is a patch."""
    return _packs().get(known(number))


def patch_of(number: str) -> str | None:
    """Return the patch of a fault, ``module:function``, or ``None`` where it is a pack."""
    if known(number) not in LOOP_TITLES:
        return None
    return f"kvroute.faults.loop_faults:{number.lower()}"


def clean_of(number: str) -> str:
    """Return the clean twin of a loop fault, ``module:function``."""
    return f"kvroute.faults.loop_faults:{known(number).lower()}_clean"


def _packs() -> dict[str, str]:
    from kvpack.pair import PAIR

    return {fault.id: fault.faulty for fault in PAIR.faults}
