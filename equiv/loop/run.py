"""One case: vLLM's loop with and without the pack, byte for byte, and against the reference."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equiv.compare import Difference, differing, summarise
from equiv.loop import payload, plan, reference, world
from equiv.loop.case import LoopCase
from equiv.loop.kinds import kinds_of, planned, refusal_declared
from equiv.loop.result import EQUAL, REFUSED, Finding, Result
from equiv.loop.spy import Spy, bits, digest

REFUSAL = "matching head strides"
"""What vLLM's assertion says when the two sides of a merge have other head strides."""


@dataclass(frozen=True)
class _Output:
    """An output as ``equiv.compare`` wants it described."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)


def pack_keyword() -> str | None:
    """Return the name under which this vLLM's loop takes a pack."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

    from kvroute.decide import pack_keyword as probe
    from kvroute.switch import LOOP

    return probe(getattr(MLACommonBaseImpl, LOOP))


def run(case: LoopCase, pack: Callable[..., Any]) -> Result:
    """Run one case.

    Parameters
    ----------
    case : what to build.
    pack : ``pack(kv_nope, k_pe, use_fp8) -> (k, v)``.

    """
    contents = payload.make(case)
    made: world.World | None = None
    kinds: tuple[str, ...] = ()
    try:
        made = world.build(case, contents)
        kinds = kinds_of(case, made)
        _ranks_agree(made)
        contradictions = plan.contradictions(case, planned(case, made))
        if contradictions:
            return Result("plan", contradictions[0][:300], kinds=kinds)
        return _compare(case, contents, made, pack, kinds)
    except Finding as found:
        result = found.result
    except world.RankMismatch as error:
        result = Result("ranks", str(error))
    except Exception as error:  # noqa: BLE001 - whatever vLLM or a pack raises is a result
        if made is not None and refusal_declared(case, made) and REFUSAL in str(error):
            return Result(
                REFUSED, "a continuation whose sides have other head strides", kinds=kinds
            )
        first = (str(error).splitlines() or [""])[0][:200] or _line_of(error)
        result = Result("raised", f"{type(error).__name__}: {first}", raised_in=_raised_in(error))
    return Result(**{**vars(result), "kinds": kinds, "chunks": len(planned(case, made))})


def _compare(
    case: LoopCase,
    contents: payload.Payload,
    made: world.World,
    pack: Callable[..., Any],
    kinds: tuple[str, ...],
) -> Result:
    chunks = made.metadata[case.rank].prefill.chunked_context.chunks
    before = digest(made.pools, made.query)
    made.poison()
    stock = made.call(None, None)
    stock_seen = list(made.backend.seen)
    _written_inside(made)
    _unchanged(made, before)
    spied = Spy(pack, made, stock_seen)
    made.backend.seen.clear()
    made.poison()
    packed = made.call(pack_keyword(), spied)
    _written_inside(made)
    if refusal_declared(case, made):
        raise Finding("not_refused", "head strides differ across a merge, and nothing refused")
    _unchanged(made, before)
    compared = 0
    for output, a, b in zip(_outputs(case, stock), stock, packed, strict=True):
        difference = _difference(output, a, b)
        compared += a.numel() * a.element_size()
        if difference is not None:
            raise Finding("divergence", difference.sentence(), difference)
    spied.check(len(chunks))
    worst = _inside(case, stock, reference.dense(case, contents, len(chunks), made.scale))
    return Result(
        EQUAL,
        kinds=kinds,
        chunks=len(chunks),
        bytes_compared=compared,
        input_hash=before,
        output_hash=digest(*stock),
        worst=worst,
    )


AGREE = (
    "request_slice",
    "token_slice",
    "is_continuation",
    "num_context_tokens",
    "padded_local_seq_lens",
    "local_context_lens_allranks",
    "num_local_context_tokens",
    "local_starts",
)
"""Fields of a chunk that must be equal on all ranks, or their collectives don't match."""


def _ranks_agree(made: world.World) -> None:
    all_plans = [
        [
            tuple(getattr(chunk, name) for name in AGREE)
            for chunk in m.prefill.chunked_context.chunks
        ]
        for m in made.metadata
    ]
    first = all_plans[0]
    for rank, other in enumerate(all_plans):
        if other == first:
            continue
        index = next((i for i, (a, b) in enumerate(zip(other, first, strict=False)) if a != b), 0)
        names = [n for n, a, b in zip(AGREE, other[index], first[index], strict=True) if a != b]
        raise Finding("ranks", f"chunk {index}: ranks 0 and {rank} differ in {', '.join(names)}")


def _written_inside(made: world.World) -> None:
    if not made.guards_intact():
        raise Finding("out_of_bounds", "a row beside the workspace was written")


def _unchanged(made: world.World, before: str) -> None:
    if digest(made.pools, made.query) != before:
        raise Finding("input_changed", "the loop changed its cache or its query")


def _outputs(case: LoopCase, results: tuple[Tensor, Tensor]) -> tuple[_Output, _Output]:
    out, lse = results
    return (
        _Output("out", tuple(out.shape), case.dtype, ("token", "head", "column")),
        _Output("lse", tuple(lse.shape), "fp32", ("head", "token")),
    )


def _difference(output: _Output, a: Tensor, b: Tensor) -> Difference | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise Finding("divergence", f"{output.name}: {b.dtype}{tuple(b.shape)} with the pack")
    bits_a, bits_b = bits(a), bits(b)
    mask = differing(bits_a, bits_b)
    return None if mask is None else summarise(output, bits_a, bits_b, mask)


def _inside(case: LoopCase, got: tuple[Tensor, Tensor], answer: reference.Answer) -> float:
    """Raise ``Finding`` unless both lie inside their bounds; the largest share of a bound."""
    worst = 0.0
    pairs = ((got[0], answer.out, answer.out_bound), (got[1], answer.lse, answer.lse_bound))
    for output, (value, ideal, bound) in zip(_outputs(case, got), pairs, strict=True):
        wide = value.detach().to("cpu", torch.float64)
        error = torch.where(wide == ideal, 0.0, (wide - ideal).abs())  # -inf equals -inf
        bad = ~(error <= bound)  # NaN is never inside
        if bool(bad.any()):
            at = tuple(int(i) for i in bad.nonzero()[0])
            where = ", ".join(f"{axis} {i}" for axis, i in zip(output.axes, at, strict=True))
            raise Finding(
                "reference",
                f"{output.name}: {int(bad.sum()):,} of {bad.numel():,} elements outside the bound; "
                f"first at {where}: {float(wide[at]):.6g}, dense {float(ideal[at]):.6g} "
                f"+- {float(bound[at]):.2g}",
                _place_only(output, at, int(bad.sum()), bad.numel()),
            )
        share = torch.where(bound > 0, error / bound, 0.0)
        worst = max(worst, float(share.max()) if share.numel() else 0.0)
    return worst


def _place_only(output: _Output, at: tuple[int, ...], count: int, total: int) -> Difference:
    where = ", ".join(f"{axis} {i}" for axis, i in zip(output.axes, at, strict=True))
    return Difference(output.name, count, 0, total, at, where, 0, 0, output.dtype)


def _line_of(error: BaseException) -> str:
    """Return the source line that raised, for assertions that say nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    return " ".join((frames[-1].line or "").split())[:200] if frames else ""


def _raised_in(error: BaseException) -> str:
    """Name the innermost function that is neither ours nor torch's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        name = frame.f_globals.get("__name__", "?")
        if name.partition(".")[0] not in ("equiv", "torch"):
            module = inspect.getmodule(frame.f_code)
            return f"{module.__name__ if module else name}:{frame.f_code.co_qualname}"
    return ""
