"""The loop's answer by dense attention in float64, and how far a correct loop may lie from it.

For a request with context rows ``c`` (latent) and ``p`` (rope), head ``h`` and query ``q``::

    [n | v] = c @ W_h.T        s = scale * (q_nope . n + q_rope . p)
    lse = log(sum_j exp(s_j))  out = sum_j exp(s_j - lse) v_j

and ``out = 0``, ``lse = -inf`` where there is no context.

**The bound.** With ``u32 = 2**-24``, ``u`` the model dtype's unit roundoff and ``u8`` that of
fp8 (``2**-4``, with subnormals absolutely ``2**-10``), a correct loop stores, for each element,

    |dn|, |dv| <= g(L) (|c| @ |W|) + u |n|    and, when cast to fp8, + u8 |n| + 2**-10
    |dp| <= u8 |p| + 2**-10 when cast to fp8, else 0

because the projection accumulates in float32 over L latent columns, ``g(n) = n u32 / (1 - n u32)``
(Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1), and is then rounded
(fp16 also below its normal numbers). Scores
accumulate over ``d`` columns in float32 and are scaled, so

    |ds_j| <= scale (|q_nope| . |dn_j| + |q_rope| . |dp_j|) + (g(d) + 2 u32) scale |q| . |k_j|

With ``e = max_j |ds_j|``, and ``w = (n + 16 chunks) u32`` for the exponentials, their sums over n
tokens and the merges' weights: ``|dlse| <= e + w + 8 u32 |lse|`` and, with ``P = sum_j p_j |v_j|``,

    |dout| <= (exp(2 (e + w)) - 1) (P + Q) + Q + 2 chunks u P,     Q = max_j |dv_j|

the last term for rounding each chunk's output and each merge to the output's dtype. It is taken
5 % wider for the products of small terms that it leaves out. No figure in it was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equiv.loop.case import DIMS, LoopCase
from equiv.loop.payload import Payload

U32 = 2.0**-24
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Unit roundoff, half the spacing above 1."""
TINY = {"fp32": 0.0, "bf16": 0.0, "fp16": 2.0**-25}
"""Half the spacing of subnormals, where drawn values come near them."""
U8, TINY8 = 2.0**-4, 2.0**-10
"""Unit roundoff of e4m3, and half the spacing of its subnormals."""
SLACK = 1.05


@dataclass(frozen=True)
class Answer:
    """Dense results and their bounds, float64.

    Attributes
    ----------
    out, out_bound : ``[T, H, v]``.
    lse, lse_bound : ``[H, T]``; a bound of 0 where there is no context.

    """

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor


def dense(case: LoopCase, payload: Payload, chunks: int, scale: float) -> Answer:
    """Compute the answer of one case.

    Parameters
    ----------
    chunks : context chunks that the plan has, for the bound's merges.
    scale : the softmax scale.

    """
    latent, nope, rope, value = DIMS[case.dims]
    tokens = payload.query.shape[0]
    out = torch.zeros(tokens, case.heads, value, dtype=torch.float64)
    lse = torch.full((case.heads, tokens), float("-inf"), dtype=torch.float64)
    out_bound, lse_bound = torch.zeros_like(out), torch.zeros_like(lse)
    weight = payload.weight.to(torch.float32).double().view(case.heads, nope + value, latent)
    query = payload.query.to(torch.float32).double()
    unit = UNIT[case.dtype]
    latents = payload.projected.to(torch.float32).double()
    tiny = TINY[case.dtype]
    row = token = 0
    for count, context in case.requests:
        mine = slice(token, token + count)
        if context:
            rows = latents[row : row + context]
            q = query[mine].transpose(0, 1)  # [H, q, d]
            kv = torch.matmul(rows, weight.mT)  # [H, n, nope + v]
            d_kv = _gamma(latent) * torch.matmul(rows.abs(), weight.abs().mT)
            d_kv += unit * kv.abs() + tiny
            pe = payload.values[row : row + context, latent:].double()
            d_pe = torch.zeros_like(pe)
            if case.fp8:
                d_kv += U8 * kv.abs() + TINY8
                d_pe = U8 * pe.abs() + TINY8
            k = torch.cat((kv[..., :nope], pe.expand(case.heads, -1, -1)), dim=-1)
            d_k = torch.cat((d_kv[..., :nope], d_pe.expand(case.heads, -1, -1)), dim=-1)
            d_k += (_gamma(nope + rope) + 2 * U32) * k.abs()
            s = scale * torch.matmul(q, k.mT)
            error = (scale * torch.matmul(q.abs(), d_k.mT)).amax(-1)  # [H, q]
            error += (context + 16 * chunks) * U32
            total = torch.logsumexp(s, dim=-1)
            p = torch.exp(s - total.unsqueeze(-1))
            v, d_v = kv[..., nope:], d_kv[..., nope:].amax(1, keepdim=True)
            lse[:, mine] = total
            lse_bound[:, mine] = SLACK * (error + 8 * U32 * total.abs())
            out[mine] = torch.matmul(p, v).transpose(0, 1)
            mass = torch.matmul(p, v.abs())
            spread = torch.expm1(2 * error).unsqueeze(-1)
            bound = spread * (mass + d_v) + d_v + 2 * chunks * (unit * mass + tiny)
            out_bound[mine] = SLACK * bound.transpose(0, 1)
        row += context
        token += count
    return Answer(out, lse, out_bound, lse_bound)


def _gamma(terms: int) -> float:
    return terms * U32 / (1 - terms * U32)
