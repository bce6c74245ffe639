"""Reproduce: vLLM's K3 fp8 epilogue turns a NaN into -448.

    python nan.py /path/to/vllm/_C_stable_libtorch.abi3.so

One token, one head, a NaN in each of q, k_nope, k_pe, kv_c and v. A cast to e4m3 keeps a NaN
(``7f``); the op clamps with ``fmaxf(x, -448)`` first, which returns -448 for it. Exits with 1 while
any of the five is finite.
"""

from __future__ import annotations

import sys

import torch

FP8 = torch.float8_e4m3fn


def main(library: str) -> int:
    """Call the op once and look at the five elements."""
    torch.ops.load_library(library)
    q, k_nope, v = (torch.zeros(1, 1, n, device="cuda").bfloat16() for n in (192, 128, 128))
    k_pe, kv_c = (torch.zeros(1, n, device="cuda").bfloat16() for n in (64, 512))
    for x in (q, k_nope, v, k_pe, kv_c):
        x.view(-1)[0] = float("nan")
    q8, k8, v8 = (torch.zeros(1, 1, n, device="cuda").to(FP8) for n in (192, 192, 128))
    cache = torch.zeros(1, 16, 576, device="cuda").to(FP8)
    slot = torch.zeros(1, dtype=torch.int64, device="cuda")
    one = torch.ones(1, device="cuda")
    torch.ops._C.fused_kimi_k3_mla_qkv_quant_kv_cache_fp8_insert(
        q, k_nope, k_pe, kv_c, v, q8, k8, v8, cache, slot, one, one, one, one, 16, None, None
    )
    found = {
        "q": q8[0, 0, 0],
        "k_nope": k8[0, 0, 0],
        "k_pe": k8[0, 0, 128],
        "v": v8[0, 0, 0],
        "kv_c in the cache": cache[0, 0, 0],
    }
    for name, value in found.items():
        print(f"NaN in {name}: {float(value)}")
    lost = sum(not value.float().isnan() for value in found.values())
    print(f"{lost} of {len(found)} NaNs became finite")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
