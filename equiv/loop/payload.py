"""What a case holds, before any index arithmetic: latents by position, queries, weights.

The dense reference reads these rows as they are. What fills the ranks' paged caches
(``equiv.loop.world``) is written apart from vLLM, and the reference shares nothing with either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from equiv.loop.case import DIMS, LoopCase

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUERY_GAIN = 2.0
"""Standard deviation of the scores: large enough that single tokens carry visible weight."""


@dataclass(frozen=True)
class Payload:
    """The contents of one case.

    Attributes
    ----------
    latents : ``[tokens, latent + rope]``, all requests' contexts one after another, in the
        cache's dtype.
    values : the same as the loop must see them: dequantised, in the model's dtype.
    projected : the latent columns of ``values`` as the projection must get them.
    query : ``[T, H, nope + rope]``, in the dtype that the loop gets.
    weight : ``[H * (nope + v), latent]``, in the model's dtype or fp8.

    """

    latents: Tensor
    values: Tensor
    projected: Tensor
    query: Tensor
    weight: Tensor


def make(case: LoopCase) -> Payload:
    """Draw the contents of a case, on the CPU, from its seed."""
    latent, nope, rope, _ = DIMS[case.dims]
    dtype = TORCH[case.dtype]
    rng = np.random.Generator(np.random.Philox(case.seed))
    tokens, queries = sum(case.contexts), sum(query for query, _ in case.requests)
    drawn = _normal(rng, (tokens, latent + rope))
    gain = QUERY_GAIN
    query = (_normal(rng, (queries, case.heads, nope + rope)) * gain).to(dtype)
    if case.fp8:
        query = query.to(torch.float8_e4m3fn)
    if case.cache == "fp8":
        scale = torch.tensor(float(case.k_scale), dtype=torch.float32)
        latents = (drawn / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        values = (latents.to(torch.float32) * scale).to(dtype)
    else:
        latents = values = drawn.to(dtype)
    projected = values[:, :latent]
    if case.proj == "fp8" and case.fp8:
        projected = projected.to(torch.float8_e4m3fn)
    weight = weight_of(case.heads, case.dims, case.dtype, case.proj)
    return Payload(latents, values, projected, query, weight)


@lru_cache(maxsize=64)
def weight_of(heads: int, dims: str, dtype: str, proj: str = "plain") -> Tensor:
    """Return the projection's weight, the same for every case of a shape."""
    latent, nope, _, value = DIMS[dims]
    rng = np.random.Generator(np.random.Philox(heads))
    drawn = _normal(rng, (heads * (nope + value), latent)) * float(latent) ** -0.5
    stored: Tensor = drawn.to(torch.float8_e4m3fn if proj == "fp8" else TORCH[dtype])
    return stored


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
