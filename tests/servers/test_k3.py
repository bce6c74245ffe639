"""vLLM's Kimi-K3 text model takes what ``ppl.model.k3`` writes: each tensor, where it belongs.

Its layers compute on CUDA alone, so a CPU only builds the model and loads the weights; what a
server makes of them is NOT COVERED here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
safetensors = pytest.importorskip("safetensors.torch")

from ppl import model  # noqa: E402 - torch decides first whether to go on
from ppl.model import k3, network, widen  # noqa: E402

LOAD = """
import json, sys, torch
class Nothing:
    def __init__(self, *a, **k): pass
torch.cuda.Stream = torch.cuda.Event = Nothing  # the model makes them where it is built
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(
    model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
    dtype="bfloat16", enable_prefix_caching=False,
).create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, "file://" + sys.argv[1] + "/met", 0, "gloo")
    initialize_model_parallel(1)
    torch.set_default_dtype(torch.bfloat16)
    from vllm.models.kimi_k3 import KimiLinearForCausalLM
    net = KimiLinearForCausalLM(vllm_config=config)
    weights = load_file(sys.argv[1] + "/model.safetensors")
    loaded = net.load_weights(iter(weights.items()))
made = dict(net.named_parameters())
first = "model.layers.0.self_attn."
parts = [weights[first + n + ".weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")]
print(json.dumps({
    "missing": sorted(set(made) - loaded),
    "fused": torch.equal(made[first + "fused_qkv_a_g_proj.weight"], torch.cat(parts)),
}))
"""


def loaded(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        env={**os.environ, "VLLM_KIMI_K3_GEMM_AR": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_vllm_takes_every_tensor(tmp_path: Path) -> None:
    net = k3.Network(k3.Shape(num_hidden_layers=1))
    net.draw(torch.Generator().manual_seed(2))
    network.save(net, tmp_path)
    assert loaded(tmp_path) == {"missing": [], "fused": True}

    path = tmp_path / model.WEIGHTS
    weights = safetensors.load_file(path)
    left_out = "model.layers.0.self_attn.kv_a_layernorm.weight"
    del weights[left_out]
    safetensors.save_file(weights, path)
    (tmp_path / "met").unlink(missing_ok=True)
    assert loaded(tmp_path)["missing"] == [left_out]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_vllm_takes_every_tensor_of_a_widened_model(tmp_path: Path) -> None:
    net = k3.Network(k3.Shape(num_hidden_layers=1))
    net.draw(torch.Generator().manual_seed(2))
    network.save(widen.widen(net, 96)[0], tmp_path)
    assert loaded(tmp_path) == {"missing": [], "fused": True}
