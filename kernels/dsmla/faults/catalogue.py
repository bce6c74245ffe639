"""The planted faults and the harmless variant, as names: importing this imports none of them."""

from __future__ import annotations

from kvpack.spec import Fault

_ROOM = "dsmla.faults"


def _fault(number: str, title: str, function: str, lane: str = "shapes") -> Fault:
    return Fault(number, title, f"{_ROOM}.variants:{function}", f"{_ROOM}.kernel:clean", lane)


FAULTS: tuple[Fault, ...] = (
    _fault("S01", "slot -1 stored in the last slot", "padding_stored"),
    _fault("S02", "last token not stored", "last_lost"),
    _fault("S03", "last position of a block missed", "block_edge"),
    _fault("S04", "last position of a block put into the next one", "next_block"),
    _fault("S05", "cache offset in 32 bits: wrong past 2^31 bytes", "int32_offset", "sizes"),
    _fault("S06", "scale of a tile not a power of two", "exact_scale"),
    _fault("S07", "scale rounded down to a power of two", "scale_rounded_down"),
    _fault("S08", "scale that is a power of two rounded up", "scale_one_up"),
    _fault("S09", "scale of the first tile for all", "first_tile_only"),
    _fault("S10", "inverse of the scale stored", "scale_inverse"),
    _fault("S11", "no least scale for small tiles", "no_least"),
    _fault("S12", "payload not converted to e4m3", "unconverted"),
    _fault("S13", "rotary columns of an entry through e4m3", "rope_quantised"),
    _fault("S14", "rope before the scales", "rope_before_scales"),
    _fault("S15", "rotary columns paired as in GPT-NeoX", "neox"),
    _fault("S16", "rotated by the index, not the position", "by_index"),
    _fault("S17", "rotated the other way", "backwards"),
    _fault("S18", "q not rotated in place", "q_unturned"),
    _fault("S19", "k_pe written for head 0 only", "head_zero"),
)

HARMLESS: tuple[Fault, ...] = (
    Fault("Z01", "the cache copied and put back", f"{_ROOM}.variants:whole_cache", "", "shapes"),
)
