"""Reproduce: K3's decode op stores cache entries before the kernel in front of it has finished.

    python reproduce.py /path/to/vllm/_C_stable_libtorch.abi3.so      # sm_90 or later

A Triton kernel starts its dependents at once, waits 4 ms, and then writes ``kv_c``; the op is
called right after it. Exits with 1 while the entry has the ``kv_c`` of before.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl

TOKENS, HEADS, LATENT, ROPE, BLOCK = 4, 2, 512, 64, 16
DELAY_NS = 4_000_000


@triton.jit
def late_copy(source, target, size, delay_ns, WIDTH: tl.constexpr):  # noqa: ANN001, ANN201, D103, N803
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < delay_ns:
        now = tl.extra.cuda.globaltimer()
    i = tl.arange(0, WIDTH)
    tl.store(target + i, tl.load(source + i, mask=i < size), mask=i < size)


def main(library: str) -> int:
    """Call the op once behind the late copy, and look at the entries and the query."""
    torch.ops.load_library(library)
    op = torch.ops._C.fused_kimi_k3_mla_decode_q_concat_kv_cache_insert
    ones = {"dtype": torch.bfloat16, "device": "cuda"}
    ql_nope = torch.ones(TOKENS, HEADS, LATENT, **ones)
    q_pe, k_pe = torch.ones(TOKENS, HEADS, ROPE, **ones), torch.ones(TOKENS, ROPE, **ones)
    right, kv_c = torch.ones(TOKENS, LATENT, **ones), torch.zeros(TOKENS, LATENT, **ones)
    mqa_q = torch.zeros(TOKENS, HEADS, LATENT + ROPE, **ones)
    cache = torch.zeros(1, BLOCK, LATENT + ROPE, **ones)
    slots = torch.arange(TOKENS, device="cuda")
    kernel: Any = late_copy
    kernel[(1,)](right, kv_c, kv_c.numel(), 0, WIDTH=kv_c.numel())  # compiled before it counts
    op(ql_nope, q_pe, kv_c, k_pe, mqa_q, cache, slots, BLOCK, None, None)
    for x in (kv_c, mqa_q, cache):
        x.zero_()
    torch.cuda.synchronize()
    kernel[(1,)](right, kv_c, kv_c.numel(), DELAY_NS, WIDTH=kv_c.numel())
    op(ql_nope, q_pe, kv_c, k_pe, mqa_q, cache, slots, BLOCK, None, None)
    torch.cuda.synchronize()
    stored = int((cache[0, :TOKENS, :LATENT] == 1).all(-1).sum())
    print(
        f"kv_c as it is now: {stored} of {TOKENS} entries; query right: {bool((mqa_q == 1).all())}"
    )
    return int(stored < TOKENS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
