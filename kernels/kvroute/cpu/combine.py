"""Scaling a rank's decode output to its share of the whole softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def make_correct_attn_out(_original: Any) -> Any:
    """``vllm.v1.attention.ops.dcp.correct_attn_out`` in torch.

    ``lse = log(sum_n exp(lses[n]))`` and, in place, ``out *= exp(lses[cp_rank] - lse)``; base 2
    where ``is_lse_base_on_e`` is false. NaN and +inf count as an empty shard, and a shard
    without weight contributes 0 whatever its output holds.
    """

    def correct_attn_out(
        out: Tensor,
        lses: Tensor,
        cp_rank: int,
        ctx: Any,  # noqa: ARG001
        is_lse_base_on_e: bool = True,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor, Tensor]:
        if out.ndim == 4 and out.shape[1] == 1:  # noqa: PLR2004
            out = out.squeeze(1)
        if lses.ndim == 4:  # noqa: PLR2004
            lses = lses.squeeze(-1) if lses.shape[-1] == 1 else lses.squeeze(1)
        clean = torch.where(torch.isnan(lses) | torch.isposinf(lses), float("-inf"), lses)
        unit = 1.0 if is_lse_base_on_e else float(torch.log(torch.tensor(2.0)))
        total = torch.logsumexp(clean * unit, dim=0)
        weight = torch.exp(clean[cp_rank] * unit - total)
        weight = torch.where(torch.isnan(weight), 0.0, weight).unsqueeze(-1)
        out.copy_(torch.where(weight == 0, 0.0, out.float() * weight).to(out.dtype))
        return out, (total / unit).to(lses.dtype)

    return correct_attn_out
