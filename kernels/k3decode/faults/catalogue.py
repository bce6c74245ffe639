"""The planted faults and the harmless variant, as names: importing this imports none of them."""

from __future__ import annotations

from kvpack.spec import Fault

_ROOM = "k3decode.faults"


def _fault(number: str, title: str, function: str, lane: str = "shapes") -> Fault:
    return Fault(number, title, f"{_ROOM}.variants:{function}", f"{_ROOM}.kernel:clean", lane)


FAULTS: tuple[Fault, ...] = (
    _fault("P01", "slot -1 stored in the last slot", "padding_stored"),
    _fault("P02", "last token not stored", "last_lost"),
    _fault("P03", "last position of a block missed", "block_edge"),
    _fault("P04", "last position of a block put into the next one", "next_block"),
    _fault("P05", "cache offset in 32 bits: wrong past 2^31 bytes", "int32_offset", "sizes"),
    _fault("P06", "cache quantised by the scale of q", "cache_by_q_scale"),
    _fault("P07", "q quantised by the scale of the cache", "q_by_cache_scale"),
    _fault("P08", "multiplied by the scale, not its inverse", "times_the_scale"),
    _fault("P09", "NaN clamped to -448", "nan_saturates", "patterns"),
    _fault("P10", "truncated, not rounded", "truncates", "patterns"),
    _fault("P11", "rotary columns paired as in GPT-NeoX", "neox"),
    _fault("P12", "rotated by the index, not the position", "by_index"),
    _fault("P13", "rotated value rounded to 16 bits first", "rounded_early", "patterns"),
    _fault("P14", "q not rotated", "q_unturned"),
    _fault("P15", "q_pe before ql_nope", "rope_first"),
    _fault("P16", "query rows past 64 tokens not written", "split_ends"),
    _fault("P17", "scale of an fp8_ds_mla tile not a power of two", "exact_scale"),
)

HARMLESS: tuple[Fault, ...] = (
    Fault("O01", "the cache copied and put back", f"{_ROOM}.variants:whole_cache", "", "shapes"),
)
