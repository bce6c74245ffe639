"""The tail under ``torch.compile``, its outputs as arguments, with proof that compiled code ran.

    k[..., :128] = f(kv_nope[..., :128]);  k[..., 128:] = f(k_pe);  v = f(kv_nope[..., 128:])

``f`` is the cast to ``float8_e4m3fn`` with ``use_fp8``, and nothing otherwise. It is what inductor
makes of the stock tail's own ops, so a difference from eager is a finding about inductor.

**One graph a variant** (dtypes, fp8, device, whether each last stride is 1). It is traced once, on
an example of our own: its sizes are unbacked symbols, its strides and offsets have no value in
common and so are symbols too. What Dynamo still guards then are accidents of that example
(``stride(1) < stride(0)``, ``stride(1) != 256``, ``2 <= stride(0)``), and those guards are dropped.
That is sound because the generated code takes every size and stride from the operands of the call,
which its ``assert_size_stride`` checks, and branches on none. Dtype, device and global state stay
guarded. Unbacked sizes also make inductor index with 64 bits on CUDA, and an odd offset keeps it
from assuming alignment.

**Never silently eager.** The backend counts the calls of what inductor compiled. A call that left
the count as it was (``TORCHDYNAMO_DISABLE=1``, a ``TorchDispatchMode``) raises.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, _check

from kvpack.spec import Unavailable
from kvpack.stock import NOPE, ROPE, V, outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_FP8 = torch.float8_e4m3fn
_TOKENS, _HEADS = 101, 13  # of the example


@dataclass(frozen=True)
class Variant:
    """What a compiled graph is for.

    Attributes
    ----------
    device : ``"cpu"``, or ``"cuda:0"``.
    dtype : of ``kv_nope``.
    pe_dtype : of ``k_pe``.
    use_fp8 : whether the outputs are ``float8_e4m3fn``.
    unit : whether the last stride of every operand and output is 1; only then is it vectorised.
    inference_mode : whether ``torch.inference_mode`` is on, which Dynamo guards.
    inference : for each operand, whether it is an inference tensor; guarded as well.

    """

    device: str
    dtype: torch.dtype
    pe_dtype: torch.dtype
    use_fp8: bool
    unit: bool = True
    inference_mode: bool = False
    inference: tuple[bool, ...] = ()


class _Tail:
    """A compiled variant, and the counters that prove it."""

    def __init__(self, variant: Variant) -> None:
        self.calls = 0
        self.graphs = 0
        template = _tail_fp8 if variant.use_fp8 else _tail_16bit
        # Dynamo's cache belongs to a code object, so every variant gets one of its own.
        function = types.FunctionType(template.__code__.replace(), globals(), template.__name__)
        self._run = torch.compile(
            function,
            backend=self._backend,
            dynamic=True,
            fullgraph=True,
            options={"guard_filter_fn": _without_shape_guards},
        )
        self(*_example(variant))

    def __call__(self, *operands: Tensor) -> None:
        """Run the compiled code on ``operands``, or raise ``RuntimeError``."""
        before = self.calls
        failure: Exception | None = None
        try:
            with torch.no_grad():
                self._run(*operands)
        except Exception as error:
            if self.calls > before:
                raise
            failure = error
        if self.calls == before:
            reason = f"{failure}".partition("\n")[0] or "it ran eagerly"
            raise RuntimeError(
                f"no compiled code ran: {reason}; take away a dispatch mode around the call, "
                "unset TORCHDYNAMO_DISABLE, keep the number of threads"
            ) from failure

    def _backend(self, graph: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # slow to import

        self.graphs += 1
        _counts["graphs"] += 1
        # The kernel is small: starting inductor's pool of compile workers costs more than it saves.
        compiled = cast(
            "Callable[..., Any]",
            compile_fx(graph, example, config_patches={"compile_threads": 1}),
        )

        def counted(*args: Any) -> Any:
            self.calls += 1
            _counts["calls"] += 1
            return compiled(*args)

        return counted


_tails: dict[Variant, _Tail] = {}
_counts = {"calls": 0, "graphs": 0}


def load(device: str, library: str | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``kv_pack`` for a device type; variants are compiled as they are met.

    Parameters
    ----------
    device : ``"cpu"`` or ``"cuda"``, with or without an index.
    library : must be ``None``: this candidate has none.

    Raises
    ------
    Unavailable
        Without CUDA when asked for it, or with a ``library``.

    """
    if library is not None:
        raise Unavailable(f"inductor takes no library, got {library}: leave the option out")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise Unavailable("inductor on cuda needs a CUDA device, and torch sees none")
    return kv_pack


def prepare(variants: Iterable[Variant]) -> None:
    """Compile ``variants`` now, rather than within the first call of each (or a graph capture)."""
    for variant in variants:
        _tail(variant)


def compiled_calls() -> int:
    """Count the calls of compiled code so far, in this process."""
    return _counts["calls"]


def compiled_graphs() -> int:
    """Count the graphs that inductor has compiled so far, in this process."""
    return _counts["graphs"]


def kv_pack(
    kv_nope: Tensor,
    k_pe: Tensor,
    use_fp8: bool,  # noqa: FBT001
    *,
    out: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Pack with compiled code.

    Parameters
    ----------
    kv_nope : ``[T, H, 256]``, bfloat16 or float16; any strides, offset and alignment.
    k_pe : ``[T, 1, 64]``, the same dtype, or ``float8_e4m3fn`` with ``use_fp8``.
    use_fp8 : convert to ``float8_e4m3fn``.
    out : ``{"k": [T, H, 192], "v": [T, H, 128]}`` to write, of the result's dtype and any strides;
        allocated where not given. Without ``use_fp8``, ``v`` isn't written and may be absent.

    Returns
    -------
    k, v : what ``out`` holds; without ``use_fp8`` v is the view ``kv_nope[..., 128:]``.

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes, devices or outputs other than these.
    RuntimeError
        If no compiled code ran, or Dynamo's recompile limit was hit (a variant needs one graph;
        another is made where the number of threads changed).

    """
    k, v = outputs(kv_nope, k_pe, out, use_fp8=use_fp8)
    key_nope, key_rope = k[..., :NOPE], k[..., NOPE:]
    operands = (kv_nope, k_pe, key_nope, key_rope, v)[: 5 if use_fp8 else 4]
    variant = Variant(
        str(kv_nope.device),
        kv_nope.dtype,
        k_pe.dtype,
        use_fp8,
        all(operand.stride(2) == 1 for operand in operands),
        torch.is_inference_mode_enabled(),
        tuple(operand.is_inference() for operand in operands),
    )
    try:
        _tail(variant)(*operands)
    except RuntimeError:
        # Dynamo remembers a frame that it skipped, and would skip it for ever.
        _tails.pop(variant, None)
        raise
    return k, v


def _tail(variant: Variant) -> _Tail:
    tail = _tails.get(variant)
    if tail is None:
        tail = _tails[variant] = _Tail(variant)
    return tail


def _tail_16bit(kv_nope: Tensor, k_pe: Tensor, key_nope: Tensor, key_rope: Tensor) -> None:
    _same_rows(kv_nope, k_pe, key_nope, key_rope)
    k_nope, _ = kv_nope.split([NOPE, V], dim=-1)
    key_nope.copy_(k_nope)
    key_rope.copy_(k_pe.expand_as(key_rope))


def _tail_fp8(
    kv_nope: Tensor, k_pe: Tensor, key_nope: Tensor, key_rope: Tensor, value: Tensor
) -> None:
    _same_rows(kv_nope, k_pe, key_nope, key_rope, value)
    kv_nope = kv_nope.to(_FP8)
    k_pe = k_pe.to(_FP8)
    k_nope, v = kv_nope.split([NOPE, V], dim=-1)
    key_nope.copy_(k_nope)
    key_rope.copy_(k_pe.expand_as(key_rope))
    value.copy_(v)


def _same_rows(kv_nope: Tensor, k_pe: Tensor, *outputs: Tensor) -> None:
    """Tell the tracer that all unbacked T are one T, and likewise H."""
    _check(k_pe.shape[0] == kv_nope.shape[0])
    for output in outputs:
        _check(output.shape[0] == kv_nope.shape[0])
        _check(output.shape[1] == kv_nope.shape[1])


def _without_shape_guards(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type != "SHAPE_ENV" for guard in guards]


def _example(variant: Variant) -> list[Tensor]:
    """Make operands in memory of their own that have no number in common but T and H.

    Dynamo would take two equal ones for the same symbol.
    """
    out = _FP8 if variant.use_fp8 else variant.dtype
    operands = [
        (variant.dtype, (_TOKENS, _HEADS, NOPE + V), (52021, 3989, 3), 23),
        (variant.pe_dtype, (_TOKENS, 1, ROPE), (1033, 947, 5), 29),
        (out, (_TOKENS, _HEADS, NOPE), (12007, 919, 7), 31),
        (out, (_TOKENS, _HEADS, ROPE), (12011, 911, 11), 37),
        (out, (_TOKENS, _HEADS, V), (21557, 1657, 13), 41),
    ][: 5 if variant.use_fp8 else 4]
    inference = variant.inference or (False,) * len(operands)
    made = []
    for flag, operand in zip(inference, operands, strict=True):
        with torch.inference_mode(flag):
            made.append(_odd(variant, *operand))
    return made


def _odd(
    variant: Variant,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    offset: int,
) -> Tensor:
    strides = (*strides[:2], 1 if variant.unit else strides[2])
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    from torch._dynamo.decorators import mark_static, mark_unbacked

    flat = torch.empty(offset + extent + 1, dtype=dtype, device=variant.device)
    view = flat.as_strided(shape, strides, offset)
    for dimension, size in enumerate(shape):
        fixed = dimension == len(shape) - 1 or size == 1
        (mark_static if fixed else mark_unbacked)(view, dimension)
    return view
