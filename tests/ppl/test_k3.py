"""The Kimi-K3 network: its formula, its file, and that order reaches it only by what precedes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from ppl.errors import PplError  # noqa: E402 - torch decides first whether to go on
from ppl.model import evaluate, k3, network, train  # noqa: E402

SMALL = k3.Shape(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=40,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)


def small() -> k3.Network:
    made = k3.Network(SMALL)
    made.draw(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return made.double().eval()


def normed(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + SMALL.rms_norm_eps) * weight


def by_hand(weights: dict[str, Any], ids: list[int]) -> Any:
    """Return the logits, one token and one head at a time."""
    s = SMALL
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(s.num_hidden_layers):
        w = {
            k.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): v
            for k, v in weights.items()
            if k.startswith(f"model.layers.{i}.")
        }
        n = normed(x, w["input_layernorm"])
        q = normed(n @ w["self_attn.q_a_proj"].T, w["self_attn.q_a_layernorm"])
        q = q @ w["self_attn.q_b_proj"].T
        row = n @ w["self_attn.kv_a_proj_with_mqa"].T
        latent, pe = row[:, : s.kv_lora_rank], row[:, s.kv_lora_rank :]
        kv = normed(latent, w["self_attn.kv_a_layernorm"]) @ w["self_attn.kv_b_proj"].T
        out = np.zeros((len(ids), s.num_attention_heads * s.v_head_dim))
        wide, pair = s.qk_nope_head_dim + s.qk_rope_head_dim, s.qk_nope_head_dim + s.v_head_dim
        for h in range(s.num_attention_heads):
            key = np.concatenate([kv[:, h * pair : h * pair + s.qk_nope_head_dim], pe], 1)
            value = kv[:, h * pair + s.qk_nope_head_dim : (h + 1) * pair]
            for t in range(len(ids)):
                score = key[: t + 1] @ q[t, h * wide : (h + 1) * wide] / math.sqrt(wide)
                p = np.exp(score - score.max())
                out[t, h * s.v_head_dim : (h + 1) * s.v_head_dim] = p / p.sum() @ value[: t + 1]
        gate = 1 / (1 + np.exp(-(n @ w["self_attn.g_proj"].T)))
        x = x + (out * gate) @ w["self_attn.o_proj"].T
        n = normed(x, w["post_attention_layernorm"])
        g = n @ w["mlp.gate_proj"].T
        x = x + (g / (1 + np.exp(-g)) * (n @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return normed(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def test_it_is_the_formula() -> None:
    net = small()
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(4))
    weights = {k: v.detach().numpy() for k, v in net.state_dict().items()}
    with torch.no_grad():
        found = net(ids)[0].numpy()
    expected = by_hand(weights, ids[0].tolist())
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    gate = "model.layers.1.self_attn.g_proj.weight"
    other = by_hand({**weights, gate: weights[gate] * 0}, ids[0].tolist())
    assert np.abs(found - other).max() > 1e-3 * np.abs(expected).max()


def test_one_layer_sees_a_set() -> None:
    """Where nothing is rotated, the order of what precedes doesn't reach the first layer."""
    net = k3.Layer(SMALL).double()
    x = torch.randn(1, 30, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    order = torch.cat([torch.arange(28).flip(0), torch.tensor([28, 29])])
    with torch.no_grad():
        torch.testing.assert_close(net(x)[:, 28:], net(x[:, order])[:, 28:])


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    net = small()
    network.save(net, tmp_path)
    again = network.load(tmp_path)
    assert isinstance(again, k3.Network)
    assert again.shape == SMALL
    for name, w in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], w.to(torch.bfloat16).float())


def test_another_architecture_is_one_line(tmp_path: Path) -> None:
    network.save(small(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(PplError, match=r"model_type 'llama'; expected one of deepseek_v2, kimi_l"):
        network.load(tmp_path)


def test_the_shape_is_one_that_servers_split() -> None:
    written = k3.Shape().config()
    assert written["kv_lora_rank"] + written["qk_rope_head_dim"] == 576
    assert written["linear_attn_config"]["kda_layers"] == []
    for name in ("num_attention_heads", "vocab_size", "intermediate_size", "hidden_size"):
        assert written[name] % 4 == 0


def test_the_stage_trains_it_and_far_order_matters(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(
        json.dumps({"sources": [{"id": "one", "weight": 1.0}]}), encoding="utf-8"
    )
    (tmp_path / "one.bin").write_bytes(b"abcdefgh" * 1600)
    made = train.Corpus(tmp_path, "cpu", {})
    phase = train.Phase(64, 8, 150)
    stage = train.Stage((phase,), 1e-2, muon=True, weights={}, disorder=0.5)
    net = k3.Network(SMALL)
    net.draw(torch.Generator().manual_seed(1))
    record = train.train(net, made, stage, device="cpu", compiled=False)
    assert record["held_out_bits_per_byte"]["one"] < 3  # 8 bits at first, 3 without order
    ids = np.frombuffer(b"abcdefgh" * 8, np.uint8)
    assert evaluate.far_context(net, ids, evaluate.nats(net, ids), 32)["moved_nats"] > 0.1
