"""The pairs of K3's epilogues: statements against their models, kernels, faults."""

from __future__ import annotations

import itertools
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
from equiv.dtypes import DTYPES
from equiv.fills import fill
from equiv.pairs import OpPair, load_pair
from k3common import arithmetic, integer, model, positions
from kvpack.oracle import encode_e4m3
from kvpack.spec import Unavailable

PAIRS = ("k3quant", "k3decode", "dsmla")
SIZES = ((0, 2), (1, 1), (5, 3), (67, 2))
KINDS = ("bits", "near", "special", "zero")
FAR = {"Q05", "P05", "S05"}
"""Faults that only a cache past 2^31 bytes shows: lane sizes has one."""
WORDS = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(autouse=True)
def filled() -> Iterator[None]:
    """Fill what torch allocates: left there by an earlier call, bytes may happen to be right."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def points(pair: OpPair) -> list[dict[str, Any]]:
    axes = pair.domain_axes
    found = (dict(zip(axes, v, strict=True)) for v in itertools.product(*axes.values()))
    return [{"T": t, "H": h, **p} for p in found if pair.valid(p) for t, h in SIZES]


def inputs_of(pair: OpPair, point: dict[str, Any], kind: str) -> dict[str, np.ndarray[Any, Any]]:
    operands = enumerate(pair.operands(point))
    return {o.name: fill(kind, o.shape, DTYPES[o.dtype], 0, i) for i, o in operands}


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if not tensor.numel():
        return np.zeros(0, np.uint8)
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy()


def right(pair: OpPair, kernel: Any, point: dict[str, Any], kind: str) -> bool:
    """Whether a kernel's outputs, and all operands after the call, have the model's bytes."""
    before = inputs_of(pair, point, kind)
    dtypes = {o.name: DTYPES[o.dtype].torch() for o in pair.operands(point)}
    tensors = {n: torch.from_numpy(x.copy()).view(dtypes[n]) for n, x in before.items()}
    tensors |= pair.call(kernel, tensors, point, None)
    wanted = {**before, **(pair.oracle(before, point) or {})}
    return all(
        np.array_equal(bytes_of(tensors[n]), np.ascontiguousarray(x).reshape(-1).view(np.uint8))
        for n, x in wanted.items()
    )


def always_right(pair: OpPair, kernel: Any) -> bool:
    return all(right(pair, kernel, p, k) for p in points(pair) for k in KINDS)


@pytest.mark.parametrize("name", PAIRS)
def test_the_pair_is_registered_and_whole(name: str) -> None:
    assert isinstance(load_pair(name), OpPair)


@pytest.mark.parametrize("candidate", ["stock", "integer"])
@pytest.mark.parametrize("name", PAIRS)
def test_statements_and_integers_give_the_models_bits(name: str, candidate: str) -> None:
    pair = load_pair(name)
    assert always_right(pair, pair.candidates[candidate].load("cpu", None))


@pytest.mark.parametrize("name", PAIRS)
def test_clean_twins_and_the_harmless_give_them_too(name: str) -> None:
    pair = load_pair(name)
    for kernel in {f.clean for f in pair.faults} | {f.faulty for f in pair.harmless}:
        assert always_right(pair, import_function(kernel)), kernel


@pytest.mark.parametrize(
    ("name", "fault"),
    [(n, f) for n in PAIRS for f in load_pair(n).faults if f.id not in FAR],
    ids=lambda x: getattr(x, "id", x),
)
def test_every_fault_shows_somewhere(name: str, fault: Any) -> None:
    assert not always_right(load_pair(name), import_function(fault.faulty))


@pytest.mark.parametrize("name", PAIRS)
def test_an_offset_in_32_bits_shows_past_two_gigabytes(name: str, tmp_path: Path) -> None:
    pair = load_pair(name)
    fault = next(f for f in pair.faults if f.id in FAR)
    options = ["--lane", "sizes", "--candidate", fault.faulty, "--out", str(tmp_path)]
    command = [sys.executable, "-m", "equiv", "--pair", name, "--device", "cpu", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout[-2000:]
    assert "kv_cache" in done.stdout


def test_the_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-o", "python_functions=check_*"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{len(PAIRS)} passed" in done.stdout


@pytest.mark.parametrize("name", PAIRS)
def check_triton(name: str) -> None:
    from k3common import triton_rows

    pair = load_pair(name)
    kernel = import_function(
        {
            "k3quant": "k3quant.triton_quant:quantise_and_insert",
            "k3decode": "k3decode.triton_decode:concat_and_insert",
            "dsmla": "dsmla.triton_insert:concat_and_insert",
        }[name]
    )
    before = triton_rows.launches()
    assert always_right(pair, kernel)
    assert triton_rows.launches() - before == len(KINDS) * sum(p["T"] > 0 for p in points(pair))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 0.5, 23.529411])
def test_three_conversions_agree_on_every_pattern(dtype: str, scale: float) -> None:
    wide = model.widen(WORDS, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        product = wide * np.float32(scale)
    wanted = encode_e4m3(product.view(np.uint32), "fp32")
    wanted[np.isnan(product)] = 0x7F
    inverse = torch.tensor([scale], dtype=torch.float32)
    x = torch.from_numpy(wide)
    assert np.array_equal(model.quantise(wide, scale), wanted)
    assert np.array_equal(arithmetic.quantise(x, inverse).view(torch.uint8).numpy(), wanted)
    assert np.array_equal(integer.quantise(x, inverse).view(torch.uint8).numpy(), wanted)


def test_products_with_the_rotary_table_are_exact() -> None:
    table = positions.table()
    assert np.array_equal(table * 256, np.round(table * 256))
    assert np.abs(table).max() <= 1
    assert set(positions.positions(3 * positions.ROWS)) == set(range(positions.ROWS))
    # 11 bits of fp16 and 9 of the table: 20 of float32's 24
    x = model.widen(WORDS, "fp16")
    x = x[np.isfinite(x)]
    for value in (1 / 256, 255 / 256, 181 / 256, 1.0):
        assert np.array_equal(x * np.float32(value), x.astype(np.float64) * value)


def test_scales_of_tiles_at_their_edges() -> None:
    values = torch.tensor([0.0, 448.0, 450.0, 0.0448, 2**-13 * 448, torch.inf, torch.nan])
    latent = values.bfloat16().repeat_interleave(512).view(-1, 512)
    scales = arithmetic.tile_scales(latent)[:, 0].tolist()
    assert scales == [2**-13, 1.0, 2.0, 2**-13, 2**-13, torch.inf, 2**-13]


@pytest.mark.parametrize("name", PAIRS)
def test_vllm_is_not_covered_without_a_gpu(name: str) -> None:
    for candidate in load_pair(name).candidates.values():
        if candidate.takes_library:
            with pytest.raises(Unavailable, match="CUDA"):
                candidate.load("cpu", None)


# -- what the ledger declares of vLLM's ops, and an H200 showed ---------------------


def test_the_variant_is_what_the_cache_op_gave_on_the_h200() -> None:
    # docs/results/dsmla-cache-op-h200-dev.json, finding 1: T=1, H=0, fp16, scattered, gptj, bits.0
    pair: Any = load_pair("dsmla")
    point = {"T": 1, "H": 0, "dtype": "fp16", "slots": "scattered", "rope": "gptj"}
    inputs = inputs_of(pair, point, "bits")
    expected = pair.oracle(inputs, point)["kv_cache"]
    actual = pair.variants["scale_of_words"](inputs, point)["kv_cache"]
    where = np.argwhere(expected != actual)
    first = tuple(where[0])
    assert (len(where), first) == (137, (0, 3, 130))
    assert (expected[first], actual[first]) == (0x67, 0x5F)


def test_the_variant_is_what_insert_py_printed_on_the_h200() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((33, 2, 192), (33, 2, 128), (33, 64), (33, 512))
    *_, pe, latent = (torch.randn(*s, generator=generator).half() for s in shapes)
    stored = torch.arange(33) % 3 != 0
    words = [x[stored].view(torch.int16).numpy().view(np.uint16) for x in (latent, pe)]
    differ = model.ds_entries(*words, "fp16") != model.ds_entries_of_words(*words)
    parts = ((0, 512), (512, 528), (528, 656))
    assert [int(differ[:, a:b].sum()) for a, b in parts] == [11_264, 91, 0]


@pytest.mark.parametrize(
    ("which", "kv_c", "differ", "first"),
    [
        ("auto,slots=in_order,scales=one,rope=off", (0, 0x3F80), 1, (0, 8, 0, 0x3F80)),
        ("auto,slots=in_order,scales=one,rope=off", (42, 0x7F82), 1, (0, 8, 42, 0x7F82)),
        ("fp8,slots=scattered,scales=power,rope=gptj", (0, 0), 18, (0, 3, 513, 0x80)),
    ],
)
def test_the_other_variant_is_what_the_decode_op_gave_on_the_h200(
    which: str, kv_c: tuple[int, int], differ: int, first: tuple[int, ...]
) -> None:
    # docs/results/k3decode-h200-dev.json, findings 1 to 3: T=1, H=1, bf16, zero.0, mode producer
    pair: Any = load_pair("k3decode")
    axes = dict(a.split("=") for a in f"cache={which}".split(","))
    point = {"T": 1, "H": 1, "dtype": "bf16", **axes}
    inputs = inputs_of(pair, point, "zero")
    inputs["kv_c"][kv_c[0]] = kv_c[1]
    made = pair.variants["race"](inputs, point)
    assert list(made) == ["kv_cache"]
    places = np.ma.getmaskarray(made["kv_cache"])
    assert places.any(-1).sum() == places.all(-1).sum() == 1  # the one token's entry, whole
    expected = pair.oracle(inputs, point)["kv_cache"]
    where = np.argwhere(expected != made["kv_cache"].data)
    at = tuple(where[0])
    assert (len(where), (*at, expected[at]), made["kv_cache"].data[at]) == (differ, first, 0)
