"""What surrounds one call of a candidate: served allocations, poisoned malloc, global state."""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equiv.arena import dense_pitches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from equiv.arena import OutputArena

_aten = torch.ops.aten


class ServeAllocations(TorchDispatchMode):
    """Serve ``torch.empty`` and its kin from an ``OutputArena`` while the mode is active.

    What torch's compiler makes of a candidate allocates out of the mode's sight.
    """

    def __init__(self, arena: OutputArena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile under the mode: elsewhere its code silently gives way to eager ops."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve an allocation, or run the op as it is."""
        kwargs = dict(kwargs or ())
        wanted = _wanted(func, args, kwargs)
        if wanted is not None:
            shape, pitches, dtype, device = wanted
            index = self.arena.device.index or 0
            same = device.type == self.arena.device.type and device.index in {None, index}
            plain = kwargs.get("layout") in {None, torch.strided} and not kwargs.get("pin_memory")
            if same and plain:
                served = self.arena.serve(shape, pitches, dtype)
                if served is not None:
                    return served
        return func(*args, **kwargs)


def _wanted(  # noqa: PLR0911 - an allocation each
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device] | None:
    """Return (shape, pitches, dtype, device) of an allocation without contents, else None."""
    default = torch.device("cpu")
    if func is _aten.empty.memory_format:
        if kwargs.get("memory_format") not in {None, torch.contiguous_format}:
            return None
        shape = tuple(args[0])
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return shape, dense_pitches(shape), dtype, torch.device(kwargs.get("device") or default)
    if func is _aten.empty_strided.default:
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return tuple(args[0]), tuple(args[1]), dtype, torch.device(kwargs.get("device") or default)
    if func in {_aten.new_empty.default, _aten.empty_like.default}:
        like = args[0]
        shape = tuple(args[1]) if func is _aten.new_empty.default else tuple(like.shape)
        pitches = dense_pitches(shape)
        if func is _aten.empty_like.default and not like.is_contiguous():
            return None
        return (
            shape,
            pitches,
            kwargs.get("dtype") or like.dtype,
            torch.device(kwargs.get("device") or like.device),
        )
    if func is _aten.new_empty_strided.default:
        like = args[0]
        return (
            tuple(args[1]),
            tuple(args[2]),
            kwargs.get("dtype") or like.dtype,
            torch.device(kwargs.get("device") or like.device),
        )
    return None


M_PERTURB = -6
"""glibc's mallopt parameter: bytes of fresh memory become the complement of its value."""


def _mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        found = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None
    return found


_MALLOPT = _mallopt()


@contextmanager
def poisoned_malloc(colour: int) -> Iterator[bool]:
    """Fill what ``malloc`` hands out with ``colour``; yields whether the C library can.

    It covers outputs that a compiled candidate allocates out of sight of torch's dispatcher.
    """
    if _MALLOPT is None:
        yield False
        return
    _MALLOPT(M_PERTURB, colour ^ 0xFF)
    try:
        yield True
    finally:
        _MALLOPT(M_PERTURB, 0)


DENORMAL = 5e-324
"""The least double: the product with 1 is 0 where the processor was told to flush such numbers."""


def global_state() -> dict[str, Any]:
    """Return what a kernel must leave as it found it."""
    cuda = torch.cuda.is_initialized()
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "random state": torch.get_rng_state().numpy().tobytes(),
        "matmul precision": _matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast on CUDA": torch.is_autocast_enabled("cuda"),
        "flushing of denormal numbers": not DENORMAL * 1.0,
        "CUDA device": torch.cuda.current_device() if cuda else None,
        "CUDA stream": torch.cuda.current_stream().cuda_stream if cuda else None,
        "CUDA seed": torch.cuda.initial_seed() if cuda else None,
    }


def _matmul_precision() -> str:
    """Return the precision of float32 products; torch may refuse to say, set in two ways."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def restore_state(state: dict[str, Any]) -> None:
    """Put back what ``global_state`` recorded."""
    torch.set_default_dtype(state["default dtype"])
    torch.set_grad_enabled(state["grad mode"])
    torch.use_deterministic_algorithms(state["deterministic algorithms"])
    torch.set_default_device(None if state["default device"] == "cpu" else state["default device"])
    torch.set_num_threads(state["threads"])
    torch.set_rng_state(torch.frombuffer(bytearray(state["random state"]), dtype=torch.uint8))
    if state["matmul precision"] != "mixed":
        torch.set_float32_matmul_precision(state["matmul precision"])
    torch.set_autocast_enabled("cpu", state["autocast"])
    torch.set_autocast_enabled("cuda", state["autocast on CUDA"])
    torch.set_flush_denormal(state["flushing of denormal numbers"])
    if state["CUDA device"] is not None:
        torch.cuda.set_device(state["CUDA device"])
    stream = state["CUDA stream"]
    if stream is not None and torch.cuda.current_stream().cuda_stream != stream:
        torch.cuda.set_stream(
            torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
        )
    if state["CUDA seed"] is not None and torch.cuda.initial_seed() != state["CUDA seed"]:
        torch.cuda.manual_seed(state["CUDA seed"])


def compiled_frames() -> int:
    """Return how many frames torch's compiler was given so far in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(utils, "counters", None)
    return int(counters["frames"]["total"]) if counters else 0
