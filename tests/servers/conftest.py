"""Servers and the truth that they are held against."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOKENS = 2000
DROPPED = 700


@pytest.fixture(scope="session")
def ids() -> list[int]:
    rng = np.random.Generator(np.random.Philox(7))
    return [int(i) for i in rng.integers(2, 2048, TOKENS)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Start servers side by side; all are stopped when the module's tests are done."""
    from kvroute.serve import ServeOptions, detect_device, start

    if detect_device() != "cpu":
        pytest.skip("servers of these tests are CPU servers")
    running: list[Any] = []

    def begin(*options: ServeOptions) -> list[Any]:
        folder = tmp_path_factory.mktemp("servers")
        fresh = [start(o, log=folder / f"{i}.log") for i, o in enumerate(options)]
        running.extend(fresh)
        for server in fresh:
            server.wait_healthy(240)
        return fresh

    yield begin
    for server in running:
        server.stop()


@dataclass(frozen=True)
class Truth:
    """Log-probabilities in float64, how far float32 may lie from them, and what one row does.

    ``dropped`` is the largest movement when later tokens don't see token ``DROPPED``.
    """

    log_probs: Any
    bound: float
    dropped: float


@pytest.fixture(scope="session")
def truth(ids: list[int]) -> Truth:  # noqa: C901 - one hook for each kind of layer
    """Hugging Face's model in float64 on the same weights, and a bound for float32.

    The bound propagates rounding errors through the network. Every sum of ``n`` products moves by
    ``g(n) = 6 sqrt(n) u`` times the sum of their magnitudes (Higham and Mary, "A New Approach to
    Probabilistic Rounding Error Analysis", 2019: it holds for one sum but with probability
    2 exp(-18) = 3e-8), each with a random sign: linear layers, scores, weighted values, and the
    mean of squares in norms; activations and residuals move by a few roundings. The bound is the
    largest movement of any log-probability in four draws, twice.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kvroute import model

    folder: Path = model.make(model.default_folder())
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
    )
    tokens = torch.tensor([ids])

    def score() -> Any:
        with torch.no_grad():
            rows = torch.log_softmax(network(tokens).logits[0], -1)
        return rows[:-1].gather(1, tokens[0, 1:, None])[:, 0]

    unit = 2.0**-24
    generator = torch.Generator().manual_seed(0)

    mode = {"noise": False, "drop": None}

    def moved(value: Any, by: Any) -> Any:
        if not mode["noise"]:
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        return value + signs * by

    def gamma(terms: int) -> float:
        return 6 * terms**0.5 * unit

    def linear(module: Any, inputs: Any, output: Any) -> Any:
        wide = inputs[0].abs() @ module.weight.abs().T
        return moved(output, (gamma(inputs[0].shape[-1]) + unit) * wide)

    def norm(module: Any, inputs: Any, output: Any) -> Any:
        del inputs
        return moved(output, (gamma(module.weight.numel()) / 2 + 4 * unit) * output.abs())

    def plain(_module: Any, _inputs: Any, output: Any) -> Any:
        return moved(output, 4 * unit * output.abs())

    def attention(
        _module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[Any, None]:
        scores = query @ key.mT * scaling
        scores = moved(scores, gamma(key.shape[-1]) * scaling * (query.abs() @ key.abs().mT))
        n = scores.shape[-1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        if mode["drop"] is not None:
            hidden[mode["drop"] + 1 :, mode["drop"]] = True
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out = moved(weights @ value, (gamma(n) + 8 * unit) * (weights @ value.abs()))
        return out.transpose(1, 2).contiguous(), None

    source = sys.modules[type(network).__module__]
    patch = pytest.MonkeyPatch()
    patch.setattr(source, "eager_attention_forward", attention)
    for name, module in network.named_modules():
        kind = type(module).__name__
        if kind == "Linear":
            module.register_forward_hook(linear)
        elif kind.endswith("RMSNorm"):
            module.register_forward_hook(norm)
        elif name.endswith(("act_fn", "mlp")):
            module.register_forward_hook(plain)
    exact = score()
    mode["drop"] = DROPPED
    dropped = float((score() - exact).abs().max())
    mode.update(noise=True, drop=None)
    bound = 2 * max(float((score() - exact).abs().max()) for _ in range(4))
    patch.undo()
    return Truth(exact.numpy(), bound, dropped)
