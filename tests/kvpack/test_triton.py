"""The Triton kernel: layout under the interpreter, instructions for a GPU, bytes on one.

Whether kernels are interpreted is decided when Triton is imported, so what is named ``check_*``
here runs in a pytest of its own, which ``test_under_the_interpreter`` starts.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvpack import classes, oracle, stock
from kvpack.spec import Unavailable

triton_pack = pytest.importorskip("kvpack.triton_pack", reason="needs triton", exc_type=Unavailable)
tl = triton_pack.tl

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
PATTERNS = np.arange(1 << 16, dtype=np.uint16)
INTERPRETED = triton_pack.interpreted()
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device, uninterpreted"
)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> oracle.Bits:
    form = oracle.FORMATS[dtype]
    return np.random.default_rng(seed).integers(0, 1 << form.bits, shape, form.storage)


def tensor(bits: oracle.Bits, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits).view(KINDS[dtype])


def bits_of(value: torch.Tensor) -> oracle.Bits:
    storage = torch.uint8 if value.element_size() == 1 else torch.uint16
    return np.asarray(value.cpu().contiguous().view(storage).numpy())


def hardware_table(dtype: str) -> oracle.Bytes:
    """Convert as ``cvt.rn.satfinite.e4m3x2`` does: a NaN has no sign."""
    table = oracle.e4m3_table(dtype).copy()
    table[classes.class_table("nan", dtype)] = oracle.E4M3_NAN
    return table


def assert_packs(
    kv_bits: oracle.Bits,
    pe_bits: oracle.Bits,
    dtype: str,
    pe_dtype: str | None = None,
    *,
    fp8: bool,
    device: str = "cpu",
) -> None:
    table = oracle.interpreter_table(dtype) if INTERPRETED else hardware_table(dtype)
    want = oracle.pack(kv_bits, pe_bits, dtype=dtype, fp8=fp8, pe_dtype=pe_dtype, table=table)
    launches = triton_pack.launches()
    got = triton_pack.kv_pack(
        tensor(kv_bits, dtype).to(device), tensor(pe_bits, pe_dtype or dtype).to(device), fp8
    )
    assert triton_pack.launches() == launches + (kv_bits.size > 0)
    assert got[0].is_contiguous()
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits_of(ours), theirs)


def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    finished = subprocess.run(
        [*command, "-o", "python_functions=check_*"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert " passed" in finished.stdout
    assert "skipped" not in finished.stdout


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp8", [False, True])
def check_every_pattern(dtype: str, *, fp8: bool) -> None:
    # The model of the interpreter's wrong conversion is exact, in both halves and in the rope key.
    kv_bits = np.concatenate([PATTERNS, PATTERNS[::-1]]).reshape(512, 1, 256)
    assert_packs(np.repeat(kv_bits, 2, 0), PATTERNS.reshape(1024, 1, 64), dtype, fp8=fp8)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def check_the_interpreter_converts_as_modelled(dtype: str) -> None:
    interpreter = sys.modules["triton.runtime.interpreter"]
    source = {"bf16": tl.bfloat16, "fp16": tl.float16}[dtype]
    nearest = interpreter._ir.ROUNDING_MODE.RTNE
    found = interpreter._convert_float(PATTERNS, source, tl.float8e4nv, nearest)
    np.testing.assert_array_equal(found, oracle.interpreter_table(dtype))
    wrong = int((found != oracle.e4m3_table(dtype)).sum())
    assert wrong == {"bf16": 27_958, "fp16": 22_246}[dtype]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads"),
    # Empty; one row; heads that aren't a power of two; more rows than a program's, and not whole.
    [(0, 12), (3, 0), (1, 1), (5, 12), (1, 96), (43, 12), (515, 1)],
)
def check_shapes(tokens: int, heads: int, *, fp8: bool) -> None:
    assert_packs(
        random_bits((tokens, heads, 256), "bf16", tokens),
        random_bits((tokens, 1, 64), "bf16", heads),
        "bf16",
        fp8=fp8,
    )


def check_64_bit_row_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_pack, "_INT32_ROWS", 0)
    kv_bits, pe_bits = random_bits((9, 7, 256), "fp16"), random_bits((9, 1, 64), "fp16", 1)
    assert_packs(kv_bits, pe_bits, "fp16", fp8=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def check_fp8_rope_passes_through(dtype: str) -> None:
    pe_bits = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, 1, 64)).copy()
    assert_packs(random_bits((256, 2, 256), dtype), pe_bits, dtype, "e4m3", fp8=True)


@pytest.mark.parametrize("fp8", [False, True])
def check_strides_and_offsets(*, fp8: bool) -> None:
    wide, rope = random_bits((20, 9, 300), "bf16"), random_bits((20, 577), "bf16", 1)
    pe_bits = rope[:, None, 513:]
    for kv_bits in (
        wide[..., 3:259],
        wide[::2, ::4, 44:],
        wide.transpose(1, 0, 2)[..., :256],
        np.broadcast_to(wide[:, :1, :256], (20, 9, 256)),
    ):
        kv_nope = tensor(wide, "bf16").as_strided(
            kv_bits.shape,
            [stride // 2 for stride in kv_bits.strides],
            (kv_bits.ctypes.data - wide.ctypes.data) // 2,
        )
        k_pe = tensor(rope, "bf16")[: len(kv_bits), None, 513:]
        want = oracle.pack(
            kv_bits,
            pe_bits[: len(kv_bits)],
            dtype="bf16",
            fp8=fp8,
            table=oracle.interpreter_table("bf16"),
        )
        for ours, theirs in zip(triton_pack.kv_pack(kv_nope, k_pe, fp8), want, strict=True):
            np.testing.assert_array_equal(bits_of(ours), theirs)


def check_outputs_given() -> None:
    kv_nope = tensor(random_bits((3, 2, 256), "bf16"), "bf16")
    k_pe = tensor(random_bits((3, 1, 64), "bf16"), "bf16")
    want = triton_pack.kv_pack(kv_nope, k_pe, use_fp8=True)
    out = {
        "k": torch.empty(3, 2, 192, dtype=torch.float8_e4m3fn),
        "v": torch.empty(3, 2, 128, dtype=torch.float8_e4m3fn),
    }
    got = triton_pack.kv_pack(kv_nope, k_pe, use_fp8=True, out=out)
    assert got[0] is out["k"]
    assert got[1] is out["v"]
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits_of(ours), bits_of(theirs))
    key = {"k": torch.empty(3, 2, 192, dtype=torch.bfloat16)}
    k, v = triton_pack.kv_pack(kv_nope, k_pe, use_fp8=False, out=key)
    assert k is key["k"]
    assert v.data_ptr() == kv_nope[..., 128:].data_ptr()


def check_load() -> None:
    assert triton_pack.load("cpu") is triton_pack.kv_pack
    with pytest.raises(Unavailable, match="unset TRITON_INTERPRET"):
        triton_pack.load("cuda")


KV = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
PE = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("kv_nope", "k_pe", "use_fp8", "out", "error", "message"),
    [
        (KV.float(), PE.float(), True, None, TypeError, "expected bfloat16 or float16"),
        (KV, PE.half(), True, None, TypeError, "k_pe is torch.float16"),
        (KV, PE.to(FP8), False, None, TypeError, "with use_fp8"),
        (KV[..., 1:], PE, False, None, ValueError, r"expected \[T, H, 256\]"),
        (KV, PE[..., 1:], False, None, ValueError, r"expected \[2, 1, 64\]"),
        (KV, PE.to("meta"), False, None, ValueError, "k_pe is on meta"),
        (KV.repeat(1, 1, 2)[..., ::2], PE, False, None, ValueError, "kv_nope has last stride 2"),
        (KV, PE.repeat(1, 1, 2)[..., ::2], False, None, ValueError, "k_pe has last stride 2"),
        (KV, PE, True, {"k": KV}, ValueError, r"out\['k'\] is torch.bfloat16"),
        (KV, PE, False, {"k": KV.new_empty(3, 2, 192).transpose(0, 1)}, ValueError, "contiguous"),
    ],
)
def check_refusals(
    kv_nope: torch.Tensor,
    k_pe: torch.Tensor,
    use_fp8: bool,  # noqa: FBT001
    out: dict[str, torch.Tensor] | None,
    error: type[Exception],
    message: str,
) -> None:
    launches = triton_pack.launches()
    with pytest.raises(error, match=message):
        triton_pack.kv_pack(kv_nope, k_pe, use_fp8, out=out)
    assert triton_pack.launches() == launches


@pytest.mark.skipif(INTERPRETED, reason="interpreted")
def test_load() -> None:
    with pytest.raises(Unavailable, match="needs TRITON_INTERPRET=1"):
        triton_pack.load("cpu")
    with pytest.raises(Unavailable, match="takes no library"):
        triton_pack.load("cuda", "some.so")
    with pytest.raises(ValueError, match="kv_nope is on cpu: expected CUDA"):
        triton_pack.kv_pack(KV, PE, use_fp8=False)


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="a CUDA device is here")
def test_load_without_cuda() -> None:
    with pytest.raises(Unavailable, match="torch sees none"):
        triton_pack.load("cuda")


def ptx(dtype: str, *, aligned: bool = True, rows: int = 1 << 20, fp8: bool = True) -> str:
    """Compile the kernel for sm_90, which takes no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    cut = triton_pack.shape(rows, use_fp8=fp8)
    out = "fp8e4nv" if fp8 else dtype
    pointers = {"kv_ptr": dtype, "pe_ptr": dtype, "k_ptr": out, "v_ptr": out}
    integers = ("rows", "heads", "kv_token", "kv_head", "pe_token")
    constants = {
        "ROWS": cut.rows,
        "INDEX": tl.int32,
        "WRITE_V": fp8,
        "WAIT": True,
        "TRIGGER": cut.trigger,
    }
    source = ASTSource(
        fn=triton_pack._pack,
        signature={name: f"*{kind}" for name, kind in pointers.items()}
        | dict.fromkeys(integers, "i32")
        | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 3, 6, 7, 8) if aligned},
    )
    options = {"num_warps": cut.warps, "launch_pdl": True}
    compiled = triton_pack.triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"])


def instructions(text: str) -> collections.Counter[str]:
    """Count conversions, loads and stores."""
    return collections.Counter(re.findall(r"\b(?:cvt|ld\.global|st\.global)\.[\w.:]+", text))


@pytest.mark.skipif(INTERPRETED, reason="interpreted")
@pytest.mark.parametrize("rows", [1, 1 << 20])
@pytest.mark.parametrize(("dtype", "source"), [("bf16", "f32"), ("fp16", "f16x2")])
def test_the_conversion_is_one_saturating_instruction(dtype: str, source: str, rows: int) -> None:
    # Rounding twice, as through float16, would show as another cvt. bf16 to f32 is exact.
    found = instructions(ptx(dtype, rows=rows))
    assert {name for name in found if "e4m3" in name} == {f"cvt.rn.satfinite.e4m3x2.{source}"}
    assert not {name for name in found if name.startswith("cvt.rn.f16")}


@pytest.mark.skipif(INTERPRETED, reason="interpreted")
@pytest.mark.parametrize(
    ("rows", "fp8", "wide"),
    [
        # 16-byte loads of a lane: 4 rows of 512 bytes and 128 of rope by 32 lanes; 16 rows by 256,
        # where the rope of a lane is 8 bytes; and without v
        (1 << 20, True, 5),
        (1, True, 2),
        (1, False, 1),
    ],
)
def test_vectors_only_where_the_call_is_aligned(rows: int, wide: int, *, fp8: bool) -> None:
    assert instructions(ptx("bf16", rows=rows, fp8=fp8))["ld.global.cg.v4.b32"] == wide
    apart = instructions(ptx("bf16", rows=rows, fp8=fp8, aligned=False))
    assert not [name for name in apart if ".v2." in name or ".v4." in name]


@pytest.mark.skipif(INTERPRETED, reason="interpreted")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [1, 1 << 20])
def test_a_dependent_launch_waits_before_it_reads(rows: int, *, fp8: bool) -> None:
    text = ptx("bf16", rows=rows, fp8=fp8)
    wait, load = text.index("griddepcontrol.wait"), text.index("ld.global")
    assert wait < load
    trigger = text.find("griddepcontrol.launch_dependents")
    assert (trigger > 0) == triton_pack.shape(rows, use_fp8=fp8).trigger
    if trigger > 0:
        assert text.rindex("ld.global") < trigger < text.index("st.global")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_pattern_on_cuda(dtype: str, *, fp8: bool) -> None:
    kv_bits = np.concatenate([PATTERNS, PATTERNS[::-1]]).reshape(512, 1, 256)
    pe_bits = PATTERNS.reshape(1024, 1, 64)
    assert_packs(np.repeat(kv_bits, 2, 0), pe_bits, dtype, fp8=fp8, device="cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(0, 12), (3, 0), (1, 1), (7, 5), (1409, 12)])
def test_shapes_on_cuda(
    tokens: int, heads: int, monkeypatch: pytest.MonkeyPatch, *, fp8: bool
) -> None:
    kv_bits = random_bits((tokens, heads, 256), "bf16", tokens)
    pe_bits = random_bits((tokens, 1, 64), "bf16", heads)
    assert_packs(kv_bits, pe_bits, "bf16", fp8=fp8, device="cuda")
    monkeypatch.setattr(triton_pack, "_INT32_ROWS", 0)
    assert_packs(kv_bits, pe_bits, "bf16", fp8=fp8, device="cuda")
    monkeypatch.setattr(triton_pack, "LARGE_ROWS", 0)
    assert_packs(kv_bits, pe_bits, "bf16", fp8=fp8, device="cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("offset", range(9))
def test_every_alignment_on_cuda(
    offset: int, monkeypatch: pytest.MonkeyPatch, *, large: bool
) -> None:
    monkeypatch.setattr(triton_pack, "LARGE_ROWS", 0 if large else 1 << 18)
    base = torch.randn(33 * 12 * 256 + offset, device="cuda").bfloat16()
    rope = torch.randn(33, 576, device="cuda").bfloat16()
    kv_nope, k_pe = base[offset:].view(33, 12, 256), rope[:, None, 512 - offset : 576 - offset]
    got = triton_pack.kv_pack(kv_nope, k_pe, use_fp8=True)
    for ours, theirs in zip(got, stock.kv_pack(kv_nope, k_pe, use_fp8=True), strict=True):
        np.testing.assert_array_equal(bits_of(ours), bits_of(theirs))
