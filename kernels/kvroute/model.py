"""A small random model of DeepSeek-V2's shape, made locally from a seed.

Two dense layers, hidden size 256, 4 heads of 128 + 64 key and 128 value columns over a latent of
512 + 64: the smallest that vLLM's CPU MLA backend takes (it needs rows of 576). Weights are drawn
so that log-probabilities depend on the whole context: dummy weights give ``-ln(vocabulary)``
whatever attention does.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SEED = 20260101
"""Seed of the default model's weights."""
REVISION = 1
"""Raised whenever the same seed would give other weights."""

HIDDEN, LAYERS, HEADS, MLP, VOCABULARY = 256, 2, 4, 512, 2048
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
MAX_POSITIONS = 131072


def config(*, heads: int = HEADS, layers: int = LAYERS) -> dict[str, Any]:
    """Return the model's ``config.json``."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "first_k_dense_replace": layers,
        # No layer uses them, but the configuration's class insists on numbers.
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def weights(
    seed: int = SEED,
    *,
    heads: int = HEADS,
    layers: int = LAYERS,
) -> dict[str, npt.NDArray[np.float32]]:
    """Draw the weights, float32, by their names in a checkpoint.

    Matrices are normal with standard deviation ``gain / sqrt(columns)``. The query's gain of 2
    makes attention uneven enough that single context tokens matter; the head's gain of 1.5 spreads
    the logits.
    """
    rng = np.random.Generator(np.random.Philox(seed))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        drawn = rng.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(gain / columns**0.5)

    def norm(size: int) -> npt.NDArray[np.float32]:
        return 1 + np.float32(0.1) * rng.standard_normal(size, dtype=np.float32)

    found = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found[at + "input_layernorm.weight"] = norm(HIDDEN)
        found[at + "self_attn.q_proj.weight"] = matrix(heads * (NOPE + ROPE), HIDDEN, 2.0)
        found[at + "self_attn.kv_a_proj_with_mqa.weight"] = matrix(LATENT + ROPE, HIDDEN)
        found[at + "self_attn.kv_a_layernorm.weight"] = norm(LATENT)
        found[at + "self_attn.kv_b_proj.weight"] = matrix(heads * (NOPE + VALUE), LATENT)
        found[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, heads * VALUE, 2.0)
        found[at + "post_attention_layernorm.weight"] = norm(HIDDEN)
        found[at + "mlp.gate_proj.weight"] = matrix(MLP, HIDDEN)
        found[at + "mlp.up_proj.weight"] = matrix(MLP, HIDDEN)
        found[at + "mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
    found["model.norm.weight"] = norm(HIDDEN)
    found["lm_head.weight"] = matrix(VOCABULARY, HIDDEN, 1.5)
    return found


def make(folder: Path, seed: int = SEED, *, heads: int = HEADS) -> Path:
    """Write the model to ``folder`` unless a whole one is there; return ``folder``."""
    from safetensors.numpy import save_file

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"model.{os.getpid()}.part"
    save_file(weights(seed, heads=heads), partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    # Last, and in one step: its presence says that the weights are whole.
    partial.write_text(json.dumps(config(heads=heads), indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")
    return folder


def heads_for(tp: int) -> int:
    """Return the heads of the default model: the fewest, from four on, that ``tp`` divides."""
    return math.lcm(HEADS, tp)


def default_folder(heads: int = HEADS) -> Path:
    """Where the default model is kept: below ``XDG_CACHE_HOME``, else ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    width = "" if heads == HEADS else f"-h{heads}"
    return cache / "bytegate" / f"small-deepseek-v2-r{REVISION}-{SEED}{width}"
