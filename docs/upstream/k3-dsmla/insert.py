"""Compare: K3's fp8_ds_mla insert and ``concat_and_cache_mla``, whose bytes it promises.

    python insert.py /path/to/vllm/_C_stable_libtorch.abi3.so

Random latents of 33 tokens, some without a slot. Exits with 1 while any byte differs, and says in
which part of the 656-byte entries: payload, scales or rope.
"""

from __future__ import annotations

import sys

import torch

TOKENS, BLOCKS, BLOCK_SIZE, ENTRY = 33, 16, 8, 656
PARTS = {"payload": slice(0, 512), "scales": slice(512, 528), "rope": slice(528, ENTRY)}


def compare(dtype: torch.dtype) -> int:
    """Run both ops on the same rows; return how many bytes differ."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    q, k_nope, k_pe, kv_c = (
        rows(TOKENS, 2, 192),
        rows(TOKENS, 2, 128),
        rows(TOKENS, 64),
        rows(TOKENS, 512),
    )
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:TOKENS]
    slots[::3] = -1
    slots = slots.cuda()
    stock = torch.full((BLOCKS, BLOCK_SIZE, ENTRY), 165, dtype=torch.uint8, device="cuda")
    fused, k = stock.clone(), torch.empty(TOKENS, 2, 192, dtype=dtype, device="cuda")
    one = torch.ones(1, device="cuda")
    torch.ops._C_cache_ops.concat_and_cache_mla(kv_c, k_pe, stock, slots, "fp8_ds_mla", one, False)
    torch.ops._C.fused_kimi_k3_mla_key_concat_ds_mla_insert(
        q, k_nope, k_pe, kv_c, k, fused, slots, BLOCK_SIZE, None, None
    )
    for name, part in PARTS.items():
        a, b = stock[..., part], fused[..., part]
        where = (a != b).nonzero()
        example = ""
        if len(where):
            at = tuple(where[0].tolist())
            example = f"; first at {list(at)}: stock {int(a[at]):02x}, fused {int(b[at]):02x}"
        print(f"{dtype}, {name}: {len(where)} of {a.numel()} bytes differ{example}")
    return int((stock != fused).sum())


def main(library: str) -> int:
    """Compare in both dtypes."""
    torch.ops.load_library(library)
    different = sum(compare(dtype) for dtype in (torch.bfloat16, torch.float16))
    print(f"{different} bytes differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
