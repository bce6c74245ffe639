"""Count, on a CPU, where K3's fp8 epilogue and the ops that it replaces give other bytes.

    python counts.py

1. The cache: ``concat_and_cache_mla`` quantises ``x / scale``, the epilogue ``x * (1 / scale)``.
2. Rotated columns: unfused they are rounded to bf16 before they are rounded to e4m3.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
SCALES = (0.5, 0.0425, 0.07, 0.3, 1.7)
PAIRS = 1 << 20


def byte(x: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 bytes of float32 values, saturating."""
    return x.clamp(-448, 448).to(FP8).view(torch.uint8)


def main() -> None:
    """Print both counts."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    words = words[words.isfinite()]
    for value in SCALES:
        scale = torch.tensor(value)
        other = (byte(words / scale) != byte(words * scale.reciprocal())).sum()
        print(f"scale {value}: {int(other)} of {len(words)} finite bf16 values have another byte")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, PAIRS, generator=generator).bfloat16().float()
    angle = torch.rand(PAIRS, generator=generator) * 6.2831855
    turned = x * angle.cos() - y * angle.sin()
    other = (byte(turned) != byte(turned.bfloat16().float())).sum()
    print(f"rotated: {int(other)} of {PAIRS} have another byte where bf16 comes between")


if __name__ == "__main__":
    main()
