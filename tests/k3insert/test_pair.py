"""The pair ``k3insert``: its slot mappings, its statements against its model, and its faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equiv.candidates import import_function
from equiv.pairs import OpPair, load_pair
from k3insert import slots, stock
from k3insert.faults.kernel import CLEAN
from k3insert.pair import PAIR
from k3insert.slots import BLOCK_SIZES
from kvpack.spec import Unavailable

TOKENS = (0, 1, 2, 3, 16, 17, 63, 64, 65, 300)
POINTS = [
    {"T": t, "H": h, "dtype": dtype, "slots": kind}
    for t, h in ((0, 2), (1, 1), (5, 3), (67, 2))
    for dtype in ("bf16", "fp16")
    for kind in BLOCK_SIZES
]
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def filled() -> Iterator[None]:
    """Fill what torch allocates: left there by an earlier call, bytes may happen to be right."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of(point: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {o.name: rng.integers(0, 1 << 16, o.shape, np.uint16) for o in PAIR.operands(point)}


def run(kernel: Any, point: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the bits of k and of all operands after a call."""
    kind = KINDS[point["dtype"]]
    tensors = {n: torch.from_numpy(x.copy()).view(kind) for n, x in inputs_of(point).items()}
    tensors |= PAIR.call(kernel, tensors, point, None)
    return {name: tensor.view(torch.uint16).numpy() for name, tensor in tensors.items()}


def same(actual: dict[str, np.ndarray[Any, Any]], point: dict[str, Any]) -> bool:
    before = inputs_of(point)
    wanted = {**before, **(PAIR.oracle(before, point) or {})}
    return all(np.array_equal(actual[name], bits) for name, bits in wanted.items())


def test_the_pair_is_registered_and_whole() -> None:
    assert isinstance(load_pair("k3insert"), OpPair)


@pytest.mark.parametrize("kind", BLOCK_SIZES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_mapping_shares_no_slot_and_stays_inside(tokens: int, kind: str) -> None:
    mapping = slots.mapping(tokens, kind)
    stored = mapping[mapping != slots.PADDING]
    assert len(set(stored.tolist())) == len(stored)
    assert all(stored >= 0)
    assert all(stored < slots.blocks(tokens, kind) * BLOCK_SIZES[kind])
    assert (kind == "padded" and tokens > 2) == (len(stored) < tokens)


def test_few_scattered_tokens_have_a_block_each() -> None:
    # So that a pitch of the first dimension puts blocks past 2^31 elements.
    blocks = slots.mapping(18, "scattered") // BLOCK_SIZES["scattered"]
    assert sorted(blocks.tolist()) == list(range(18)) == list(range(slots.blocks(18, "scattered")))


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_statements_give_the_models_bits(point: dict[str, Any]) -> None:
    assert same(run(stock.insert, point), point)


@pytest.mark.parametrize("name", sorted({f.clean for f in PAIR.faults} | {PAIR.harmless[0].faulty}))
def test_clean_twins_give_them_too(name: str) -> None:
    kernel = import_function(name)
    assert all(same(run(kernel, point), point) for point in POINTS)


@pytest.mark.parametrize("fault", PAIR.faults, ids=lambda fault: fault.id)
def test_every_fault_shows_somewhere(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = import_function(fault.faulty)
    if fault.id == "I11":  # past 2^31 elements, which takes a GPU; here past 2^12
        assert all(same(run(kernel, point), point) for point in POINTS)
        monkeypatch.setattr("k3insert.faults.slots.HALF", 1 << 12)
    if fault.id == "I12":  # the mapping alone: tests/k3common/test_beside.py
        assert all(same(run(kernel, point), point) for point in POINTS)
        return
    if fault.id == "I10":  # -0 in q, which random bits seldom have
        q = torch.tensor([-0.0]).bfloat16().expand(1, 1, 192).clone()
        rest = {n: torch.zeros(o.shape).bfloat16() for n, o in operands(POINTS[6]).items()}
        PAIR.call(kernel, {**rest, "q": q}, POINTS[6], None)
        assert not torch.signbit(q).any()
        return
    assert not all(same(run(kernel, point), point) for point in POINTS)


def test_so_does_what_is_left_unwritten_where_an_earlier_call_left_the_right_bytes() -> None:
    kernel = import_function("k3insert.faults.entries:head_zero")
    for point in POINTS:
        assert same(run(CLEAN, point), point)
        assert same(run(kernel, point), point) == (point["T"] * (point["H"] - 1) == 0), point


def operands(point: dict[str, Any]) -> dict[str, Any]:
    return {o.name: o for o in PAIR.operands(point)}


def test_the_kernel_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-o", "python_functions=check_*"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{len(POINTS)} passed" in done.stdout


@pytest.mark.parametrize("point", POINTS, ids=str)
def check_triton(point: dict[str, Any]) -> None:
    from k3insert import triton_insert

    launches = triton_insert.launches()
    assert same(run(triton_insert.load("cpu", None), point), point)
    assert triton_insert.launches() == launches + (point["T"] > 0)


def test_bytes_are_counted_once() -> None:
    # 2 tokens of 3 heads: 128 columns in, 192 out; a token's k_pe and latent in, its entry out
    point = {"T": 2, "H": 3, "dtype": "bf16", "slots": "in_order"}
    assert PAIR.bytes_moved(point) == 2 * (6 * (128 + 192) + 2 * (64 + 512 + 576))


def test_vllm_is_not_covered_without_a_gpu() -> None:
    for name in ("vllm", "vllm_cache_op"):
        with pytest.raises(Unavailable, match="CUDA"):
            PAIR.candidates[name].load("cpu", None)


@pytest.mark.nightly
def test_the_suite_catches_them_all(tmp_path: Path) -> None:
    command = ["faults", "--pair", "k3insert", "--clean-cases", "100", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "equiv", *command], check=False)
    assert done.returncode == 0
