"""Train the small model: ``python -m ppl.model.train --corpus FOLDER --out FOLDER``.

Windows of the corpus are drawn at random, sources by their weights.
The stage ``main`` trains our own model anew: short windows first, then ones as long as the texts
that are scored. The stage ``finish`` goes on from it at a tenth of the rate, with plays in a second
layout among the rest, and ends as a mixture of the weights it began with and those it trained. The
stage ``k3`` trains a Kimi-K3 text model (``ppl.model.k3``); in half of its windows some of the
bytes change places, at a rate that stays the same over a window, so that it must read the whole
context to know how far to trust order.

Everything that is drawn follows from the seed; kernels on a GPU may still add in another order, so
two runs agree closely and not bit for bit.

Needs torch, numpy and safetensors, and a corpus that ``ppl.model.corpus`` prepared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from ppl.model.network import MODEL_TYPE, Network, architecture, load, save

SEED = 20260101
WARMUP, HOLD = 0.02, 0.45
"""Shares of all tokens until which the rate rises, and from which it falls to 0 in a line."""
DECAY = 0.1
CLIP = 1.0
HELD_OUT = 0.01
"""Share of each source, its end, that is not trained on."""
HELD_OUT_WINDOWS = 8
"""Windows of a source that are looked at in the end."""
SAVE_S = 60.0
SAY_S = 5.0


@dataclass(frozen=True)
class Phase:
    """``steps`` steps of ``windows`` windows of ``tokens`` tokens, anywhere or at beginnings."""

    tokens: int
    windows: int
    steps: int
    beginnings: bool = False


@dataclass(frozen=True)
class Stage:
    """Phases under one schedule of the learning rate.

    Attributes
    ----------
    rate : its peak. Muon's steps are scaled to the size of AdamW's, so one number does for both.
    muon : Muon for the matrices of the layers and AdamW for the rest; or AdamW alone.
    weights : in place of what the corpus says, of some sources.
    model_type : which network begins.
    disorder : share of the windows in which bytes change places.
    mix : the weights end as ``(1 - mix) * start + mix * trained``.

    """

    phases: tuple[Phase, ...]
    rate: float
    muon: bool
    weights: Mapping[str, float]
    model_type: str = MODEL_TYPE
    disorder: float = 0.0
    mix: float = 1.0


SECOND_LAYOUT = {"plays": 1.0, "plays-tabs": 0.8}
"""Weights that share out what plays had between two layouts."""

STAGES = {
    "main": Stage(
        (Phase(2048, 64, 7000), Phase(40_960, 4, 480), Phase(102_400, 2, 40)),
        rate=1e-2,
        muon=True,
        weights={"plays-tabs": 0.0},
    ),
    "finish": Stage(
        (Phase(2048, 64, 500), Phase(40_960, 4, 240), Phase(102_400, 2, 30)),
        rate=1e-3,
        muon=True,
        weights={"plays": 1.0, "plays-tabs": 0.3},
        mix=0.2,
    ),
    "k3": Stage(
        (Phase(2048, 64, 1800), Phase(8192, 16, 500), Phase(40_960, 4, 450)),
        rate=1e-2,
        muon=True,
        weights=SECOND_LAYOUT,
        model_type="kimi_linear",
        disorder=0.5,
    ),
    "k3-short": Stage(
        (Phase(2048, 64, 500), Phase(40_960, 4, 110)),
        rate=4e-3,
        muon=True,
        weights=SECOND_LAYOUT,
        model_type="kimi_linear",
        disorder=0.5,
    ),
}


class Corpus:
    """A prepared corpus on a device; a byte 255 in it is the token ``END``."""

    def __init__(self, folder: Path, device: str, weights: Mapping[str, float]) -> None:
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
        self.weights = np.array([float(weights.get(s["id"], s["weight"])) for s in listed])
        tokens = np.concatenate(parts).astype(np.int16)
        tokens[tokens == BYTES - 1] = END
        self.tokens = torch.from_numpy(tokens).to(device)
        self.documents = [
            np.concatenate([[0], np.flatnonzero(p[:-1] == BYTES - 1) + 1]) for p in parts
        ]

    def windows(
        self, rng: np.random.Generator, count: int, tokens: int, *, beginnings: bool = False
    ) -> Tensor:
        """Draw ``count`` windows of ``tokens + 1`` tokens, int64, each within one source."""
        room = np.maximum(self.kept - tokens, 0)
        share = np.where(room > 0, self.weights * self.kept, 0.0)
        source = rng.choice(len(share), count, p=share / share.sum())
        where = rng.random(count)
        if not beginnings:
            return self._cut(self.starts[source] + (where * room[source]).astype(np.int64), tokens)
        fitting = [d[d <= r] for d, r in zip(self.documents, room, strict=True)]
        chosen = [fitting[i][int(w * len(fitting[i]))] for i, w in zip(source, where, strict=True)]
        return self._cut(self.starts[source] + np.array(chosen), tokens)

    def held_out(self, tokens: int) -> dict[str, Tensor]:
        """Return some of what isn't trained on, in whole windows, by source."""
        found = {}
        for name, start, kept, size in zip(
            self.names, self.starts, self.kept, self.sizes, strict=True
        ):
            at = np.arange(start + kept, start + size - tokens, tokens)[:HELD_OUT_WINDOWS]
            if at.size:
                found[name] = self._cut(at, tokens)
        return found

    def _cut(self, at: npt.NDArray[np.int64], tokens: int) -> Tensor:
        offsets = torch.arange(tokens + 1, device=self.tokens.device)
        index = torch.from_numpy(at).to(self.tokens.device)[:, None] + offsets
        return self.tokens[index].long()


def disordered(rng: np.random.Generator, windows: Tensor, share: float) -> Tensor:
    """Return windows ``[B, T]`` where a ``share`` of them, on average, has bytes out of place.

    Half of those are shuffled whole. In the others each token is chosen with a probability that is
    drawn once a window, and the chosen ones change places among themselves, so that a window's
    counts never tell. A share of 0 draws nothing.
    """
    if not share:
        return windows
    count, tokens = windows.shape
    kind, some = rng.random(count), rng.random(count)
    rates = np.where(kind < share / 2, 1.0, np.where(kind < share, some, 0.0))
    device = windows.device
    dice = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
    one, two = torch.rand(2, count, tokens, generator=dice, device=device)
    chosen = one < torch.from_numpy(rates).to(device, torch.float32)[:, None]
    place = torch.arange(tokens, device=device) / tokens
    kept = 2 + place
    there = torch.where(chosen, place, kept).argsort(1)
    taken = torch.where(chosen, two, kept).argsort(1)
    return torch.empty_like(windows).scatter_(1, there, windows.gather(1, taken))


def rate(done: float) -> float:
    """Return the share of the peak rate when a share ``done`` of all tokens was seen."""
    if done < WARMUP:
        return done / WARMUP
    return min(1.0, (1 - done) / (1 - HOLD))


def optimizers(network: Network, stage: Stage) -> list[torch.optim.Optimizer]:
    """Return what steps a network's parameters in a stage, each of them by one optimizer."""
    matrices = [p for p in network.model.layers.parameters() if p.ndim > 1]
    chosen = {id(p) for p in matrices}
    others = [p for p in network.parameters() if id(p) not in chosen]
    adam = partial(torch.optim.AdamW, lr=stage.rate, betas=(0.9, 0.95), fused=True)
    if not stage.muon:
        return [adam(matrices, weight_decay=DECAY), adam(others, weight_decay=0.0)]
    muon = torch.optim.Muon(
        matrices, lr=stage.rate, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adam(others, weight_decay=0.0)]


def loss_of(network: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each window's tokens but the first, in nats."""
    logits = network(windows[:, :-1])
    return functional.cross_entropy(logits.float().view(-1, VOCABULARY), windows[:, 1:].flatten())


def train(
    network: Network,
    corpus: Corpus,
    stage: Stage,
    *,
    device: str,
    seed: int = SEED,
    compiled: bool = True,
    checkpoint: Callable[[Network], None] = lambda _: None,
) -> dict[str, Any]:
    """Train a network in place, and return a record of it.

    What ``checkpoint`` gets is what was trained so far; only the end is mixed with the beginning.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    network.to(device).train()
    start = deepcopy(network.state_dict())
    precision = partial(torch.autocast, device, torch.bfloat16, enabled=device == "cuda")
    forward: Any = torch.compile(network, dynamic=False) if compiled else network
    steppers = optimizers(network, stage)
    whole = sum(p.tokens * p.windows * p.steps for p in stage.phases)
    seen, record = 0, []
    begun = said = saved = time.monotonic()
    for phase in stage.phases:
        started, total = time.monotonic(), torch.zeros((), device=device)
        for step in range(phase.steps):
            for stepper in steppers:
                for group in stepper.param_groups:
                    group["lr"] = stage.rate * rate(seen / whole)
            windows = corpus.windows(rng, phase.windows, phase.tokens, beginnings=phase.beginnings)
            windows = disordered(rng, windows, stage.disorder)
            with precision():
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
    mix(network, start, stage.mix)
    network.eval()
    bits = {}
    with torch.no_grad(), precision():
        for name, windows in corpus.held_out(stage.phases[0].tokens).items():
            bits[name] = float(loss_of(network, windows)) / float(np.log(2))
    return {
        "seed": seed,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "rate": stage.rate,
        "weights": dict(stage.weights),
        "mix": stage.mix,
        "phases": record,
        "tokens": seen,
        "wall_s": time.monotonic() - begun,
        "held_out_bits_per_byte": bits,
    }


def mix(network: Network, start: Mapping[str, Tensor], share: float) -> None:
    """Make a network's weights ``(1 - share) * start + share * weights``, in their own dtype."""
    with torch.no_grad():
        for name, weight in network.state_dict().items():
            weight.copy_((1 - share) * start[name] + share * weight)


def _say(begun: float, line: str) -> None:
    sys.stderr.write(f"[{time.monotonic() - begun:6.1f} s] {line}\n")
    sys.stderr.flush()


def _phase(text: str) -> Phase:
    tokens, windows, steps = (int(x) for x in text.removesuffix("b").split("x"))
    return Phase(tokens, windows, steps, beginnings=text.endswith("b"))


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError(text)
    return share


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m ppl.model.train``."""
    parser = argparse.ArgumentParser(prog="python -m ppl.model.train", allow_abbrev=False)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of ppl.model.corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--stage", choices=STAGES, default="main")
    parser.add_argument("--start", type=Path, help="a model to go on from; default: a new one")
    parser.add_argument(
        "--mix",
        type=_share,
        metavar="SHARE",
        help="save (1 - SHARE) * start + SHARE * trained; default: the stage's, 1 but for finish",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--no-compile", action="store_true", help="run PyTorch eagerly")
    parser.add_argument(
        "--phase",
        type=_phase,
        action="append",
        metavar="TOKENSxWINDOWSxSTEPS[b]",
        help="one phase, b: at beginnings; may be given several times; default: those of the stage",
    )
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    try:
        stage = STAGES[options.stage]
        if options.phase:
            stage = replace(stage, phases=tuple(options.phase))
        if options.mix is not None:
            stage = replace(stage, mix=options.mix)
        if stage.mix < 1 and not options.start:
            raise PplError(f"a mix of {stage.mix:g} needs the model it begins from: give --start")
        corpus = Corpus(options.corpus, options.device, stage.weights)
        if options.start:
            network = load(options.start)
        else:
            shape, make = architecture(stage.model_type)
            network = make(shape())
            network.draw(torch.Generator().manual_seed(options.seed))
        record = train(
            network,
            corpus,
            stage,
            device=options.device,
            seed=options.seed,
            compiled=not options.no_compile,
            checkpoint=lambda n: save(n, options.out),
        )
        save(network, options.out)
        lines = json.dumps({options.stage: record}, indent=1) + "\n"
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
