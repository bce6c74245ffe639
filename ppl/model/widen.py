"""More heads, the same function: ``python -m ppl.model.widen --heads 96 --out FOLDER``.

Each trained head becomes ``heads / trained`` heads of which no two carry the same bytes; nothing
is trained. With ``P``, ``S`` signed permutations (drawn for each copy and layer), a copy of the
head with query ``q = [q_nope, q_rope]``, key ``k = [k_nope, r]``, value ``v``, gate ``g`` and
output columns ``Wo`` has::

    q_nope P, q_rope        k_nope P, r        v S        g |S|        w S^T Wo

so its scores are the head's, ``sigmoid(g |S|) * (v S)`` is ``(sigmoid(g) * v) S`` (a gate is by
elements, hence permutations and no rotations), and it adds ``w`` times what the head added. The
shares ``w`` of a head's copies are powers of two that sum to 1. So in bfloat16 no weight is
rounded: the widened model computes the same function, and differs by how a device adds.

A pack or gather that mixes up, drops or repeats heads, also two copies of one head, changes the
output: their keys, values, gates and output columns go together. Copies stand in random order, so
every rank has several trained heads. The rotary part of a query and ``r``, which all heads share,
stay as they are: their bytes are alike in all copies.

Either architecture of ``ppl.model``. ``FOLDER`` gets ``config.json``, ``model.safetensors`` (24
times the heads' weights) and ``widened.json``: what it was made from, how, and how it was checked.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equiv import files
from equiv.errors import UsageError
from ppl.errors import PplError
from ppl.model import RECORD, WEIGHTS, evaluate, sha256
from ppl.model import folder as own_folder
from ppl.model.network import Network, load, save

SEED = 20260101
HEADS = 96
TOKENS = 2048
"""Bytes of the text on which the widened model is held against its source."""
LEAST_TOKENS = 64
CLOSE_NATS = 1e-3
"""Most that a token may move: what ``tests/servers`` allows a float32 server at the worst."""
SEEN = 10.0
"""How many times as far as the widened model lies from its source a fault must move the worst."""

Ids = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Copy:
    """One head of a widened layer.

    Attributes
    ----------
    head : the trained head that it is a copy of.
    share : its weight ``w``, a power of two.
    key, value : where its columns come from, permutations of the head's.
    key_signs, value_signs : by what they are multiplied, 1 or -1.

    """

    head: int
    share: float
    key: Tensor
    key_signs: Tensor
    value: Tensor
    value_signs: Tensor


def shares(count: int, rng: np.random.Generator) -> list[float]:
    """Return ``count`` powers of two that sum to 1, each at least ``1 / (4 count)``.

    They are as uneven as halving one at random, again and again, makes them; two are halves.
    """
    least = 2.0 ** -(math.ceil(math.log2(count)) + 1)
    found = [1.0]
    while len(found) < count:
        wide = [i for i, share in enumerate(found) if share > least]
        i = int(rng.choice(wide))
        found[i] /= 2
        found.append(found[i])
    return found


def copies(trained: int, heads: int, key: int, value: int, rng: np.random.Generator) -> list[Copy]:
    """Draw one layer's heads, in their order; ``key`` and ``value`` are columns of a head."""

    def signed(size: int) -> tuple[Tensor, Tensor]:
        signs = torch.from_numpy(rng.integers(0, 2, size) * 2 - 1)
        return torch.from_numpy(rng.permutation(size)), signs

    made = [
        Copy(head, share, *signed(key), *signed(value))
        for head in range(trained)
        for share in shares(heads // trained, rng)
    ]
    return [made[i] for i in rng.permutation(heads)]


def widen(network: Network, heads: int, *, seed: int = SEED) -> tuple[Network, list[list[Copy]]]:
    """Return a network with ``heads`` heads that computes the same, and each layer's copies.

    Parameters
    ----------
    network : of either architecture, on a CPU; its weights, if they are bfloat16's, aren't rounded.
    heads : a multiple of the network's, and more.

    Raises
    ------
    PplError : other ``heads``.

    """
    s = network.shape
    trained = s.num_attention_heads
    if heads <= trained or heads % trained:
        raise PplError(f"--heads {heads}: expected a multiple of the model's {trained}, and more")
    rng = np.random.Generator(np.random.Philox(seed))
    dtype = next(network.parameters()).dtype
    made = type(network)(replace(s, num_attention_heads=heads)).to(dtype)
    state = network.state_dict()
    drawn = []
    for i in range(s.num_hidden_layers):
        drawn.append(copies(trained, heads, s.qk_nope_head_dim, s.v_head_dim, rng))
        at = f"model.layers.{i}.self_attn."
        _layer(state, at, s, drawn[-1])
    made.load_state_dict(state)
    return made.eval(), drawn


def _layer(state: dict[str, Tensor], at: str, s: Any, drawn: Sequence[Copy]) -> None:
    """Put a layer's widened weights in the place of the trained ones."""
    query = "q_b_proj" if f"{at}q_b_proj.weight" in state else "q_proj"
    nope, trained = s.qk_nope_head_dim, s.num_attention_heads

    def rows(name: str, made: Callable[[Copy, Tensor], Tensor]) -> None:
        heads = state[f"{at}{name}.weight"].unflatten(0, (trained, -1))
        state[f"{at}{name}.weight"] = torch.cat([made(c, heads[c.head]) for c in drawn])

    def key(c: Copy, w: Tensor) -> Tensor:
        return w[c.key] * c.key_signs[:, None]

    def value(c: Copy, w: Tensor) -> Tensor:
        return w[c.value] * c.value_signs[:, None]

    rows(query, lambda c, w: torch.cat((key(c, w[:nope]), w[nope:])))
    rows("kv_b_proj", lambda c, w: torch.cat((key(c, w[:nope]), value(c, w[nope:]))))
    if f"{at}g_proj.weight" in state:
        rows("g_proj", lambda c, w: w[c.value])
    out = state[f"{at}o_proj.weight"].unflatten(1, (trained, -1))
    columns = [out[:, c.head, c.value] * (c.value_signs * c.share) for c in drawn]
    state[f"{at}o_proj.weight"] = torch.cat(columns, 1)


# -- whether it is the same, and whether mixed-up heads show --------------------------------


def swapped(network: Network, ids: Ids, layer: int, heads: tuple[int, int]) -> evaluate.Nats:
    """Return ``evaluate.nats`` where two heads' keys and values change places in one layer.

    Only those of the tokens from a quarter of the text to its half, as a pack does that mixes
    up two heads of one context chunk.
    """
    s, chunk = network.shape, slice(len(ids) // 4, len(ids) // 2)
    one, other = heads

    def swap(_module: Any, _inputs: Any, kv: Tensor) -> Tensor:
        found: Tensor = kv.unflatten(-1, (s.num_attention_heads, -1)).clone()
        found[:, chunk, one], found[:, chunk, other] = (
            found[:, chunk, other].clone(),
            found[:, chunk, one].clone(),
        )
        return found.flatten(-2)

    with ExitStack() as stack:
        part: Any = network.model.layers[layer]
        stack.callback(part.self_attn.kv_b_proj.register_forward_hook(swap).remove)
        return evaluate.nats(network, ids)


def dropped(network: Network, ids: Ids, layer: int, head: int) -> evaluate.Nats:
    """Return ``evaluate.nats`` where one head of one layer adds nothing."""
    s = network.shape

    def drop(_module: Any, inputs: tuple[Tensor]) -> Tensor:
        found: Tensor = inputs[0].unflatten(-1, (s.num_attention_heads, -1)).clone()
        found[..., head, :] = 0
        return found.flatten(-2)

    with ExitStack() as stack:
        part: Any = network.model.layers[layer]
        stack.callback(part.self_attn.o_proj.register_forward_pre_hook(drop).remove)
        return evaluate.nats(network, ids)


def smallest(drawn: Sequence[Copy]) -> tuple[int, int]:
    """Return two heads that are copies of one trained head: those with the smallest shares."""
    order = sorted(range(len(drawn)), key=lambda h: (drawn[h].share, drawn[h].head, h))
    first = order[0]
    return first, next(h for h in order[1:] if drawn[h].head == drawn[first].head)


def check(
    source: Network, made: Network, drawn: Sequence[Sequence[Copy]], ids: Ids
) -> dict[str, Any]:
    """Hold a widened network against its source on a text, and against itself with faults.

    Returns
    -------
    Root mean square and largest movement of a token's log-probability in nats: ``same`` of the
    widened model against its source; ``swapped`` and ``dropped`` of the faults in its first layer
    against the widened model, over the tokens that they can reach, at the two copies of one head
    with the smallest shares. ``moved_nats`` of both: what the text's second half loses when the
    first is shuffled.

    Raises
    ------
    PplError : it isn't the same function, or a fault doesn't show.

    """
    half = len(ids) // 2
    before, after = evaluate.nats(source, ids), evaluate.nats(made, ids)
    one, other = smallest(drawn[0])
    found: dict[str, Any] = {
        "tokens": len(ids),
        "same": _apart(after - before),
        "swapped": {
            "heads": [one, other],
            **_apart((swapped(made, ids, 0, (one, other)) - after)[len(ids) // 4 :]),
        },
        "dropped": {"head": one, **_apart(dropped(made, ids, 0, one) - after)},
        "moved_nats": {
            "source": evaluate.far_context(source, ids, before, half)["moved_nats"],
            "widened": evaluate.far_context(made, ids, after, half)["moved_nats"],
        },
    }
    worst = found["same"]["max_nats"]
    if not worst <= CLOSE_NATS:
        raise PplError(
            f"the widened model isn't its source: a token moved by {worst:.3g} nats, expected at "
            f"most {CLOSE_NATS:g}"
        )
    for fault in ("swapped", "dropped"):
        moved = found[fault]["max_nats"]
        if not moved > SEEN * worst:
            raise PplError(
                f"the fault {fault} moves a token by {moved:.3g} nats at most, and being widened "
                f"by {worst:.3g}: this model wouldn't show it"
            )
    return found


def _apart(d: evaluate.Nats) -> dict[str, float]:
    return {"rms_nats": float(np.sqrt(np.mean(d * d))), "max_nats": float(np.abs(d).max())}


# -- the command ---------------------------------------------------------------------------


def make(
    model: Path,
    out: Path,
    *,
    heads: int = HEADS,
    seed: int = SEED,
    text: Path,
    tokens: int = TOKENS,
    device: str = "cpu",
) -> dict[str, Any]:
    """Write a widened model to a folder; return its record, which is there as ``widened.json``.

    Parameters
    ----------
    model : folder of the source.
    text : a file of bytes; its first ``tokens`` are what is checked on. 0: no check.

    Raises
    ------
    PplError : no such model or text, heads that don't fit, or a check that failed.

    """
    if out.resolve() == model.resolve():
        raise PplError(f"--out {out} is the model itself: give another folder")
    if seed < 0 or tokens < 0:
        raise PplError(f"--seed {seed}, --tokens {tokens}: expected neither below 0")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise PplError(f"--device {device}: {str(e).partition(chr(10))[0]}") from None
    ids = _read(text, tokens) if tokens else None
    others = sorted(p.name for p in out.glob("*.safetensors*") if p.name != WEIGHTS)
    if others:  # a server reads every file of weights that is there
        raise PplError(f"--out {out} holds {others[0]}, of another model: give another folder")
    source = load(model)
    made, drawn = widen(source, heads, seed=seed)
    (out / RECORD).unlink(missing_ok=True)  # of other weights, should what follows fail
    save(made, out)
    record: dict[str, Any] = {
        "source": model.resolve().name,
        "source_sha256": sha256(model),
        "source_heads": source.shape.num_attention_heads,
        "heads": heads,
        "seed": seed,
        "shares": [sorted({c.share for c in layer}) for layer in drawn],
        "parameters": sum(p.numel() for p in made.parameters()),
        "weights_bytes": (out / WEIGHTS).stat().st_size,
        "weights_sha256": sha256(out),
        "versions": {n: importlib.metadata.version(n) for n in ("numpy", "safetensors", "torch")},
        "check": None,
    }
    if ids is not None:  # of what was written
        found = check(source.to(device), load(out, device=device), drawn, ids)
        record["check"] = {
            "bytes_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            "dtype": "float32",
            "device": device,
            **found,
        }
    files.write_whole(out / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    return record


def _read(text: Path, tokens: int) -> Ids:
    try:
        ids = np.fromfile(text, np.uint8, tokens)
    except OSError as e:
        raise PplError(f"--text {text}: {e.strerror}") from None
    if len(ids) < LEAST_TOKENS:
        raise PplError(f"--text {text}, --tokens {tokens}: expected at least {LEAST_TOKENS} bytes")
    return ids


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m ppl.model.widen``."""
    parser = argparse.ArgumentParser(prog="python -m ppl.model.widen", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=own_folder(), help="default: our own")
    parser.add_argument("--heads", type=int, default=HEADS, help=f"default: {HEADS}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the widened model")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--text", type=Path, default=own_folder() / "README.md", help="default: our model's card"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help=f"of it; default: {TOKENS}; 0: don't check"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args(arguments)
    try:
        found = make(
            o.model,
            o.out,
            heads=o.heads,
            seed=o.seed,
            text=o.text,
            tokens=o.tokens,
            device=o.device,
        )
    except UsageError as e:
        sys.stderr.write(f"bytegate: {e}\n")
        return 2
    except OSError as e:
        sys.stderr.write(f"bytegate: can't write {o.out}: {e.strerror}\n")
        return 2
    sys.stdout.write(said(found, o.out))
    return 0


def said(record: dict[str, Any], out: Path) -> str:
    """Return a record in a few lines."""
    first = (
        f"{out}: {record['heads']} heads of {record['source_heads']}, "
        f"{record['parameters']:,} parameters, {record['weights_bytes']:,} bytes"
    )
    c = record["check"]
    if c is None:
        return first + "\nNOT COVERED: that it computes what its source does (--tokens 0)\n"
    lines = [first]
    for name, what in (
        ("same", "against its source"),
        ("swapped", "two copies' keys and values swapped in a chunk of one layer"),
        ("dropped", "one head of one layer dropped"),
    ):
        lines.append(f"{what}: rms {c[name]['rms_nats']:.2e}, max {c[name]['max_nats']:.2e} nats")
    moved = c["moved_nats"]
    lines.append(
        f"first half shuffled: {moved['source']:.4f} nats lost by the source, "
        f"{moved['widened']:.4f} by this"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
