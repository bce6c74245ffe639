"""The planted faults and the harmless variant, as names: importing this imports none of them."""

from __future__ import annotations

from kvpack.spec import Fault

_CLEAN = "k3insert.faults.kernel:insert"


def _fault(number: str, title: str, function: str, lane: str, needs: str = "") -> Fault:
    return Fault(number, title, f"k3insert.faults.{function}", _CLEAN, lane, needs)


FAULTS: tuple[Fault, ...] = (
    _fault("I01", "padding stored in the last slot", "slots:padding_wraps", "shapes"),
    _fault("I02", "blocks taken to have 16 positions", "slots:sixteen", "shapes"),
    _fault("I03", "last token not stored", "slots:last_lost", "shapes"),
    _fault("I04", "insert ends at the first padding", "slots:stops_at_padding", "shapes"),
    _fault("I05", "last position of a block missed", "slots:block_edge", "shapes"),
    _fault("I06", "k_pe before the latent", "entries:rope_first", "shapes"),
    _fault("I07", "rope columns of an entry stale", "entries:rope_stale", "shapes"),
    _fault("I08", "one lane of an entry stale", "entries:one_lane", "shapes"),
    _fault("I09", "k_pe written for head 0 only", "entries:head_zero", "shapes"),
    _fault("I10", "q written in place", "entries:q_written", "patterns"),
    _fault("I11", "cache offset in 31 bits", "slots:int32_offset", "sizes", "large"),
    _fault("I12", "slot mapping written in place", "slots:marks_padding", "shapes"),
)

HARMLESS: tuple[Fault, ...] = (
    Fault(
        "J01", "the cache copied and put back", "k3insert.faults.entries:whole_blocks", "", "shapes"
    ),
)
