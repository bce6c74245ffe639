"""L01 to L14: faults of the loop, each one edit of vLLM's own functions.

Each number has two functions, ``l07`` and ``l07_clean``, for ``--patch`` and ``--route fault:L07``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from kvroute.faults.edit import Edit
from kvroute.switch import LOOP

_MLA = "vllm.model_executor.layers.attention.mla_attention"
_MERGE = "vllm.v1.attention.ops.merge_attn_states"
_LOOP = f"MLACommonBaseImpl.{LOOP}"
_BUILD = "build_mla_chunked_context_metadata"


def real_rows(start: int, length: int, rank: int, ranks: int, interleave: int) -> int:
    """Count the rows of ``start .. start + length`` that live on one rank."""

    def before(tokens: int) -> int:
        runs, inside = divmod(tokens, interleave)
        full = runs // ranks + (runs % ranks > rank)
        return full * interleave + (inside if runs % ranks == rank else 0)

    return before(start + length) - before(start)


EDITS = {
    edit.number: edit
    for edit in (
        Edit(
            "L01",
            _MLA,
            "reorg_kvcache",
            "max(0, local_context_len - local_start)",
            "local_context_len",
        ),
        Edit(
            "L02",
            _MLA,
            _BUILD,
            "math.lcm(chunk_alignment, dcp_virtual_block_size)",
            "chunk_alignment",
        ),
        Edit(
            "L03",
            _MLA,
            _BUILD,
            "padded_rows(start + length) - local_start",
            "_bytegate_real_rows(start, length, dcp_manager.group.rank_in_group, "
            "dcp_world_size, dcp_local_block_size)",
            {"_bytegate_real_rows": real_rows},
        ),
        Edit(
            "L04",
            _MLA,
            _BUILD,
            "context_lens_cpu, dcp_world_size, None, dcp_local_block_size",
            "context_lens_cpu, dcp_world_size, None, block_size",
        ),
        Edit(
            "L05",
            _MLA,
            "reorg_kvcache",
            "    kv_c_segments = []\n",
            "    kv_c_segments = []\n"
            "    allgatered_kv_c_normed = torch.cat(\n"
            "        allgatered_kv_c_normed.split(toks)[::-1]\n"
            "    )\n",
        ),
        Edit(
            "L06",
            _MLA,
            _LOOP,
            "scale=k_scale,",
            "scale=torch.ones_like(k_scale),",
        ),
        Edit(
            "L07",
            _MLA,
            _BUILD,
            "starts=starts[request_slice],",
            "starts=torch.zeros_like(starts[request_slice]),",
        ),
        Edit(
            "L08",
            _MLA,
            _LOOP,
            "kv_c_normed = kv_c_normed.to(kv_b_proj_input_dtype)",
            "kv_c_normed = kv_c_normed.contiguous()",
        ),
        Edit(
            "L09",
            _MLA,
            "init_mla_context_partial",
            "neutralize_empty_context_partials(chunked_context, output, output_lse)",
            "pass",
        ),
        Edit(
            "L10",
            _MLA,
            _LOOP,
            "        if output is None:\n",
            f"        attn_softmax_lse = attn_softmax_lse * {1 / math.log(2)!r}\n"
            "        if output is None:\n",
        ),
        Edit(
            "L11",
            _MLA,
            "accumulate_mla_context_chunk",
            "if chunk.is_continuation:",
            "if chunk.is_continuation and output is None:",
        ),
        Edit(
            "L12",
            _MLA,
            "reorg_kvcache",
            "            if local_chunk_len != 0:\n",
            "            if rank + 1 == len(local_context_lens) and local_chunk_len:\n"
            "                local_chunk_len -= 1\n"
            "            if local_chunk_len != 0:\n",
        ),
        Edit(
            "L13",
            _MLA,
            "reorg_kvcache",
            "reorganized_kv_c_normed = torch.cat(kv_c_segments, dim=0)",
            "reorganized_kv_c_normed = torch.cat(kv_c_segments, dim=0) + (\n"
            "        0 * allgatered_kv_c_normed.sum(dim=0, keepdim=True)\n"
            "    )",
        ),
        Edit(
            "L14",
            _MERGE,
            "merge_attn_states",
            "    assert prefix_output.stride(1) == suffix_output.stride(1), (",
            "    suffix_output = suffix_output.as_strided(\n"
            "        suffix_output.shape, prefix_output.stride()\n"
            "    )\n"
            "    assert True, (",
        ),
    )
}
"""The edits by number."""

STAND_INS = {
    "L04": "the cache is filled by the suite in the loop and by kvroute.cpu.slots in a CPU server; "
    "the fault itself is in vLLM's builder",
    "L06": "on a CPU the scale is applied by a stand-in for the CUDA gather "
    "(kvroute.cpu.gather); the fault itself is in vLLM's loop",
    "L07": "on a CPU the start is used by a stand-in for the CUDA gather (kvroute.cpu.gather); the "
    "fault itself is in vLLM's builder",
}
"""Faults whose effect on a CPU goes through something that isn't vLLM's, and what."""


IN_SERVER = {
    "L04": Edit(
        "L04",
        "kvroute.cpu.slots",
        "slots_of",
        "(inside // interleave) % ranks",
        "(inside // page) % ranks",
    ),
}
"""Edits that a CPU server takes instead: contexts there are multiples of ``D * page``, at which the
lengths by page and by interleave agree; where tokens are written, they don't."""


def _public(number: str, *, clean: bool) -> Callable[[], Any]:
    def patch() -> Any:
        edit = EDITS[number]
        if number in IN_SERVER and _has_slots():
            edit = IN_SERVER[number]
        return edit.plant(clean=clean)

    patch.__name__ = patch.__qualname__ = number.lower() + ("_clean" if clean else "")
    patch.__doc__ = f"Plant {number}{', or rather its clean twin' if clean else ''}."
    return patch


def _has_slots() -> bool:
    """Whether this process maps slots by the stand-in, as a CPU server does."""
    utilities = sys.modules.get("vllm.utils.cpu_triton_utils")
    mapping = getattr(utilities, "_compute_slot_mapping_kernel_impl", None)
    return getattr(mapping, "__bytegate_patch__", None) == "slots"


for _number in EDITS:
    globals()[_number.lower()] = _public(_number, clean=False)
    globals()[f"{_number.lower()}_clean"] = _public(_number, clean=True)
