"""What surrounds a call: served allocations, poisoned malloc, torch's global state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from equiv import guards
from equiv.arena import COLOURS, OutputArena, dense_pitches
from equiv.guards import (
    ServeAllocations,
    compiled_frames,
    global_state,
    poisoned_malloc,
    restore_state,
)

ROOM = 1 << 20
LIKE = torch.zeros(3, 4, dtype=torch.float16)
TURNED = torch.zeros(4, 3, dtype=torch.float16).t()


@pytest.fixture
def arena() -> OutputArena:
    made = OutputArena("cpu")
    made.begin(COLOURS[0], ROOM)
    return made


SERVED: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(3, 4),
    "empty of a dtype": lambda: torch.empty((3, 4), dtype=torch.float8_e4m3fn),
    "empty on a named device": lambda: torch.empty(3, 4, device="cpu"),
    "empty, contiguous": lambda: torch.empty(3, 4, memory_format=torch.contiguous_format),
    "empty_strided": lambda: torch.empty_strided((3, 4), (8, 1), dtype=torch.bfloat16),
    "empty_like": lambda: torch.empty_like(LIKE),
    "empty_like of another dtype": lambda: torch.empty_like(LIKE, dtype=torch.int64),
    "new_empty": lambda: LIKE.new_empty((5, 2)),
    "new_empty_strided": lambda: LIKE.new_empty_strided((2, 2), (1, 2)),
    "nothing": lambda: torch.empty(0, 4),
    "a scalar": lambda: torch.empty(()),
}

UNSERVED: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3, 4),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "like what is turned": lambda: torch.empty_like(TURNED),
    "channels last": lambda: torch.empty(1, 2, 3, 4, memory_format=torch.channels_last),
    "sparse": lambda: torch.empty(3, 4, layout=torch.sparse_coo),
    "too large": lambda: torch.empty(8 * ROOM, dtype=torch.uint8),
}


@pytest.mark.parametrize("make", SERVED.values(), ids=SERVED)
def test_allocations_are_served_poisoned_and_alike(
    make: Callable[[], torch.Tensor], arena: OutputArena
) -> None:
    plain = make()
    with ServeAllocations(arena):
        served = make()
    assert (served.shape, served.stride(), served.dtype, served.device) == (
        plain.shape,
        plain.stride(),
        plain.dtype,
        plain.device,
    )
    assert len(arena.served) == 1
    if served.numel():
        assert arena.holds(served)
        assert set(served.contiguous().view(-1).view(torch.uint8).tolist()) == {COLOURS[0]}


@pytest.mark.parametrize("make", UNSERVED.values(), ids=UNSERVED)
def test_other_allocations_are_left_alone(
    make: Callable[[], torch.Tensor], arena: OutputArena
) -> None:
    with ServeAllocations(arena):
        made = make()
    assert arena.served == []
    assert (made.shape, made.dtype, made.layout) == (make().shape, make().dtype, make().layout)


def test_allocations_under_another_default_dtype(arena: OutputArena) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with ServeAllocations(arena):
            assert torch.empty(3).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_inner_allocations_of_a_copy_keep_their_strides(arena: OutputArena) -> None:
    with ServeAllocations(arena):
        assert torch.empty(2, 3).stride() == dense_pitches((2, 3))
        copied = TURNED.contiguous()
    assert copied.is_contiguous()
    assert copied.equal(TURNED)


def test_code_that_torch_compiles_runs_compiled_under_the_mode(arena: OutputArena) -> None:
    ran = []

    def backend(graph: Any, _example: Any) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            ran.append(1)
            return graph(*args)

        return compiled

    @torch.compile(backend=backend)
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    before = compiled_frames()
    with ServeAllocations(arena):
        kernel(LIKE)
    assert ran == [1]
    assert compiled_frames() == before + 1
    with ServeAllocations(arena):
        kernel(LIKE)
    assert ran == [1, 1]
    assert compiled_frames() == before + 1


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("size", [1 << 12, 1 << 16, 1 << 22])
def test_malloc_hands_out_the_colour(colour: int, size: int) -> None:
    with poisoned_malloc(colour) as possible:
        if not possible:
            pytest.skip("this C library has no mallopt")
        fresh = torch.empty(size, dtype=torch.uint8)
        assert int((fresh != colour).sum()) == 0
    del fresh


def test_malloc_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(guards, "_MALLOPT", lambda *what: asked.append(what))
    with contextlib.suppress(ValueError), poisoned_malloc(COLOURS[0]):
        raise ValueError
    assert asked == [(guards.M_PERTURB, COLOURS[0] ^ 0xFF), (guards.M_PERTURB, 0)]


def test_without_mallopt_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_MALLOPT", None)
    with poisoned_malloc(COLOURS[0]) as possible:
        assert not possible


# -- global state -------------------------------------------------------------------


@pytest.fixture
def before() -> Iterator[dict[str, Any]]:
    state = global_state()
    yield state
    restore_state(state)


CHANGES: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "default device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "random state": lambda: torch.rand(1),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on CUDA": lambda: torch.set_autocast_enabled("cuda", True),
    "flushing of denormal numbers": lambda: torch.set_flush_denormal(True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_of_the_state_is_seen_and_put_back(name: str, before: dict[str, Any]) -> None:
    CHANGES[name]()
    after = global_state()
    assert [k for k in after if after[k] != before[k]] == [name]
    restore_state(before)
    assert global_state() == before


def test_inference_mode_is_seen(before: dict[str, Any]) -> None:
    with torch.inference_mode():
        now = global_state()
    assert {k for k in now if now[k] != before[k]} == {"inference mode", "grad mode"}


def test_looking_at_the_state_changes_nothing(before: dict[str, Any]) -> None:
    assert global_state() == global_state() == before


def test_precision_set_in_two_ways_is_no_error(
    before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> str:
        raise RuntimeError("PyTorch is checking whether allow_tf32 and fp32_precision agree")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    assert global_state()["matmul precision"] == "mixed"
    restore_state({**before, "matmul precision": "mixed"})
