"""The planted faults and the harmless variant, as names: importing this imports none of them."""

from __future__ import annotations

from kvpack.spec import Fault

_ROOM = "k3quant.faults"


def _fault(number: str, title: str, function: str, lane: str = "shapes") -> Fault:
    return Fault(number, title, f"{_ROOM}.variants:{function}", f"{_ROOM}.kernel:clean", lane)


FAULTS: tuple[Fault, ...] = (
    _fault("Q01", "slot -1 stored in the last slot", "padding_stored"),
    _fault("Q02", "last token not stored", "last_lost"),
    _fault("Q03", "last position of a block missed", "block_edge"),
    _fault("Q04", "last position of a block put into the next one", "next_block"),
    _fault("Q05", "cache offset in 32 bits: wrong past 2^31 bytes", "int32_offset", "sizes"),
    _fault("Q06", "cache quantised by the scale of k", "cache_by_k_scale"),
    _fault("Q07", "v quantised by the scale of k", "v_by_k_scale"),
    _fault("Q08", "multiplied by the scale, not its inverse", "times_the_scale"),
    _fault("Q09", "rotary columns not scaled", "rope_unscaled"),
    _fault("Q10", "product with the scale rounded to bf16", "narrow_product", "patterns"),
    _fault("Q11", "NaN clamped to -448", "nan_saturates", "patterns"),
    _fault("Q12", "overflow gives NaN", "overflow_is_nan", "patterns"),
    _fault("Q13", "truncated, not rounded", "truncates", "patterns"),
    _fault("Q14", "rotary columns paired as in GPT-NeoX", "neox"),
    _fault("Q15", "rotated by the index, not the position", "by_index"),
    _fault("Q16", "rotated value rounded to 16 bits first", "rounded_early", "patterns"),
    _fault("Q17", "q not rotated", "q_unturned"),
    _fault("Q18", "rotary columns of an entry stale", "rope_stale"),
)

HARMLESS: tuple[Fault, ...] = (
    Fault("R01", "the cache copied and put back", f"{_ROOM}.variants:whole_cache", "", "shapes"),
)
