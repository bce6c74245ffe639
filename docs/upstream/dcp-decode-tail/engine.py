"""Reproduce: prompt log-probs of a prompt's last step under DCP, against tensor parallelism alone.

    python engine.py                              # two Hopper GPUs: TP2 x DCP2 against TP2
    python engine.py --dcp 1                      # is such a decode right without DCP?
    python engine.py --interleave 2               # DCP with every multi-token step as prefill
    python engine.py --attention-backend TRITON_MLA
    python engine.py --budget 1024                # shorter prompts

A random DeepSeek-V2 of two layers is written to a temporary folder. Each prompt is scored alone;
its last step has as many tokens as the tail says, in the engine asked about; TP alone takes
the whole prompt in one step, so it decodes none of it. With FLASH_ATTN_MLA tails up to 512 tokens
run as decode, 513 and 600 as prefill: they are the control, and so are the rows before.
Exits with 1 while a tail differs more than 5 times what the rows before it do, else with 0; with 2
where it can't run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

TAILS = (2, 8, 69, 106, 254, 512, 513, 600)
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 256,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
OFF = 5
"""Times the rms of the rows before."""


def write_model(folder: Path) -> None:
    """Write config and weights; queries and keys are large enough that attention isn't flat."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    c = CONFIG
    hidden, heads, wide = c["hidden_size"], c["num_attention_heads"], c["intermediate_size"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns) * gain / columns**0.5).bfloat16()

    weights = {
        "model.embed_tokens.weight": torch.randn(c["vocab_size"], hidden).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
        "lm_head.weight": matrix(c["vocab_size"], hidden, 3.0),
    }
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attention, mlp = at + "self_attn.", at + "mlp."
        weights |= {
            at + "input_layernorm.weight": torch.ones(hidden).bfloat16(),
            at + "post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
            attention + "q_proj.weight": matrix(heads * (nope + rope), hidden, 2.0),
            attention + "kv_a_proj_with_mqa.weight": matrix(c["kv_lora_rank"] + rope, hidden),
            attention + "kv_a_layernorm.weight": torch.ones(c["kv_lora_rank"]).bfloat16(),
            attention + "kv_b_proj.weight": matrix(heads * (nope + value), c["kv_lora_rank"]),
            attention + "o_proj.weight": matrix(hidden, heads * value, 4.0),
            mlp + "gate_proj.weight": matrix(wide, hidden),
            mlp + "up_proj.weight": matrix(wide, hidden),
            mlp + "down_proj.weight": matrix(hidden, wide),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def prompt(tail: int, budget: int) -> list[int]:
    """Return a prompt of one full step and ``tail`` tokens; those repeat what came just before."""
    source = torch.Generator().manual_seed(tail)
    ids = torch.randint(1, CONFIG["vocab_size"], (budget + tail,), generator=source)
    ids[64:] = torch.where(torch.rand(len(ids) - 64, generator=source) < 0.5, ids[:-64], ids[64:])  # noqa: PLR2004
    return ids.tolist()


def score(asked: argparse.Namespace) -> None:
    """In a process of its own: write every prompt's log-probs to ``--score``."""
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if asked.attention_backend:
        extra["attention_backend"] = asked.attention_backend
    if asked.dcp > 1:
        extra["decode_context_parallel_size"] = asked.dcp
        extra["cp_kv_cache_interleave_size"] = asked.interleave
    llm = LLM(
        model=asked.model,
        skip_tokenizer_init=True,
        tensor_parallel_size=asked.tp,
        max_num_batched_tokens=asked.budget + asked.room,
        max_model_len=asked.budget + max(TAILS) + 16,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_custom_all_reduce=asked.disable_custom_all_reduce,
        kv_cache_memory_bytes=1 << 31,
        gpu_memory_utilization=0.1,
        **extra,
    )
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    found = []
    for tail in TAILS:
        ids = prompt(tail, asked.budget)
        (made,) = llm.generate([{"prompt_token_ids": ids}], wanted, use_tqdm=False)
        rows = made.prompt_logprobs[1:]
        found.append([row[i].logprob for row, i in zip(rows, ids[1:], strict=True)])
    Path(asked.score).write_text(json.dumps(found), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run both engines, one after the other, and print the table."""
    parser = argparse.ArgumentParser(description="the last step's log-probs under DCP")
    parser.add_argument("--attention-backend", default="")
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dcp", type=int, default=2)
    parser.add_argument("--disable-custom-all-reduce", action="store_true")
    parser.add_argument("--room", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--score", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.score:
        score(asked)
        return 0
    if torch.cuda.device_count() < asked.tp:
        print(f"NOT RUN: {asked.tp} GPUs are needed, {torch.cuda.device_count()} are here")
        return 2
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_model(folder)
        rows = []
        for name, dcp, room in (("alone", 1, max(TAILS)), ("asked", asked.dcp, 0)):
            out = folder / f"{name}.json"
            options = [*arguments, "--model", made, "--score", str(out)]
            options += ["--dcp", str(dcp), "--room", str(room)]
            done = subprocess.run(  # noqa: S603
                [sys.executable, __file__, *options], check=False, capture_output=True, text=True
            )
            if done.returncode:
                print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
                print(f"NOT RUN: the engine {name} (DCP {dcp}) failed")
                return 2
            told = (done.stdout + done.stderr).splitlines()
            print(*sorted({x[-150:] for x in told if "backend" in x.lower()}), sep="\n")
            rows.append([torch.tensor(x).double() for x in json.loads(out.read_text())])
    wrong = 0
    print(f"{'tail':>5} {'rms before':>11} {'rms':>9} {'largest':>9} {'at':>5}  nats")
    for tail, alone, shared in zip(TAILS, *rows, strict=True):
        gap = shared - alone
        before, last = gap[: asked.budget], gap[asked.budget :]
        usual, found = (float(x.square().mean().sqrt()) for x in (before, last))
        at = int(last.abs().argmax())
        off = found > OFF * usual
        wrong += off
        print(f"{tail:5} {usual:11.2e} {found:9.2e} {float(last[at]):9.2e} {at:5}" + "  OFF" * off)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
