"""What the small model makes of texts: ``python -m ppl.model.evaluate --texts CORPUS/eval``.

Bits a byte, by windows of 4,096 bytes, and how much the context matters. The reference forward
pass computes it, in float32 unless asked otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from equiv.errors import UsageError
from equiv.files import write_whole
from ppl.errors import PplError
from ppl.model import folder as own_folder
from ppl.model import sha256
from ppl.model.network import Network, load
from texts.cut import LEAST, MOST, wanted_tokens

WINDOW = 4096
"""Bytes of a window."""
MOST_BITS = 2.5
"""What an English text may cost a byte."""
MOST_RATIO = 1.15
"""What a window may cost against the median of its text's windows."""
BUDGET = 512
"""Tokens of a chunk, as in ``kvroute.serve``'s CPU servers."""
STRIDE = 64
"""Bytes between two windows, where all of them are looked at rather than those side by side."""
SEED = 7

Nats = npt.NDArray[np.float64]


def nats(network: Network, ids: npt.NDArray[np.uint8]) -> Nats:
    """Return the negative log-likelihood of ``ids[1:]``, each given all before it, in nats.

    ``[n - 1]``; entry ``i`` is of token ``i + 1``.
    """
    device = next(network.parameters()).device
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
    with torch.no_grad():
        logits = network(tokens[:, :-1])[0].float()
        found = functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    return found.double().cpu().numpy()


def windows(scores: Nats, stride: int = WINDOW) -> Nats:
    """Return bits a byte of the windows of a text that begin at multiples of ``stride``.

    The first window has one score less than the others: nothing predicts its first byte.
    """
    sums = np.concatenate([[0.0, 0.0], np.cumsum(scores)])  # sums[i]: of the bytes before i
    starts = np.arange(0, len(scores) + 1 - WINDOW + 1, stride)
    scored = WINDOW - (starts == 0)
    bits: Nats = (sums[starts + WINDOW] - sums[starts]) / scored / np.log(2)
    return bits


def by_window(scores: Nats) -> dict[str, Any]:
    """Return the windows of the first 36,000 bytes, and the worst against their median."""
    first = scores[: MOST - 1]
    side_by_side, every = windows(first), windows(first, STRIDE)
    return {
        "windows": [round(float(b), 4) for b in side_by_side],
        "worst_ratio": float(side_by_side.max() / np.median(side_by_side)),
        "worst_ratio_any_start": float(every.max() / np.median(every)),
        "worst_any_start_at": int(every.argmax()) * STRIDE,
    }


def afresh(network: Network, ids: npt.NDArray[np.uint8]) -> list[float]:
    """Return bits a byte of the same windows, each scored with nothing before it."""
    starts = range(0, min(len(ids), MOST) - WINDOW + 1, WINDOW)
    found = [nats(network, ids[s : s + WINDOW]).mean() / np.log(2) for s in starts]
    return [round(float(b), 4) for b in found]


def moved(
    network: Network,
    ids: npt.NDArray[np.uint8],
    scores: Nats,
    *,
    budget: int = BUDGET,
    other: npt.NDArray[np.uint8] | None = None,
    at_most: int = 8,
) -> float:
    """Return how many nats a byte the exposed bytes lose when their context is another one.

    A prompt is computed in chunks of ``budget`` tokens; what is exposed is every chunk but the
    first, and its context is all that precedes it. Here the context's bytes are shuffled, or those
    of ``other``. At most ``at_most`` chunks are looked at, evenly spread.
    """
    rng = np.random.Generator(np.random.Philox(SEED))
    starts = np.arange(budget, len(ids) - budget // 2, budget)
    starts = starts[np.unique(np.linspace(0, len(starts) - 1, at_most).astype(int))]
    lost = []
    for s in starts:
        context = rng.permutation(ids[:s]) if other is None else other[:s]
        exposed = ids[s : s + budget]
        found = nats(network, np.concatenate([context, exposed]))
        lost.append((found[s - 1 :] - scores[s - 1 : s - 1 + len(exposed)]).mean())
    return float(np.mean(lost))


def far_context(
    network: Network, ids: npt.NDArray[np.uint8], scores: Nats, budget: int
) -> dict[str, Any]:
    """Return what the tokens after the first ``budget`` lose when those are shuffled, in nats.

    ``scores`` are of ``ids`` as they are. A server that computes ``budget`` tokens at a time reads
    all that is scored here from its cache.
    """
    rng = np.random.Generator(np.random.Philox(SEED))
    other = np.concatenate([rng.permutation(ids[:budget]), ids[budget:]])
    true, shuffled = scores[budget - 1 :], nats(network, other)[budget - 1 :]
    return {
        "budget": budget,
        "tokens": len(ids),
        "exposed_nats": float(true.mean()),
        "exposed_shuffled_nats": float(shuffled.mean()),
        "moved_nats": float((shuffled - true).mean()),
        "last_quarter_moved_nats": float((shuffled - true)[-(len(true) // 4) :].mean()),
    }


def evaluate(
    network: Network,
    texts: Mapping[str, npt.NDArray[np.uint8]],
    *,
    only: Sequence[str] = (),
    context: int = MOST,
    fresh: Sequence[str] = (),
    long: Sequence[str] = (),
    budget: int = 0,
) -> dict[str, Any]:
    """Return the figures of each text: over its cut, and over its first 36,000 bytes by windows.

    The context's weight is measured over the first ``context`` bytes. Texts named in ``fresh`` are
    also scored window by window with nothing before each, those in ``long`` as far as they go.
    With a ``budget``, what ``far_context`` says of the cut is among them.

    Raises
    ------
    PplError : a text is too short.

    """
    found: dict[str, Any] = {}
    names = list(texts)
    for i, name in enumerate(names):
        if only and name not in only:
            continue
        ids = texts[name]
        if len(ids) < LEAST:
            raise PplError(f"text {name}: {len(ids):,} bytes; expected at least {LEAST:,}")
        scores = nats(network, ids[:MOST])
        size = wanted_tokens(name, LEAST, MOST)
        cut = scores[: size - 1]
        row = {
            "bits_per_byte": float(cut.mean() / np.log(2)),
            **by_window(scores),
        }
        if name in fresh:
            row["afresh"] = afresh(network, ids)
        if context:
            near, other = ids[:context], texts[names[i - 1]]
            row["shuffled_nats"] = moved(network, near, scores)
            row["other_nats"] = moved(network, near, scores, other=other)
        if name in long:
            whole = windows(nats(network, ids))
            row["long_windows"] = [round(float(b), 4) for b in whole]
        if budget:
            row["far"] = far_context(network, ids[:size], cut, budget)
            sys.stderr.write(f"{name}: {row['far']['moved_nats']:.3f} nats from far context\n")
        found[name] = row
        sys.stderr.write(
            f"{name}: {row['bits_per_byte']:.3f} bits a byte, worst window {row['worst_ratio']:.3f}"
            f" (any start: {row['worst_ratio_any_start']:.3f})\n"
        )
    return found


def read(folder: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """Read the texts that ``ppl.model.corpus`` left.

    Raises
    ------
    PplError : there are none.

    """
    found = {p.stem: np.fromfile(p, np.uint8) for p in sorted(folder.glob("*.bin"))}
    if not found:
        raise PplError(f"{folder}: no texts; make them: python -m ppl.model.corpus")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m ppl.model.evaluate``."""
    parser = argparse.ArgumentParser(prog="python -m ppl.model.evaluate", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=own_folder(), help="default: our own")
    parser.add_argument("--texts", type=Path, required=True, help="folder with TEXT.bin files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--context", type=int, default=MOST, metavar="BYTES", help="0: don't measure its weight"
    )
    parser.add_argument("--far", type=int, default=0, metavar="TOKENS", help="see far_context()")
    parser.add_argument("--fresh", action="append", default=[], metavar="TEXT", help="see afresh()")
    parser.add_argument("--long", action="append", default=[], metavar="TEXT", help="score it all")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only these")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    try:
        texts = read(options.texts)
        unknown = sorted({*options.only, *options.fresh, *options.long} - set(texts))
        if unknown:
            raise PplError(f"no text {unknown[0]!r}; expected one of {', '.join(texts)}")
        dtype = getattr(torch, options.dtype)
        network = load(options.model, device=options.device, dtype=dtype)
        figures = {
            "weights_sha256": sha256(options.model),
            "dtype": options.dtype,
            "device": options.device,
            "torch": torch.__version__,
            "context_bytes": options.context,
            "texts": evaluate(
                network,
                texts,
                only=options.only,
                context=options.context,
                fresh=options.fresh,
                long=options.long,
                budget=options.far,
            ),
        }
        if options.out:
            write_whole(options.out, (json.dumps(figures, indent=1) + "\n").encode())
    except UsageError as e:
        sys.stderr.write(f"bytegate: {e}\n")
        return 2
    except OSError as e:
        sys.stderr.write(f"bytegate: can't write {options.out}: {e.strerror}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
