"""Train the small model: ``python -m ppl.model.train --corpus FOLDER --out FOLDER --device cuda``.

Windows of the corpus are drawn at random, sources by their weights, first short ones and then ones
as long as the texts that are scored. Everything that is drawn follows from the seed; kernels on a
GPU may still add in another order, so two runs agree closely and not bit for bit.

Needs torch, numpy and safetensors, and a corpus that ``ppl.model.corpus`` prepared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from equiv.errors import UsageError
from equiv.files import write_whole
from ppl.errors import PplError
from ppl.model import BYTES, END, VOCABULARY
from ppl.model.network import Network, Shape, save

SEED = 20260101
RATE = 4e-3
"""Peak learning rate, of both optimizers: Muon's is scaled to have the size of AdamW's steps."""
WARMUP, HOLD = 0.02, 0.45
"""Shares of all tokens until which the rate rises, and from which it falls to 0 in a line."""
DECAY = 0.1
CLIP = 1.0
HELD_OUT = 0.01
"""Share of each source, its end, that is not trained on."""
SAVE_S = 60.0
SAY_S = 5.0


@dataclass(frozen=True)
class Phase:
    """``steps`` steps of ``windows`` windows of ``tokens`` tokens."""

    tokens: int
    windows: int
    steps: int


PHASES = (Phase(2048, 64, 2000), Phase(40_960, 4, 300))


class Corpus:
    """A prepared corpus on a device; a byte 255 in it is the token ``END``."""

    def __init__(self, folder: Path, device: str) -> None:
        try:
            listed = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))["sources"]
            parts = [np.fromfile(folder / f"{s['id']}.bin", np.uint8) for s in listed]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise PplError(
                f"{folder}: no prepared corpus ({e}); make one: python -m ppl.model.corpus"
            ) from None
        self.names = [str(s["id"]) for s in listed]
        sizes = np.array([p.size for p in parts])
        self.kept: npt.NDArray[np.int64] = (sizes * (1 - HELD_OUT)).astype(np.int64)
        self.starts: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.sizes = sizes
        self.weights = np.array([float(s["weight"]) for s in listed])
        tokens = np.concatenate(parts).astype(np.int16)
        tokens[tokens == BYTES - 1] = END
        self.tokens = torch.from_numpy(tokens).to(device)

    def windows(self, rng: np.random.Generator, count: int, tokens: int) -> Tensor:
        """Draw ``count`` windows of ``tokens + 1`` tokens, int64, each within one source."""
        room = np.maximum(self.kept - tokens, 0)
        share = np.where(room > 0, self.weights * self.kept, 0.0)
        source = rng.choice(len(share), count, p=share / share.sum())
        at = self.starts[source] + (rng.random(count) * room[source]).astype(np.int64)
        return self._cut(at, tokens)

    def held_out(self, tokens: int) -> dict[str, Tensor]:
        """Return what isn't trained on, in whole windows, by source."""
        found = {}
        for name, start, kept, size in zip(
            self.names, self.starts, self.kept, self.sizes, strict=True
        ):
            at = np.arange(start + kept, start + size - tokens, tokens)
            if at.size:
                found[name] = self._cut(at, tokens)
        return found

    def _cut(self, at: npt.NDArray[np.int64], tokens: int) -> Tensor:
        offsets = torch.arange(tokens + 1, device=self.tokens.device)
        index = torch.from_numpy(at).to(self.tokens.device)[:, None] + offsets
        return self.tokens[index].long()


def rate(done: float) -> float:
    """Return the share of the peak rate when a share ``done`` of all tokens was seen."""
    if done < WARMUP:
        return done / WARMUP
    return min(1.0, (1 - done) / (1 - HOLD))


def optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding, head and norms."""
    matrices = [p for p in network.model.layers.parameters() if p.ndim > 1]
    chosen = {id(p) for p in matrices}
    others = [p for p in network.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]


def loss_of(network: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each window's tokens but the first, in nats."""
    logits = network(windows[:, :-1])
    return functional.cross_entropy(logits.float().view(-1, VOCABULARY), windows[:, 1:].flatten())


def train(
    corpus: Corpus,
    shape: Shape,
    phases: Sequence[Phase],
    *,
    device: str,
    seed: int = SEED,
    compiled: bool = True,
    checkpoint: Callable[[Network], None] = lambda _: None,
) -> tuple[Network, dict[str, Any]]:
    """Return a trained network, and a record of the training."""
    rng = np.random.Generator(np.random.Philox(seed))
    network = Network(shape)
    network.draw(torch.Generator().manual_seed(seed))
    network.to(device).train()
    forward: Any = torch.compile(network, dynamic=False) if compiled else network
    steppers = optimizers(network)
    whole = sum(p.tokens * p.windows * p.steps for p in phases)
    seen, record = 0, []
    begun = said = saved = time.monotonic()
    for phase in phases:
        started, total = time.monotonic(), torch.zeros((), device=device)
        for step in range(phase.steps):
            for stepper in steppers:
                for group in stepper.param_groups:
                    group["lr"] = RATE * rate(seen / whole)
            windows = corpus.windows(rng, phase.windows, phase.tokens)
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(forward, windows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            total = total.lerp(loss.detach(), max(0.02, 1 / (step + 1)))
            seen += phase.tokens * phase.windows
            now = time.monotonic()
            if step == 0:
                float(loss.detach())  # what is compiled is over when its first result is there
                started = time.monotonic()
            if now - said >= SAY_S or step + 1 == phase.steps:
                said = now
                bits = float(total) / np.log(2)
                _say(begun, f"{phase.tokens} tokens, step {step + 1} of {phase.steps}: {bits:.4f}")
            if now - saved >= SAVE_S:
                saved = now
                checkpoint(network)
        seconds = time.monotonic() - started
        speed = phase.tokens * phase.windows * (phase.steps - 1) / max(seconds, 1e-9)
        record.append(
            {**asdict(phase), "bits_per_byte": float(total) / np.log(2), "tokens_per_s": speed}
        )
        _say(begun, f"{phase.tokens} tokens: {speed / 1e6:.3f} M tokens/s")
    network.eval()
    bits = {}
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for name, windows in corpus.held_out(phases[0].tokens).items():
            bits[name] = float(loss_of(network, windows)) / float(np.log(2))
    return network, {
        "seed": seed,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "phases": record,
        "tokens": seen,
        "wall_s": time.monotonic() - begun,
        "held_out_bits_per_byte": bits,
    }


def _say(begun: float, line: str) -> None:
    sys.stderr.write(f"[{time.monotonic() - begun:6.1f} s] {line}\n")
    sys.stderr.flush()


def _phase(text: str) -> Phase:
    tokens, windows, steps = (int(x) for x in text.split("x"))
    return Phase(tokens, windows, steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m ppl.model.train``."""
    parser = argparse.ArgumentParser(prog="python -m ppl.model.train", allow_abbrev=False)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of ppl.model.corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--no-compile", action="store_true", help="run PyTorch eagerly")
    parser.add_argument(
        "--phase",
        type=_phase,
        action="append",
        metavar="TOKENSxWINDOWSxSTEPS",
        help="one phase; may be given several times; default: those of the committed model",
    )
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    try:
        network, record = train(
            Corpus(options.corpus, options.device),
            Shape(),
            options.phase or PHASES,
            device=options.device,
            seed=options.seed,
            compiled=not options.no_compile,
            checkpoint=lambda n: save(n, options.out),
        )
        save(network, options.out)
        lines = json.dumps(record, indent=1) + "\n"
        write_whole(options.out / "training.json", lines.encode())
    except UsageError as e:
        sys.stderr.write(f"bytegate: {e}\n")
        return 2
    except OSError as e:
        sys.stderr.write(f"bytegate: can't write to {options.out}: {e.strerror}\n")
        return 2
    sys.stdout.write(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
