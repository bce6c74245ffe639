"""How far bfloat16 roundings alone move log-probabilities: the tolerance of ``ppl.dcp``.

Two servers that compute one function in another order differ in roundings. In the standard model a
rounding to bfloat16 turns ``a`` into ``a (1 + e)`` with ``|e| <= u = 2^-9``, and to first order a
log-probability moves by ``sum_k g_k e_k`` over all roundings k. Taken as independent and without
bias, as in probabilistic error analysis (Higham and Mary, 2019), one server's deviation has the
variance ``sum g_k^2 Var(e_k) <= u^2 sum g_k^2``; the roundings that two servers share cancel, so

    Var(difference) <= 2 u^2 sum_k g_k^2.

A **twin** has the right side's half as its variance: the network of ``ppl.model`` in float32, in
which every value that a bfloat16 server rounds is multiplied by ``1 + u`` or ``1 - u``, by the toss
of a coin: no distribution on ``[-u, u]`` has a larger variance (one that is even has a third of
it). What is rounded: norms, projections, rotations, each probability of attention, its output
(context, new tokens, merge), activations, each rank's share of a row-parallel product, the residual
stream, logits. So the difference of two twins bounds the servers' in variance, token by token, with
the correlation inside a text that keys and values of earlier tokens bring about.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch.nn import functional

from ppl.errors import PplError
from ppl.model import k3
from ppl.model.network import Network, rotate
from ppl.stats import ArrayF8
from ppl.store import Floats

UNIT = 2.0**-9
"""Largest relative error of a rounding to bfloat16, which has 8 significant bits."""
TWINS = 6
"""Twins of each text: 15 pairs, and 5 degrees of freedom a text for the spread of a mean."""
LEVEL = 1e-3
"""Chance at which roundings alone may carry the mean over texts beyond its tolerance, two-sided."""
ROWS = 512
"""Queries of one block of attention of up to four heads, which has ``4 * ROWS * tokens`` scores;
a block of more heads has fewer, so that a widened model's text of 100,000 fits on a GPU."""

Rough = Callable[[Tensor], Tensor]
Mask = NDArray[np.bool_]


def rough(seed: int, device: str, unit: float = UNIT) -> Rough:
    """Return a function that multiplies each element by ``1 + unit`` or ``1 - unit`` at random."""
    generator = torch.Generator(device).manual_seed(seed)

    def moved(x: Tensor) -> Tensor:
        coins = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        coins.bernoulli_(0.5, generator=generator).mul_(2 * unit).add_(1 - unit)
        return coins.mul_(x)

    return moved


def covered(network: Network) -> Network:
    """Return a network whose roundings are known here.

    Raises
    ------
    PplError : it is of another architecture.

    """
    if type(network) not in {Network, k3.Network}:
        raise PplError(f"where {type(network).__name__} rounds isn't known")
    return network


def log_probs(network: Network, ids: Sequence[int], moved: Rough, ranks: int = 1) -> Floats:
    """Return the log-probability of ``ids[1:]`` where every rounded value is ``moved``.

    Parameters
    ----------
    network : in float32, on any device.
    ids : of one text.
    moved : ``rough``, or the identity.
    ranks : tensor parallel size: each rank's share of a row-parallel product is rounded apart.

    Returns
    -------
    float32 ``[len(ids) - 1]``, in nats.

    Raises
    ------
    PplError : a network that isn't ``covered``.

    """
    device = next(covered(network).parameters()).device
    tokens = torch.tensor(ids, device=device)
    trunk = network.model
    with torch.no_grad():
        turned = _turning(network, len(ids), device, moved)
        x = trunk.embed_tokens(tokens)
        for layer in trunk.layers:
            part: Any = layer
            h = moved(part.input_layernorm(x))
            heads = _attention(part.self_attn, h, turned, moved)
            x = moved(x + _shares(heads, part.self_attn.o_proj.weight, moved, ranks))
            h = moved(part.post_attention_layernorm(x))
            gate, up = moved(part.mlp.gate_proj(h)), moved(part.mlp.up_proj(h))
            inner = moved(moved(functional.silu(gate)) * up)
            x = moved(x + _shares(inner, part.mlp.down_proj.weight, moved, ranks))
        x = moved(trunk.norm(x))
        found = []
        for at in range(0, len(ids) - 1, 4 * ROWS):
            upto = min(at + 4 * ROWS, len(ids) - 1)
            rows = functional.log_softmax(moved(network.lm_head(x[at:upto])), -1)
            found.append(rows.gather(1, tokens[at + 1 : upto + 1, None])[:, 0])
        return np.asarray(torch.cat(found).cpu().numpy(), dtype=np.float32)


def _shares(x: Tensor, weight: Tensor, moved: Rough, ranks: int) -> Tensor:
    """Return ``x`` times a row-parallel weight: rounded rank by rank, and their sum once more."""
    columns = zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)
    return moved(torch.stack([moved(functional.linear(a, w)) for a, w in columns]).sum(0))


def _turning(network: Network, tokens: int, device: torch.device, moved: Rough) -> Rough:
    """Return what turns 64 columns by their positions and rounds; Kimi-K3 leaves them alone."""
    if isinstance(network, k3.Network):
        return lambda x: x
    cos, sin = network.angles(tokens, device)
    return lambda x: moved(rotate(x, cos, sin))


def _queries(part: Any, h: Tensor, moved: Rough) -> Tensor:
    """Return ``[tokens, heads * 192]``: one projection, or Kimi-K3's two with a norm between."""
    if isinstance(part, k3.Attention):
        h = moved(part.q_a_layernorm(moved(part.q_a_proj(h))))
        return moved(part.q_b_proj(h))
    return moved(part.q_proj(h))


def rows_of_block(heads: int) -> int:
    """Return the queries of one block of attention."""
    return min(ROWS, max(1, 4 * ROWS // heads))


def _attention(part: Any, h: Tensor, turned: Rough, moved: Rough) -> Tensor:
    """Return what is projected out, ``[tokens, heads * 128]``; of either architecture's layer."""
    s = part.shape
    heads = s.num_attention_heads
    q = _queries(part, h, moved).unflatten(-1, (heads, -1)).transpose(0, 1)
    q_nope, q_pe = q.split((s.qk_nope_head_dim, s.qk_rope_head_dim), -1)
    compressed = moved(part.kv_a_proj_with_mqa(h))
    latent, k_pe = compressed.split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
    latent = moved(part.kv_a_layernorm(latent))
    kv = moved(part.kv_b_proj(latent)).unflatten(-1, (heads, -1)).transpose(0, 1)
    k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), -1)
    k_pe = turned(k_pe)[None].expand(heads, -1, -1)
    q = torch.cat((q_nope, turned(q_pe)), -1)
    k = torch.cat((k_nope, k_pe), -1)
    scale = k.shape[-1] ** -0.5
    out = []
    block = rows_of_block(heads)
    for at in range(0, q.shape[1], block):
        upto = min(at + block, q.shape[1])
        scores = q[:, at:upto] @ k[:, :upto].mT * scale
        later = torch.ones(upto - at, upto, dtype=torch.bool, device=h.device).triu(at + 1)
        p = moved(torch.softmax(scores.masked_fill_(later, float("-inf")), -1))
        out.append(moved(moved(p @ v[:, :upto])))  # of the context or the new tokens; then merged
    found = torch.cat(out, 1).transpose(0, 1).flatten(-2)
    if isinstance(part, k3.Attention):
        found = moved(found * moved(moved(part.g_proj(h)).sigmoid()))
    return found


def twins(network: Network, ids: Sequence[int], *, ranks: int, count: int = TWINS) -> Floats:
    """Return ``[count, len(ids) - 1]``: the text's log-probabilities of each twin."""
    device = next(network.parameters()).device.type
    made = [log_probs(network, ids, rough(seed, device), ranks) for seed in range(count)]
    return np.stack(made)


def rms(d: ArrayF8) -> float:
    """Return the root mean square."""
    return math.sqrt(float(np.mean(d**2)))


@dataclass(frozen=True)
class Tolerance:
    """Of one text, in nats.

    Attributes
    ----------
    rms, largest : of any pair of twins: root mean square and largest |difference|; a single pair
        can't bound the largest, and has None.
    mean_error : standard error of a difference's mean, sqrt(2) times the spread of a twin's.

    """

    rms: float
    largest: float | None
    mean_error: float


def tolerance(found: Floats, chosen: Mask) -> Tolerance:
    """Return what roundings allow over the ``chosen`` tokens; ``found`` as ``twins`` returns it."""
    values = found[:, chosen].astype(np.float64)
    apart = [values[i] - values[j] for i, j in itertools.combinations(range(len(values)), 2)]
    return Tolerance(
        rms=max(rms(d) for d in apart),
        largest=max(float(np.abs(d).max()) for d in apart),
        mean_error=math.sqrt(2.0) * float(np.std(values.mean(1), ddof=1)),
    )


def mean_tolerance(errors: Sequence[float], count: int = TWINS) -> float:
    """Return the tolerance of the mean over texts: a t quantile of its standard error.

    ``t(1 - LEVEL / 2) sqrt(sum error^2) / n``. Texts are the clusters; their spreads are estimated
    from ``count`` twins each, so the degrees of freedom follow Welch and Satterthwaite.
    """
    squares = np.asarray(errors, dtype=np.float64) ** 2
    whole = float(squares.sum())
    if not whole:
        return 0.0
    freedom = whole**2 / float((squares**2).sum() / (count - 1))
    return float(stats.t.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(whole) / len(squares)


def of_rechunking(apart: ArrayF8, chosen: Mask) -> Tolerance:
    """Return what the servers' own roundings allow, from one server scored at two chunk budgets.

    ``apart`` is the difference of tensor parallelism alone at half the budget and at the whole: one
    function, rounded in another order in every token behind a context and in all that follows from
    it. Of two computations with deviations of variance ``s^2``, of which a share ``r`` is common,
    the difference has ``2 s^2 (1 - r)``; no two have more than ``2 s^2``. What is assumed is that
    rechunking redraws at least half (``r <= 1/2``): then sqrt(2) times its root mean square bounds
    that of any other order.
    """
    d = apart[chosen]
    widest = math.sqrt(2.0)
    return Tolerance(
        rms=widest * rms(d),
        largest=None,
        mean_error=widest * abs(float(d.mean())),
    )
