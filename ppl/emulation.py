"""Prefill in fp8: emulated where that was asked for, and otherwise what of it wasn't covered.

A server emulates it by a prefill backend that converts fp8 to the model's dtype (``kvroute.fp8``):
the fp8 pack runs, and no fp8 attention kernel does. So such a run says so wherever it is told, and
must show that both servers took the fp8 branch of the tail in every call, and the fused one packed
in fp8 alone. A run without it reaches that branch only on a device that has such a kernel.
"""

from __future__ import annotations

from ppl.facts import EMULATED_BY, ServerFacts
from ppl.observe import FP8_KIND, Difference, Snapshot

FLAG = "--emulate-fp8-prefill"
MARK = "EMULATED"
WARNING = (
    f"{MARK}: fp8 prefill, by a backend that converts q, k and v to the model's dtype and computes "
    "attention there: this is evidence for the bytes of the fp8 pack in a served model, and for no "
    "fp8 attention kernel"
)
"""Stands first among an emulating run's warnings, and among the reasons of its verdict."""
OPEN = "the fp8 pack in a served model"
"""How begins what an ordinary run leaves open, and no emulating one."""


def warnings(*, asked: bool) -> list[str]:
    """Return what a run says of itself."""
    return [WARNING] if asked else []


def amiss(snapshot: Snapshot, *, asked: bool) -> list[str]:
    """Say in what a server isn't what was asked for."""
    name = snapshot.facts.get(EMULATED_BY)
    if asked and snapshot.channel != "collective_rpc":
        return [f"that it emulates fp8 prefill ({FLAG}) is unproven: only /collective_rpc tells it"]
    if asked and not name:
        return [f"it doesn't emulate fp8 prefill, which was asked for ({FLAG})"]
    if asked and "," in str(name):
        return [f"its ranks differ in emulating fp8 prefill: {name}"]
    if name and not asked:
        return [f"it emulates fp8 prefill ({name}), which wasn't asked for: {FLAG} does"]
    return []


def between(stock: ServerFacts, fused: ServerFacts) -> list[str]:
    """Say that one of two servers emulates and the other doesn't."""
    mine = [f.arm for f in (stock, fused) if f.facts.get(EMULATED_BY)]
    return [f"only the {mine[0]} server emulates fp8 prefill"] if len(mine) == 1 else []


def unreached(apart: Difference, *, packs: bool) -> list[str]:
    """Say which rank of an emulating server didn't take the fp8 branch in all it did."""
    wrong = []
    for rank, seen in apart.counts.items():
        calls, fp8_calls = seen.get("calls", 0), seen.get("fp8_calls", 0)
        packed, fp8_packs = seen.get("packs", 0), seen.get("fp8_packs", 0)
        if not calls or fp8_calls != calls:
            wrong.append(
                f"the fp8 branch of the tail wasn't reached: {fp8_calls:,} of {calls:,} calls of "
                f"rank {rank} had fp8 queries"
            )
        elif packs and (not packed or fp8_packs != packed):
            wrong.append(
                f"the fp8 pack wasn't reached: {fp8_packs:,} of {packed:,} packs of rank {rank} "
                "converted to fp8"
            )
    return wrong[:1]


def open_(snapshot: Snapshot) -> list[str]:
    """Return what an ordinary run leaves open of the fp8 pack, by the warm-up of its fused arm."""
    if snapshot.channel != "collective_rpc":
        return [f"{OPEN}: only /collective_rpc tells what packs converted"]
    kinds = [str(k) for k in snapshot.facts.get("kinds") or ()]
    if any(kind.endswith(FP8_KIND) for kind in kinds):
        return []
    ran = f"packs converted {', '.join(kinds)} alone" if kinds else "no pack ran"
    takes = f"an fp8 cache and a prefill backend for fp8 (none on a CPU or Hopper), or {FLAG}"
    return [f"{OPEN}: {ran}; it takes {takes}"]
