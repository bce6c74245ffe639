"""A small Kimi-K3 text model in plain PyTorch: the reference for what vLLM's layer computes.

vLLM serves it as ``KimiLinearForCausalLM``; every layer is one of K3's full-attention layers with
a dense MLP, none a linear-attention one. Against ``network``'s DeepSeek-V2 three things differ:
queries are projected through a normed latent, nothing is rotated (the 64 columns of ``r`` are plain
ones), and a sigmoid gate scales what the heads found. With ``x`` the normed hidden state, for each
head::

    q = norm(x Wqa) Wqb           [192]
    c, r = x Wa                   latent [512], and 64 columns for all heads
    k, v = norm(c) Wb             [128], [128]
    out = sigmoid(x Wg) * softmax(q . [k, r] / sqrt(192)) v

The MLP is ``(silu(x Wg) * x Wu) Wd``; there are no residual attention blocks, no scaling of logits
and no tied embeddings. Parameters are named as in a checkpoint.

Without positions a layer sees its context as a set: such a model is a poor one of texts, and what
far context means to it must be trained (``train``, the stages ``k3``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ppl.model import END, VOCABULARY
from ppl.model import network as base
from ppl.model.network import RMSNorm, attend

MODEL_TYPE = "kimi_linear"


@dataclass(frozen=True)
class Shape:
    """The numbers of ``config.json`` that decide the network, by their names there."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    q_lora_rank: int = 192
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int = VOCABULARY
    rms_norm_eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the whole ``config.json``."""
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": MODEL_TYPE,
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.qk_nope_head_dim,
            "hidden_act": "silu",
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            # No layer is a linear one; the four numbers are asked for all the same.
            "linear_attn_config": {
                "kda_layers": [],
                "full_attn_layers": list(range(1, self.num_hidden_layers + 1)),
                "num_heads": self.num_attention_heads,
                "head_dim": self.qk_nope_head_dim,
                "short_conv_kernel_size": 4,
            },
            "num_experts": None,
            "first_k_dense_replace": self.num_hidden_layers,
            "num_nextn_predict_layers": 0,
            "attn_res_block_size": None,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
            "pad_token_id": END,
            "bos_token_id": END,
            "eos_token_id": END,
            "torch_dtype": "bfloat16",
        }


class Attention(nn.Module):
    """Multi-head latent attention without positions and with a gate, over ``[B, T, hidden]``."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        heads, key = s.num_attention_heads, s.qk_nope_head_dim + s.qk_rope_head_dim
        self.q_a_proj = nn.Linear(s.hidden_size, s.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b_proj = nn.Linear(s.q_lora_rank, heads * key, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            s.kv_lora_rank, heads * (s.qk_nope_head_dim + s.v_head_dim), bias=False
        )
        self.g_proj = nn.Linear(s.hidden_size, heads * s.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * s.v_head_dim, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the heads add to the residual stream."""
        s = self.shape
        heads = s.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), -1)
        k = torch.cat((k_nope, k_pe[:, None].expand(-1, heads, -1, -1)), -1)
        out = attend(q, k, v).transpose(1, 2).flatten(-2)
        added: Tensor = self.o_proj(out * self.g_proj(x).sigmoid())
        return added


class Layer(nn.Module):
    """Attention and MLP, each on the normed residual stream and added to it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = base.MLP(s)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream behind the layer."""
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(base.Network):
    """The whole model: ids ``[B, T]`` to logits ``[B, T, 260]``."""

    shape: Shape

    def layer(self) -> nn.Module:
        """Return a layer of it."""
        return Layer(self.shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the token after each, ``[B, T, 260]``."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.model.norm(x))
        return out
