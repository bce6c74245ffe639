"""The small model's forward pass in plain PyTorch: the reference for what a server computes.

A dense DeepSeek-V2: pre-norm layers of multi-head latent attention and a gated MLP. With ``x`` the
normed hidden state of a token at position ``p``, for each head::

    q = x Wq                      [192] = 128 without position, 64 rotated by p
    c, r = x Wa                   latent [512], rotary key [64], one for all heads
    k, v = norm(c) Wb             [128], [128]
    out = softmax(q . [k, rot(r, p)] / sqrt(192)) v

Rotation turns the pairs ``(2i, 2i + 1)`` of the 64 columns by ``p * theta ** (-2i / 64)``, as vLLM
(not neox) and Hugging Face transformers do for this architecture. Parameters are named as in a
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppl.errors import PplError
from ppl.model import CONFIG, END, VOCABULARY, WEIGHTS

INIT_STD = 0.02
MODEL_TYPE = "deepseek_v2"


@dataclass(frozen=True)
class Shape:
    """The numbers of ``config.json`` that decide the network, by their names there."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    vocab_size: int = VOCABULARY
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the whole ``config.json``."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": MODEL_TYPE,
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "num_key_value_heads": self.num_attention_heads,
            "q_lora_rank": None,
            "first_k_dense_replace": self.num_hidden_layers,
            # No layer uses them, but the configuration's class insists on numbers.
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "max_position_embeddings": 131_072,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": END,
            "eos_token_id": END,
            "torch_dtype": "bfloat16",
        }


class AnyShape(Protocol):
    """What every architecture's shape has."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Width of an MLP."""

    @property
    def num_hidden_layers(self) -> int:
        """How many layers."""

    @property
    def vocab_size(self) -> int:
        """How many tokens."""

    @property
    def rms_norm_eps(self) -> float:
        """What keeps a norm from dividing by 0."""


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, the quotient in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` scaled, in its own dtype."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of ``x`` ``[..., T, 64]`` by angles given as ``[T, 32]``."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention, causal, over ``[B, T, hidden]``."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        heads, key = s.num_attention_heads, s.qk_nope_head_dim + s.qk_rope_head_dim
        self.q_proj = nn.Linear(s.hidden_size, heads * key, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            s.kv_lora_rank, heads * (s.qk_nope_head_dim + s.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * s.v_head_dim, s.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what the heads add to the residual stream."""
        s = self.shape
        heads = s.num_attention_heads
        q = self.q_proj(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_pe = q.split((s.qk_nope_head_dim, s.qk_rope_head_dim), -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), -1)
        k_pe = rotate(k_pe, cos, sin)[:, None].expand(-1, heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_pe, cos, sin)), -1)
        out = attend(q, torch.cat((k_nope, k_pe), -1), v)
        added: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return added


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; ``q``, ``k`` ``[B, H, T, 192]``, ``v`` ``[B, H, T, 128]``.

    cuDNN takes a value that is narrower than the key. PyTorch's other fast kernels don't, and
    without one a long text needs ``T * T`` scores in memory: there zeros widen the value.
    """
    width = v.shape[-1]
    if not (q.is_cuda and q.dtype in {torch.bfloat16, torch.float16}):
        v = functional.pad(v, (0, k.shape[-1] - width))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :width]


class MLP(nn.Module):
    """``(silu(x Wg) * x Wu) Wd``."""

    def __init__(self, s: AnyShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each on the normed residual stream and added to it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream behind the layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Everything below the head."""

    def __init__(self, s: AnyShape, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(layer() for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)


class Network(nn.Module):
    """The whole model: ids ``[B, T]`` to logits ``[B, T, 260]``."""

    shape: Any

    def __init__(self, shape: AnyShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape, self.layer)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def layer(self) -> nn.Module:
        """Return a layer of it."""
        return Layer(self.shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the token after each, ``[B, T, 260]``."""
        cos, sin = self.angles(ids.shape[1], ids.device)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.lm_head(self.model.norm(x))
        return out

    def angles(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary angles, float32 ``[tokens, 32]``."""
        size = self.shape.qk_rope_head_dim
        exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        frequency = self.shape.rope_theta**-exponent
        angle = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequency
        return angle.cos(), angle.sin()

    def draw(self, generator: torch.Generator) -> None:
        """Draw all weights anew: normal, the two that write to the residual stream zero."""
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 1:
                    p.fill_(1.0)
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    p.zero_()
                else:
                    std = 1.0 if "embed" in name else INIT_STD
                    p.copy_(torch.randn(p.shape, generator=generator) * std)


def architecture(model_type: str) -> tuple[type[Any], type[Network]]:
    """Return the shape and the network of a ``config.json`` with this ``model_type``.

    Raises
    ------
    ValueError : neither ours nor the one of ``ppl.model.k3``.

    """
    from ppl.model import k3

    known: dict[str, tuple[type[Any], type[Network]]] = {
        MODEL_TYPE: (Shape, Network),
        k3.MODEL_TYPE: (k3.Shape, k3.Network),
    }
    if model_type not in known:
        raise ValueError(f"model_type {model_type!r}; expected one of {', '.join(known)}")
    return known[model_type]


def load(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Network:
    """Read a model's folder.

    Raises
    ------
    PplError : it isn't there, or isn't such a model.

    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, make = architecture(found["model_type"])
        network = make(kind(**{f.name: found[f.name] for f in fields(kind)})).to(dtype)
        network.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as e:
        line = str(e).partition("\n")[0]
        raise PplError(f"{folder}: not a model of this shape: {line}") from None
    return network.to(device).eval()


def save(network: Network, folder: Path) -> None:
    """Write ``config.json`` and the weights, in bfloat16, each whole or not at all."""
    from safetensors.torch import save as to_bytes

    from equiv.files import write_whole

    weights = {k: v.detach().to("cpu", torch.bfloat16) for k, v in network.state_dict().items()}
    write_whole(folder / WEIGHTS, to_bytes(weights, metadata={"format": "pt"}))
    config = json.dumps(network.shape.config(), indent=1) + "\n"
    write_whole(folder / CONFIG, config.encode())
