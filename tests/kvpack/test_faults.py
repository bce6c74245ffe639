"""Planted faults: each twin equals stock, each fault has an input that shows it."""

from __future__ import annotations

import importlib
import itertools
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpack import stock
from kvpack.faults import k04_full, kernel, unlisted_conduct
from kvpack.faults.catalogue import FAULTS, HARMLESS, UNLISTED
from kvpack.spec import Fault

Kernel = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
Bytes = tuple[torch.Tensor, torch.Tensor, bool]

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COLOURS = (0xA5, 0x5A)
BAND = 64
CPU = torch.device("cpu")
MAP_NORESERVE = 0x4000


@dataclass(frozen=True)
class Witness:
    """An input, by what matters: shape, dtype, fp8, what the rows hold, and how they lie."""

    tokens: int
    heads: int
    dtype: str = "bf16"
    fp8: bool = False
    fill: str = "random"  # "sweep" (each pattern, at 256 rows) or "zero"
    layout: str = "dense"  # "padded" rows, "sliced" k_pe, or "odd" (base 16 mod 32 bytes)

    def operands(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for columns, heads in ((256, self.heads), (64, 1)):
            shape = (self.tokens, heads, columns)
            count = self.tokens * heads * columns
            if self.fill == "sweep":
                flat = np.arange(seed, seed + count, dtype=np.uint32).astype(np.uint16)
            else:
                generator = np.random.default_rng([seed, count])
                flat = generator.integers(0, 1 << 16, count, dtype=np.uint16)
            if self.fill == "zero":
                flat[:] = 0
            dense = torch.from_numpy(flat.reshape(shape)).view(torch.int16)
            found.append(self.laid_out(dense).view(DTYPES[self.dtype]))
        return found[0], found[1]

    def laid_out(self, dense: torch.Tensor) -> torch.Tensor:
        tokens, heads, columns = dense.shape
        before, after, shift = {
            "dense": (0, 0, 0),
            "odd": (0, 0, 8),
            "padded": (0, 32, 0),
            "sliced": (512, 0, 0) if columns == 64 else (0, 0, 0),
        }[self.layout]
        width = before + columns + after
        # A page is aligned to 32 bytes whatever the allocator does.
        room = torch.full((tokens * heads * width + 32 + shift,), 0x5AA5, dtype=torch.int16)
        start = -room.data_ptr() // 2 % 16 + shift
        wide = room[start : start + tokens * heads * width].view(tokens, heads, width)
        view = wide[..., before : before + columns]
        view.copy_(dense)
        return view


class Served(TorchDispatchMode):
    """Serves ``torch.empty`` from coloured memory with bands, as the suite does."""

    def __init__(self, colour: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.colour = colour
        self.bands: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.empty.memory_format:
            return func(*args, **(kwargs or {}))
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size = int(np.prod(args[0])) * dtype.itemsize
        room = torch.from_numpy(np.full(size + 2 * BAND, self.colour, np.uint8))
        self.bands += [room[:BAND], room[BAND + size :]]
        return room[BAND : BAND + size].view(dtype).view(args[0])


def load(name: str) -> Kernel:
    module, _, function = name.partition(":")
    found: Kernel = getattr(importlib.import_module(module), function)
    return found


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def served(pack: Kernel, operands: tuple[torch.Tensor, torch.Tensor], fp8: bool) -> Iterator[Bytes]:  # noqa: FBT001
    for colour in COLOURS:
        with Served(colour) as mode:
            k, v = pack(*operands, fp8)
        intact = all(bool((band == colour).all()) for band in mode.bands)
        yield raw(k), raw(v), intact


def equals_stock(pack: Kernel, witness: Witness, seed: int = 0) -> bool:
    operands = witness.operands(seed)
    before = [x.clone() for x in operands]
    k, v = stock.kv_pack(*operands, witness.fp8)
    expected = raw(k).clone(), raw(v).clone()
    same = all(
        intact and torch.equal(mine, expected[0]) and torch.equal(other, expected[1])
        for mine, other, intact in served(pack, operands, witness.fp8)
    )
    return same and all(torch.equal(raw(x), raw(b)) for x, b in zip(operands, before, strict=True))


SHAPES = [(0, 3), (3, 0), (1, 1), (5, 3), (33, 1), (7, 12), (256, 1), (1409, 12)]
WITNESSES = [
    Witness(t, h, dtype, fp8, "sweep")
    for (t, h), dtype, fp8 in itertools.product(SHAPES, DTYPES, (False, True))
] + [
    Witness(13, 5, dtype, fp8, "random", layout)
    for dtype, fp8, layout in itertools.product(DTYPES, (False, True), ("padded", "sliced", "odd"))
]

ALL = Witness(256, 1, "bf16", fp8=True, fill="sweep")
"""Each pattern of kv_nope once."""
HALVES = Witness(256, 1, "fp16", fp8=True, fill="sweep")
SHOWN_BY = {
    "K01": Witness(1, 1),
    "K02": Witness(1, 1, fill="zero"),
    "K03": Witness(16_897, 1),
    "K05": Witness(1, 2),
    "K06": Witness(1, 1),
    "K07": Witness(2, 1),
    "K08": Witness(2, 1, layout="sliced"),
    "K09": ALL,
    "K10": ALL,
    "K11": ALL,
    "K11b": ALL,
    "K12": ALL,
    "K13": HALVES,
    "K14": ALL,
    "K15": Witness(1, 1),
    "K16": Witness(1, 1, fill="zero"),
    "U01": Witness(1, 12),
    "U02": Witness(684, 12),
    "U03": Witness(4097, 1),
    "U04": Witness(32_769, 1, "fp16", fp8=True),
    "U05": Witness(1, 1, layout="sliced"),
    "U06": Witness(1, 2, layout="padded"),
    "U07": Witness(1, 1, layout="odd"),
    "U08": Witness(1, 1, layout="padded"),
    "U09": Witness(256, 1, "fp16", fill="sweep"),
    "U10": Witness(1, 17),
    "U11": Witness(1, 65),
    "U12": Witness(1, 1),
    "U13": Witness(1, 1, fill="zero"),
    "U14": ALL,
    "U15": ALL,
    "U16": ALL,
    "U17": HALVES,
    "U18": ALL,
    "U19": Witness(256, 1, fill="sweep"),
    "U20": Witness(256, 1, fill="sweep"),
    "U21": Witness(256, 1),
}
"""The smallest kinds of input on which a fault differs; those not here have tests of their own."""
HIDDEN_FROM = {
    "K02": Witness(2, 1),
    "K03": Witness(16_896, 1),
    "K05": Witness(5, 1),
    "K07": Witness(1, 1),
    "K08": Witness(5, 3),
    "K13": ALL,
    "U01": Witness(5, 11),
    "U02": Witness(682, 12),
    "U03": Witness(4096, 1),
    "U04": Witness(32_769, 1, "bf16", fp8=True),
    "U05": Witness(5, 3),
    "U06": Witness(5, 3),
    "U10": Witness(2, 8),
    "U11": Witness(3, 64),
    "U17": ALL,
}
"""Inputs on which a fault must not show, or it isn't the fault that its title names."""

ON_A_CPU = [f for f in FAULTS if f.needs != "cuda"]
BY_ID = {f.id: f for f in (*FAULTS, *UNLISTED)}


def by_id(fault: Fault) -> str:
    return fault.id


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    """Work on one thread, which is faster beside others, and undo what faults leave behind."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)


# -- the catalogue --------------------------------------------------------------------


def test_every_number_is_there() -> None:
    numbers = {re.sub(r"(b|-full)$", "", f.id) for f in FAULTS}
    assert numbers == {f"K{n:02}" for n in range(1, 19)}
    ids = [f.id for f in (*FAULTS, *HARMLESS, *UNLISTED)]
    assert len(set(ids)) == len(ids)


def test_a_fault_has_a_module_of_its_own_and_its_twin_beside_it() -> None:
    for fault in FAULTS:
        module = fault.faulty.partition(":")[0]
        assert fault.clean == f"{module}:kv_pack_clean"
        number = fault.id.partition("-")[0].removesuffix("b").lower()
        assert module.startswith(f"kvpack.faults.{number}_")


# -- twins and harmless variants ------------------------------------------------------


@pytest.mark.parametrize("fault", ON_A_CPU, ids=by_id)
def test_twin_equals_stock(fault: Fault) -> None:
    twin = load(fault.clean)
    for witness in WITNESSES:
        assert equals_stock(twin, witness), witness


@pytest.mark.parametrize("variant", HARMLESS, ids=by_id)
def test_harmless_variant_equals_stock(variant: Fault) -> None:
    pack = load(variant.faulty)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    for witness in WITNESSES:
        assert equals_stock(pack, witness), witness
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() is dtype


def test_twin_passes_e4m3_rope_through() -> None:
    kv_nope, k_pe = Witness(256, 2, "fp16").operands()
    k_pe = k_pe.view(torch.uint8)[..., :64].view(torch.float8_e4m3fn)
    expected = stock.kv_pack(kv_nope, k_pe, use_fp8=True)
    actual = kernel.kv_pack(kv_nope, k_pe, True)
    assert torch.equal(raw(actual[0]), raw(expected[0]))


# -- faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", SHOWN_BY)
def test_fault_shows(number: str) -> None:
    fault = BY_ID[number]
    assert equals_stock(load(fault.clean), SHOWN_BY[number])
    assert not equals_stock(load(fault.faulty), SHOWN_BY[number])


@pytest.mark.parametrize("number", HIDDEN_FROM)
def test_fault_is_only_what_its_title_says(number: str) -> None:
    assert equals_stock(load(BY_ID[number].faulty), HIDDEN_FROM[number])


def test_every_fault_has_a_witness() -> None:
    with_their_own = {"K04", "K04-full", *(f"U{n}" for n in range(22, 33))}
    on_a_cpu = {f.id for f in (*FAULTS, *UNLISTED) if f.needs != "cuda"}
    assert set(SHOWN_BY) | with_their_own == on_a_cpu


def test_k04_reads_at_the_wrapped_address() -> None:
    pitch, tokens = 1 << 28, 9  # token 8 is 2^31 elements on
    try:
        room = mmap.mmap(
            -1, (2 << 32) + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        )
    except (OSError, ValueError) as e:
        pytest.skip(f"no room for a sparse mapping: {e}")
    elements = torch.frombuffer(room, dtype=torch.int16)
    middle = 1 << 31
    kv_nope = elements.as_strided((tokens, 1, 256), (pitch, 256, 1), middle)
    kv_nope.copy_(torch.arange(tokens).view(-1, 1, 1) + 0x3F80)
    elements[:256] = 0x4242  # 2^31 elements before the base
    kv_nope = kv_nope.view(torch.bfloat16)
    k_pe = torch.zeros(tokens, 1, 64, dtype=torch.bfloat16)
    expected = stock.kv_pack(kv_nope, k_pe, use_fp8=False)
    fault = BY_ID["K04"]
    clean = load(fault.clean)(kv_nope, k_pe, False)
    wrong = load(fault.faulty)(kv_nope, k_pe, False)
    assert torch.equal(clean[0], expected[0])
    assert torch.equal(clean[1], expected[1])
    assert torch.equal(wrong[1][:8], expected[1][:8])
    assert bool((wrong[1][8].view(torch.int16) == 0x4242).all())


def test_k04_full_wraps_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = BY_ID["K04-full"]
    witness = Witness(100, 1)
    assert equals_stock(load(fault.faulty), witness)
    monkeypatch.setattr(k04_full, "HALF", 1 << 14)  # row 86 starts at 16,512
    assert not equals_stock(load(fault.faulty), witness)
    assert equals_stock(load(fault.faulty), Witness(86, 1))


def test_k15_leaves_the_key_right() -> None:
    operands = Witness(3, 2).operands()
    expected = raw(stock.kv_pack(*operands, use_fp8=False)[0])
    for k, _, intact in served(load(BY_ID["K15"].faulty), operands, fp8=False):
        assert torch.equal(k, expected)
        assert not intact


# -- faults of conduct ----------------------------------------------------------------


def test_u22_overwrites_an_earlier_result() -> None:
    pack, witness = load(BY_ID["U22"].faulty), Witness(2, 2)
    first = pack(*witness.operands(0), False)[0]
    before = raw(first).clone()
    pack(*witness.operands(1), False)
    assert not torch.equal(raw(first), before)


def test_u23_remembers_by_address() -> None:
    pack, witness = load(BY_ID["U23"].faulty), Witness(2, 2)
    operands = witness.operands(0)
    before = raw(pack(*operands, False)[0])
    for mine, other in zip(operands, witness.operands(1), strict=True):
        mine.view(torch.int16).copy_(other.view(torch.int16))
    assert torch.equal(raw(pack(*operands, False)[0]), before)


def test_u24_errs_every_seventh_time() -> None:
    pack, witness = load(BY_ID["U24"].faulty), Witness(2, 2)
    operands = witness.operands()
    expected = raw(stock.kv_pack(*operands, use_fp8=False)[1])
    wrong = [not torch.equal(raw(pack(*operands, False)[1]), expected) for _ in range(14)]
    assert sum(wrong) == 2


def test_u25_and_u26_hang_and_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(_: object) -> None:
        raise Ended

    monkeypatch.setattr(time, "sleep", end)
    monkeypatch.setattr(os, "_exit", end)
    for number, tokens, heads in (("U25", 13, 1), ("U26", 1, 3)):
        pack = load(BY_ID[number].faulty)
        assert equals_stock(pack, Witness(4, 2))
        with pytest.raises(Ended):
            pack(*Witness(tokens, heads).operands(), False)


def test_u27_raises_without_tokens() -> None:
    with pytest.raises(RuntimeError):
        load(BY_ID["U27"].faulty)(*Witness(0, 3).operands(), False)


def test_u28_to_u30_return_something_else() -> None:
    def v(number: str, witness: Witness) -> torch.Tensor:
        return load(BY_ID[number].faulty)(*witness.operands(), witness.fp8)[1]

    assert v("U28", Witness(2, 1, fp8=True)).dtype is torch.uint8
    assert v("U29", Witness(2, 1)).shape == (2, 128)
    assert v("U30", Witness(2, 2)).device.type == "meta"


def test_u31_and_u32_leave_state_behind() -> None:
    load(BY_ID["U31"].faulty)(*Witness(1, 1).operands(), False)
    assert torch.get_default_dtype() is torch.float64
    load(BY_ID["U32"].faulty)(*Witness(1, 1).operands(), False)
    assert not torch.is_grad_enabled()


def test_those_for_a_gpu_are_right_on_a_cpu() -> None:
    for pack in (unlisted_conduct.default_stream, unlisted_conduct.looks_at_data):
        assert equals_stock(pack, Witness(5, 3, fp8=True))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_one_row_loses_one_token_and_writes_no_input(tokens: int) -> None:
    from kvpack.faults import one_row

    kv, pe = torch.randn(tokens, 1, 256).bfloat16(), torch.randn(tokens, 1, 64).bfloat16()
    before = kv.clone()
    made, right = one_row.kv_pack(kv, pe, False), stock.kv_pack(kv, pe, False)
    assert torch.equal(kv, before)
    for m, r in zip(made, right, strict=True):
        assert (m != r).flatten(1).any(1).nonzero()[:, 0].tolist() == [tokens // 2][:tokens]


@pytest.mark.parametrize("heads", [1, 2, 12])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_two_heads_change_places_in_half_a_chunk_and_no_input_is_written(
    tokens: int, heads: int
) -> None:
    from kvpack.faults import two_heads

    kv, pe = torch.randn(tokens, heads, 256).bfloat16(), torch.randn(tokens, 1, 64).bfloat16()
    before = kv.clone()
    made, right = two_heads.kv_pack(kv, pe, False), stock.kv_pack(kv, pe, False)
    assert torch.equal(kv, before)
    half = -(-tokens // 2) if heads > 1 else 0
    for m, r in zip(made, right, strict=True):
        assert torch.equal(m[half:], r[half:])
        assert torch.equal(m[:, :-2], r[:, :-2])
        if half:
            assert torch.equal(m[:half, -1], r[:half, -2])
            assert torch.equal(m[:half, -2], r[:half, -1])
        assert (m != r).any(-1).sum() == 2 * half
