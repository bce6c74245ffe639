"""Which route a layer takes: one pure decision, made once when the layer is built."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvroute.errors import RouteError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PACK_KEYWORDS = ("fused_mla_kv_concat_fn", "kv_pack")
"""Names of the loop's pack argument: in vLLM 0.32 and 0.33, and in the change that proposed it."""

KILL_SWITCHES = (
    ("VLLM_K3_DCP_FUSED_KV_PACK", "0"),
    ("VLLM_K3_DCP_FUSED_KV_PACK_DISABLE", "1"),
)
"""Variables, with the value at which each restores the stock tail. The defaults are 1 and 0."""

_SPELLINGS = {"0": ("0", "false", "no", "off"), "1": ("1", "true", "yes", "on")}
_MEANS = {word: value for value, words in _SPELLINGS.items() for word in words}


@dataclass(frozen=True)
class Decision:
    """The route of one layer.

    Attributes
    ----------
    route : ``"untouched"``, ``"stock"``, or the requested route.
    keyword : the loop's pack argument, ``None`` where it takes none.
    switch : the kill switch that fired, ``"NAME=value"``, else ``None``.
    reason : why, in a few words, for the log and the evidence.

    """

    route: str
    keyword: str | None
    switch: str | None
    reason: str

    @property
    def packs(self) -> bool:
        """Whether a pack is passed to the loop."""
        return self.route not in ("untouched", "stock")

    @property
    def both(self) -> bool:
        """Whether every call runs with the pack and without it."""
        return self.route.partition(":")[0] == "both"


def pack_keyword(loop: Callable[..., Any]) -> str | None:
    """Return the name under which ``loop`` takes a pack, by its signature, or ``None``."""
    names = inspect.signature(loop).parameters
    return next((name for name in PACK_KEYWORDS if name in names), None)


def fired_switch(environ: Mapping[str, str]) -> str | None:
    """Return the first kill switch that is set to its restoring value, as ``"NAME=value"``.

    Raises
    ------
    RouteError
        For a value that is neither on nor off: a switch that is set and doesn't act must not pass
        for one that wasn't needed.

    """
    fired = None
    for name, value in KILL_SWITCHES:
        written = environ.get(name, "").strip()
        meant = _MEANS.get(written.lower()) if written else ""
        if meant is None:
            raise RouteError(f"{name}={written!r}: expected 0 or 1")
        if meant == value and fired is None:
            fired = f"{name}={value}"
    return fired


def decide(
    requested: str | None,
    *,
    dcp_size: int,
    keyword: str | None,
    environ: Mapping[str, str],
) -> Decision:
    """Decide a layer's route.

    Parameters
    ----------
    requested : ``BYTEGATE_ROUTE``, or ``None`` when it isn't set.
    dcp_size : ranks over which the layer's cache is sharded.
    keyword : see ``pack_keyword``.
    environ : where the kill switches are looked up.

    Notes
    -----
    A pack is passed when all of these hold: it was requested, ``dcp_size > 1``, the loop takes
    one, and neither switch fired. A switch restores the stock statements also where nothing was
    requested, because a layer of Kimi-K3's brings a pack of its own.

    """
    if dcp_size <= 1:
        return Decision("untouched", keyword, None, "no decode context parallelism")
    switch = fired_switch(environ)
    if switch is not None:
        return Decision("stock", keyword, switch, f"{switch} restores the stock tail")
    if requested is None:
        return Decision("untouched", keyword, None, "no route requested")
    if requested == "stock":
        return Decision("stock", keyword, None, "requested")
    if keyword is None:
        return Decision("stock", None, None, f"the loop takes no pack, {requested} is impossible")
    return Decision(requested, keyword, None, "requested")
