"""One case: vLLM's loop with and without the pack, byte for byte, and against the reference."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from equiv.compare import Difference, differing, summarise
from equiv.loop import payload, plan, reference, world
from equiv.loop.case import VLLM_ROWS, LoopCase

EQUAL, REFUSED = "equal", "refused"
FINDINGS = {
    "divergence": "the loop gives other bytes with the pack than without it",
    "reference": "the loop lies outside the dense reference's bound",
    "ranks": "two ranks' metadata disagree",
    "plan": "fields of a context chunk contradict the requests or each other",
    "out_of_bounds": "a row beside the workspace was written",
    "input_changed": "the cache, the query, or what the pack was given was changed",
    "not_run": "the pack was not called once for each context chunk",
    "wrong_operands": "the pack got something else than the projection and the gathered key",
    "dropped": "the pack's key and value did not reach the prefill backend",
    "not_refused": "a case that is declared refused gave a result",
    "crash": "the process died",
    "hang": "no result in time",
    "raised": "an exception where a result is claimed",
}
"""Kinds of findings."""

REFUSAL = "matching head strides"
"""What vLLM's assertion says when the two sides of a merge have other head strides."""


@dataclass(frozen=True)
class Result:
    """One case's outcome.

    Attributes
    ----------
    status : ``equal``, ``refused``, or a key of ``FINDINGS``.
    detail : one line on a finding or refusal.
    difference : first differing element, where there is one.
    raised_in : ``module:function`` of vLLM's, or of a patch's, in which an exception was raised.
    kinds : what the case exercised, for the lanes' least counts.
    chunks : context chunks of the plan.
    input_hash, output_hash : xxh3-128 of cache and query, and of the loop's output and lse.

    """

    status: str
    detail: str = ""
    difference: Difference | None = None
    raised_in: str = ""
    kinds: tuple[str, ...] = ()
    chunks: int = 0
    bytes_compared: int = 0
    input_hash: str = ""
    output_hash: str = ""
    worst: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether this is a finding."""
        return self.status not in (EQUAL, REFUSED)

    @property
    def signature(self) -> tuple[str, str]:
        """What makes two findings the same one."""
        return self.status, self.difference.output if self.difference else self.raised_in


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


class Finding(Exception):
    """Ends a case early with a finding."""

    def __init__(self, status: str, detail: str, difference: Difference | None = None) -> None:
        super().__init__(detail)
        self.result = Result(status, detail, difference)


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
        contradictions = plan.contradictions(case, _planned(case, made))
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
    return Result(**{**vars(result), "kinds": kinds, "chunks": len(_planned(case, made))})


def _planned(case: LoopCase, made: world.World | None) -> list[Any]:
    """Return the rank's context chunks; none where a changed vLLM made no plan."""
    if made is None or len(made.metadata) <= case.rank:
        return []
    context = made.metadata[case.rank].prefill.chunked_context
    return list(getattr(context, "chunks", ()))


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


class Spy:
    """A pack that notes what it got, and whether its results arrived."""

    def __init__(
        self,
        pack: Callable[..., Any],
        made: world.World,
        stock_seen: list[tuple[Tensor, Tensor]],
    ) -> None:
        self._pack = pack
        self._stock = stock_seen
        self._world = made
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._problem = ""
        self._difference = ""

    def __call__(self, kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Any:  # noqa: FBT001
        """Call the pack as the loop calls it."""
        case = self._world.case
        dtype = payload.TORCH[case.dtype]
        if kv_nope.dtype != dtype or k_pe.dtype != dtype:
            self._problem = f"got {kv_nope.dtype} and {k_pe.dtype}, expected the un-cast {dtype}"
        if bool(use_fp8) != bool(case.fp8):
            self._problem = f"got use_fp8={use_fp8}, expected {bool(case.fp8)}"
        if kv_nope.shape[0] != k_pe.shape[0] or k_pe.shape[1] != 1:
            self._problem = f"got shapes {tuple(kv_nope.shape)} and {tuple(k_pe.shape)}"
        before = digest(kv_nope, k_pe)
        try:
            result = self._pack(kv_nope, k_pe, use_fp8)
        except SystemExit as error:  # else the run would end here, with the pack's exit code
            raise Finding("raised", f"the pack raised SystemExit({error})") from None
        if digest(kv_nope, k_pe) != before:
            raise Finding("input_changed", "the pack changed the projection or the gathered key")
        k, v = result
        self._compare(k, v)
        self._calls.append((k, v))
        return result

    def _compare(self, k: Any, v: Any) -> None:
        """Hold key and value against the stock ones now: a pack may use its buffers again."""
        index = len(self._calls)
        if self._difference or index >= len(self._stock):
            return
        for name, ours, theirs in zip("kv", (k, v), self._stock[index], strict=True):
            if not isinstance(ours, Tensor):
                return  # vLLM itself stumbles over it
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
                got, expected = ((t.dtype, tuple(t.shape)) for t in (ours, theirs))
                self._difference = f"chunk {index}: {name} is {got}, stock's {expected}"
                return
            if not np.array_equal(_bits(ours), _bits(theirs)):
                self._difference = f"chunk {index}: {name} has other bytes than stock"
                return

    def check(self, chunks: int) -> None:
        """Raise ``Finding`` unless it was called for each chunk and its results were used.

        The backend widens nothing that it keeps, so the tensors it got are the pack's own; the
        operands are right when the pack's key and value have the stock tail's bytes.
        """
        if self._problem:
            raise Finding("wrong_operands", self._problem)
        if len(self._calls) != chunks:
            raise Finding("not_run", f"{len(self._calls)} packs for {chunks} context chunks")
        for index, ((k, v), (seen_k, seen_v)) in enumerate(
            zip(self._calls, self._world.backend.seen, strict=True),
        ):
            if k is not seen_k or v is not seen_v:
                raise Finding("dropped", f"chunk {index}: the backend got other tensors")
        if self._difference:
            raise Finding("divergence", self._difference)


def refusal_declared(case: LoopCase, made: world.World) -> bool:
    """Whether vLLM is known to refuse the case: padded heads on one side of a merge."""
    return bool(case.pad) and any(chunk.is_continuation for chunk in _planned(case, made))


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


def kinds_of(case: LoopCase, made: world.World) -> tuple[str, ...]:
    """Name what a case exercises."""
    context = made.metadata[case.rank].prefill.chunked_context
    chunks = context.chunks
    found = {
        f"D={case.ranks}",
        f"H={case.heads}",
        f"dtype={case.dtype}",
        "I=1"
        if case.interleave == 1
        else "I=page"
        if case.interleave == case.page
        else "I=between",
    }
    starts = [start for chunk in chunks for start in chunk.local_starts]
    continuing = [chunk for chunk in chunks if chunk.is_continuation]
    several = len(chunks) > 1
    for name, holds in (
        ("continuation", bool(continuing)),
        ("no context", bool(context.empty_token_slices)),
        ("one chunk, returned as it is", not several and not context.empty_token_slices),
        ("one chunk beside a request without context", not several and context.empty_token_slices),
        ("several chunks", several),
        (
            "a chunk of vLLM's own size",
            any(chunk.num_context_tokens == VLLM_ROWS for chunk in chunks),
        ),
        ("start inside a page", any(start % case.page for start in starts)),
        ("tail of one and all of the next", any(_whole_next(case, c) for c in continuing)),
        ("ends at its chunk's end", _ends_at_chunk(chunks)),
        ("fp8 cache", case.cache == "fp8"),
        ("fp8 prefill", bool(case.fp8)),
        ("fp8 projection", case.proj == "fp8" and bool(case.fp8)),
        (f"k_scale={case.k_scale}", case.cache == "fp8"),
        ("uneven ranks", any(c % (case.ranks * case.interleave) for c in case.contexts)),
        ("padded heads", refusal_declared(case, made)),
    ):
        if holds:
            found.add(name)
    return tuple(sorted(found))


def _whole_next(case: LoopCase, chunk: Any) -> bool:
    if chunk.num_requests < 2:  # noqa: PLR2004
        return False
    second = chunk.request_slice.start + 1
    return bool(int(chunk.seq_lens[1]) == case.contexts[second])


def _ends_at_chunk(chunks: list[Any]) -> bool:
    return any(
        a.request_slice.stop == b.request_slice.start and not b.is_continuation
        for a, b in itertools.pairwise(chunks)
    )


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
    bits_a, bits_b = _bits(a), _bits(b)
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


_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _bits(tensor: Tensor) -> Any:
    host = tensor.detach().cpu().contiguous()
    flat = host.view(torch.uint8).numpy().view(_UINT[tensor.element_size()])
    return flat.reshape(tuple(tensor.shape))


def digest(*tensors: Tensor) -> str:
    """Return the xxh3-128 of the tensors' bytes, one after another."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
