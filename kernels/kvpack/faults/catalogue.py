"""The planted faults and the harmless variants, as names: importing this imports none of them.

``FAULTS`` are K01 to K18 of the fault catalogue, each with a clean twin that differs from it in
one place. ``SANITIZER`` are K19 to K21, which change no byte: compute-sanitizer alone sees them,
and their lane is its tool. ``MODES`` are M01 to M05, each beside the calling mode of a GPU that
alone catches it. ``HARMLESS`` have equal bytes and must not be flagged. ``UNLISTED`` are faults of
other kinds, held back from the catalogue's own run: they test whether the kinds are found.
"""

from __future__ import annotations

from kvpack.spec import Fault

_HERE = "kvpack.faults"
_CLEAN = f"{_HERE}.kernel:kv_pack"


def _fault(
    number: str,
    title: str,
    module: str,
    lane: str,
    needs: str = "",
    function: str = "kv_pack",
) -> Fault:
    where = f"{_HERE}.{module}"
    return Fault(number, title, f"{where}:{function}", f"{where}:kv_pack_clean", lane, needs)


def _harmless(number: str, title: str, function: str, lane: str) -> Fault:
    return Fault(number, title, f"{_HERE}.harmless:{function}", "", lane)


def _unlisted(
    number: str, title: str, group: str, function: str, lane: str, needs: str = ""
) -> Fault:
    where = f"{_HERE}.unlisted_{group}"
    return Fault(number, title, f"{where}:{function}", _CLEAN, lane, needs)


FAULTS: tuple[Fault, ...] = (
    _fault("K01", "halves of kv_nope swapped for one head", "k01_halves_swapped", "shapes"),
    _fault("K02", "last row of an odd row count unwritten", "k02_odd_tail", "shapes"),
    _fault("K03", "rows beyond the first grid pass unwritten", "k03_first_pass_only", "shapes"),
    _fault("K04", "int32 element offset of the operands", "k04_int32_offset", "sizes"),
    _fault("K04-full", "int32 element offset of k", "k04_full", "sizes", "nightly"),
    _fault("K05", "k_pe written for head 0 only", "k05_rope_head_zero", "shapes"),
    _fault("K06", "rope columns shifted by 8", "k06_rope_shifted", "patterns"),
    _fault("K07", "K's row stride used for V", "k07_key_stride_for_value", "shapes"),
    _fault("K08", "input assumed contiguous", "k08_assumed_contiguous", "strides"),
    _fault("K09", "fp8: truncates", "k09_truncates", "patterns"),
    _fault("K10", "fp8: ties away from zero", "k10_ties_away", "patterns"),
    _fault("K11", "fp8: overflow the other way (to NaN)", "k11_overflow_and_nan", "patterns"),
    _fault("K11b", "fp8: NaN to 448", "k11_overflow_and_nan", "patterns", function="kv_pack_nan"),
    _fault("K12", "fp8: -0 to +0", "k12_negative_zero", "patterns"),
    _fault("K13", "fp16 read as bf16", "k13_fp16_as_bf16", "patterns"),
    _fault("K14", "e4m3fnuz bias", "k14_fnuz_bias", "patterns"),
    _fault("K15", "one vector written past the end of k", "k15_past_the_end", "shapes"),
    _fault("K16", "one lane of a row never written", "k16_lane_unwritten", "shapes"),
    _fault("K17", "reads before the producer finished", "k17_no_wait", "modes", "cuda"),
    _fault("K18", "16-byte loads on any base", "k18_forced_vectors", "alignment", "cuda"),
)

SANITIZER: tuple[Fault, ...] = tuple(
    Fault(number, title, f"{_HERE}.hidden:{faulty}", f"{_HERE}.hidden:{clean}", tool, "cuda")
    for number, title, faulty, clean, tool in (
        ("K19", "reads one byte past an operand", "reads_past", "reads_last", "memcheck"),
        (
            "K20",
            "reads scratch that nothing wrote",
            "reads_unwritten",
            "reads_written",
            "initcheck",
        ),
        ("K21", "no barrier between two warps", "races", "waits", "racecheck"),
    )
)

MODES: tuple[tuple[str, Fault], ...] = tuple(
    (mode, Fault(number, title, f"{_HERE}.{faulty}", f"{_HERE}.{clean}", "modes", "cuda"))
    for mode, number, title, faulty, clean in (
        (
            "stream",
            "M01",
            "default stream, but for a capture",
            "of_modes:default_stream",
            "of_modes:callers_stream",
        ),
        (
            "graph",
            "M02",
            "host looks at data",
            "unlisted_conduct:looks_at_data",
            "of_modes:looks_at_nothing",
        ),
        (
            "producer",
            "M03",
            "reads before the producer finished",
            "k17_no_wait:kv_pack",
            "k17_no_wait:kv_pack_clean",
        ),
        (
            "gpu_hog",
            "M04",
            "waits for a stream by the clock",
            "of_modes:waits_by_time",
            "of_modes:waits_by_event",
        ),
        (
            "second_device",
            "M05",
            "outputs on the current device",
            "of_modes:current_device",
            "of_modes:operands_device",
        ),
    )
)

HARMLESS: tuple[Fault, ...] = (
    _harmless("N01", "rows of k 256 columns apart", "padded_key", "strides"),
    _harmless("N02", "outputs as views of [H, T, columns]", "head_major", "strides"),
    _harmless("N03", "k and v from one allocation", "one_buffer", "shapes"),
    _harmless("N04", "k and v interleaved by row", "one_row", "strides"),
    _harmless("N05", "allocations a token longer at both ends", "with_room", "shapes"),
    _harmless("N06", "outputs zeroed first", "zeros", "shapes"),
    _harmless("N07", "last rows written first", "backwards", "shapes"),
    _harmless("N08", "garbage left in scratch memory", "scribbled", "shapes"),
    _harmless("N09", "garbage written first, then the bytes", "twice", "shapes"),
    _harmless("N10", "v a view of the operand in 16-bit mode", "views", "strides"),
    _harmless("N11", "contiguous copies of what stock returns", "copies", "strides"),
    _harmless("N12", "k made by torch.cat", "concatenated", "shapes"),
    _harmless("N13", "another thread count, put back", "other_threads", "modes"),
    _harmless("N14", "another default dtype, put back", "other_default_dtype", "modes"),
)

UNLISTED: tuple[Fault, ...] = (
    _unlisted("U01", "head 11 of 12 read as head 3", "layout", "three_bit_head", "shapes"),
    _unlisted("U02", "division by 12 one bit short", "layout", "magic_division", "shapes"),
    _unlisted("U03", "k_pe of token t % 4096", "layout", "token_in_tile", "shapes"),
    _unlisted("U04", "16-bit token in fp16 with fp8", "layout", "int16_token", "patterns"),
    _unlisted("U05", "rope halves swapped if k_pe is a slice", "layout", "sliced_rope", "strides"),
    _unlisted("U06", "heads taken for adjacent", "layout", "dense_heads", "strides"),
    _unlisted("U07", "lane unwritten at 16 mod 32 bytes", "layout", "half_aligned", "alignment"),
    _unlisted("U08", "a gap's bytes decide a bit", "layout", "gap_read", "strides"),
    _unlisted("U09", "NaN leaks in from past the row", "layout", "nan_leak", "patterns"),
    _unlisted("U10", "rope of a lone last row unwritten", "layout", "block_tail", "shapes"),
    _unlisted("U11", "head index in six bits", "layout", "six_bit_head", "shapes"),
    _unlisted("U12", "one byte written before v", "layout", "before_v", "shapes"),
    _unlisted("U13", "zero rows of v unwritten", "layout", "zero_rows_skipped", "shapes"),
    _unlisted("U14", "last bit of one pattern", "values", "one_pattern", "patterns"),
    _unlisted("U15", "subnormal results flushed", "values", "flushed_results", "patterns"),
    _unlisted("U16", "rope alone truncates", "values", "rope_truncates", "patterns"),
    _unlisted("U17", "fp16 rounded twice", "values", "through_bf16", "patterns"),
    _unlisted("U18", "NaN's sign lost in odd columns", "values", "odd_nan", "patterns"),
    _unlisted("U19", "one NaN for all in 16-bit mode", "values", "canonical_nan", "patterns"),
    _unlisted("U20", "subnormals flushed in 16-bit mode", "values", "flushed_inputs", "patterns"),
    _unlisted("U21", "k_pe scaled in place and back", "conduct", "input_written", "patterns"),
    _unlisted("U22", "cached buffer returned", "conduct", "cached_buffer", "modes"),
    _unlisted("U23", "result remembered by address", "conduct", "memoised", "modes"),
    _unlisted("U24", "every seventh call wrong", "conduct", "seventh_call", "modes"),
    _unlisted("U25", "hangs for 13 tokens", "conduct", "hangs", "shapes"),
    _unlisted("U26", "ends the process for 3 heads", "conduct", "exits", "shapes"),
    _unlisted("U27", "raises without tokens", "conduct", "empty_raises", "shapes"),
    _unlisted("U28", "v as uint8 in fp8", "conduct", "bytes_returned", "shapes"),
    _unlisted("U29", "v squeezed for one head", "conduct", "squeezed", "shapes"),
    _unlisted("U30", "v on the meta device for two heads", "conduct", "meta", "shapes"),
    _unlisted("U31", "default dtype left changed", "conduct", "default_dtype", "modes"),
    _unlisted("U32", "gradients left off", "conduct", "grad_mode", "modes"),
    _unlisted("U33", "default stream", "conduct", "default_stream", "modes", "cuda"),
    _unlisted("U34", "host looks at data", "conduct", "looks_at_data", "modes", "cuda"),
    _unlisted("U35", "last row by an unjoined stream", "conduct", "leaves_work", "shapes", "cuda"),
)
