"""The compiled tail: eager's bytes in every layout, one graph a variant, never eager."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpack import inductor_pack, stock
from kvpack.spec import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

FP8 = torch.float8_e4m3fn
COLUMNS = {"k": 192, "v": 128}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # The number of threads is part of what Dynamo guards: another one is another graph.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def poisoned(tokens: int, heads: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((tokens, heads, columns * dtype.itemsize), 0xA5, dtype=torch.uint8).view(
            dtype
        )
        for name, columns in COLUMNS.items()
    }


def assert_is_stock(
    kv_nope: torch.Tensor,
    k_pe: torch.Tensor,
    out: dict[str, torch.Tensor] | None = None,
    *,
    use_fp8: bool,
) -> None:
    want = stock.kv_pack(kv_nope, k_pe, use_fp8)
    calls = inductor_pack.compiled_calls()
    got = inductor_pack.kv_pack(kv_nope, k_pe, use_fp8, out=out)
    assert inductor_pack.compiled_calls() > calls
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert torch.equal(raw(ours), raw(theirs))
    if out is not None:
        assert got[0] is out["k"]
        assert not use_fp8 or got[1] is out["v"]


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1, 3])
def test_every_pattern_in_every_column_group(
    dtype: torch.dtype, step: int, *, use_fp8: bool
) -> None:
    # `step` 3 is not vectorised: C++ converts one element at a time there, by another function.
    numbers = torch.arange(1 << 16, dtype=torch.int32)
    patterns, mirrored = numbers.to(torch.uint16), numbers.flip(0).to(torch.uint16)
    kv_nope = torch.stack([patterns.view(512, 128), mirrored.view(512, 128)], 1)
    spread = torch.zeros(1024, 1, 256 * step, dtype=dtype)
    spread[..., ::step] = kv_nope.view(512, 1, 256).repeat(2, 1, 1).view(dtype)
    kv_nope = spread[..., ::step]
    k_pe = patterns.view(1024, 1, 64).view(dtype)
    assert_is_stock(kv_nope, k_pe, use_fp8=use_fp8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_rope_passes_through(dtype: torch.dtype) -> None:
    k_pe = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(64).view(64, 256)
    k_pe = k_pe.T.contiguous().view(256, 1, 64).view(FP8)
    assert_is_stock(random_bits((256, 3, 256), dtype, 1), k_pe, use_fp8=True)


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads"),
    # Empty ones; ones that a tracer likes to fix; H of TP8; T equal to H; a few blocks.
    [(0, 12), (12, 0), (0, 0), (1, 1), (1, 12), (7, 1), (12, 12), (83, 12), (500, 2)],
)
def test_shapes(tokens: int, heads: int, *, use_fp8: bool, given: bool) -> None:
    kv_nope = random_bits((tokens, heads, 256), torch.bfloat16, tokens)
    k_pe = random_bits((tokens, 1, 64), torch.bfloat16, heads + 1000)
    out = poisoned(tokens, heads, FP8 if use_fp8 else torch.bfloat16) if given else None
    assert_is_stock(kv_nope, k_pe, out, use_fp8=use_fp8)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_strides_offsets_and_overlapping_views(*, use_fp8: bool) -> None:
    dtype = torch.bfloat16
    rope = random_bits((40, 576), dtype, 5)[:, 512:].unsqueeze(1)
    wide = random_bits((40, 30, 300), dtype, 6)
    flat = random_bits((40 * 12 * 256 + 1,), dtype, 7)
    expanded = random_bits((40, 1, 256), dtype, 8).expand(40, 12, 256)
    for kv_nope, k_pe in (
        (wide[:, :12, 3:259], rope),
        (wide[::2, ::5, 44:], rope[::2]),
        (wide.transpose(0, 1)[..., :256], rope[:30]),
        (flat[1:].view(40, 12, 256), rope),
        (expanded, rope[:1].expand(40, 1, 64)),
    ):
        assert_is_stock(kv_nope, k_pe, use_fp8=use_fp8)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_outputs_and_operands_of_one_allocation(*, use_fp8: bool) -> None:
    # As an arena has them: what lies between must stay as it was.
    tokens, heads, gap = 9, 3, 33
    dtype = FP8 if use_fp8 else torch.bfloat16
    arena = random_bits((200_000,), torch.uint8, 3)
    before = arena.clone()
    position = 2

    def carve(
        shape: tuple[int, int, int], pitches: tuple[int, int], kind: torch.dtype
    ) -> torch.Tensor:
        nonlocal position
        extent = (shape[0] - 1) * pitches[0] + (shape[1] - 1) * pitches[1] + shape[2]
        part = arena[position : position + extent * kind.itemsize].view(kind)
        position += -(-(extent + gap) * kind.itemsize // 2) * 2
        return part.as_strided(shape, (*pitches, 1), part.storage_offset())

    kv_nope = carve((tokens, heads, 256), (1000, 300), torch.bfloat16)
    k = carve((tokens, heads, 192), (700, 200), dtype)
    k_pe = carve((tokens, 1, 64), (70, 5), torch.bfloat16)
    v = carve((tokens, heads, 128), (500, 131), dtype)
    want = stock.kv_pack(kv_nope, k_pe, use_fp8)
    inductor_pack.kv_pack(kv_nope, k_pe, use_fp8, out={"k": k, "v": v})
    assert torch.equal(raw(k), raw(want[0]))
    mask = torch.zeros_like(arena, dtype=torch.bool)
    for written in (k, v) if use_fp8 else (k,):
        start = written.storage_offset() * written.itemsize
        view = mask[start:].as_strided(
            (*written.shape[:2], written.shape[2] * written.itemsize),
            (written.stride(0) * written.itemsize, written.stride(1) * written.itemsize, 1),
            start,
        )
        view.fill_(value=True)
    assert torch.equal(arena[~mask], before[~mask])
    assert not torch.equal(arena[mask], before[mask])


def test_few_graphs() -> None:
    # Whatever ran before in this process: a variant is compiled once.
    for tokens, heads in ((3, 2), (1, 1), (0, 5), (70, 12)):
        for use_fp8 in (False, True):
            kv_nope = random_bits((tokens, heads, 256), torch.bfloat16, 0)
            inductor_pack.kv_pack(kv_nope, random_bits((tokens, 1, 64), torch.bfloat16, 1), use_fp8)
    assert {tail.graphs for tail in inductor_pack._tails.values()} == {1}


class Plain(TorchDispatchMode):
    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self,
        func,  # noqa: ANN001
        types,  # noqa: ANN001
        args=(),  # noqa: ANN001
        kwargs=None,  # noqa: ANN001
    ) -> object:
        return func(*args, **(kwargs or {}))


def test_running_eagerly_is_an_error() -> None:
    operands = (
        random_bits((2, 2, 256), torch.bfloat16, 0),
        random_bits((2, 1, 64), torch.bfloat16, 1),
    )
    inductor_pack.kv_pack(*operands, use_fp8=True)
    with Plain(), pytest.raises(RuntimeError, match="no compiled code ran"):
        inductor_pack.kv_pack(*operands, use_fp8=True)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="no compiled code ran"),
    ):
        inductor_pack.kv_pack(*operands, use_fp8=True)
    inductor_pack.kv_pack(*operands, use_fp8=True)


def test_the_recompile_limit_is_an_error() -> None:
    operands = random_bits((2, 2, 256), torch.float16, 0), random_bits((2, 1, 64), torch.float16, 1)
    inductor_pack.kv_pack(*operands, use_fp8=False)
    torch.set_num_threads(2)
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(RuntimeError, match="no compiled code ran"),
    ):
        inductor_pack.kv_pack(*operands, use_fp8=False)


KV = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
PE = torch.zeros(2, 1, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kv_nope", "k_pe", "use_fp8", "out", "error", "message"),
    [
        (KV.float(), PE.float(), True, None, TypeError, "expected bfloat16 or float16"),
        (KV, PE.half(), True, None, TypeError, "k_pe is torch.float16"),
        (KV, PE.to(FP8), False, None, TypeError, "with use_fp8"),
        (KV[..., 1:], PE, False, None, ValueError, r"expected \[T, H, 256\]"),
        (KV[0], PE, False, None, ValueError, r"expected \[T, H, 256\]"),
        (KV, PE[:1], False, None, ValueError, r"expected \[2, 1, 64\]"),
        (KV, PE, False, {}, ValueError, "expected 'k' too"),
        (KV, PE, True, poisoned(2, 3, torch.bfloat16), ValueError, "out\\['k'\\]"),
        (KV, PE, True, poisoned(3, 2, FP8), ValueError, "out\\['k'\\]"),
    ],
)
def test_refusals(
    kv_nope: torch.Tensor,
    k_pe: torch.Tensor,
    use_fp8: bool,  # noqa: FBT001
    out: dict[str, torch.Tensor] | None,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        inductor_pack.kv_pack(kv_nope, k_pe, use_fp8, out=out)


def test_load() -> None:
    assert inductor_pack.load("cpu") is inductor_pack.kv_pack
    with pytest.raises(Unavailable, match="takes no library"):
        inductor_pack.load("cpu", "some.so")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_load_without_cuda() -> None:
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        inductor_pack.load("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (3, 0), (1, 1), (1409, 12)])
def test_cuda_layouts(tokens: int, heads: int, *, use_fp8: bool) -> None:
    # Values that fit e4m3: what overflow becomes is torch's business, and the ledger's.
    generator = torch.Generator().manual_seed(tokens)
    base = torch.randn(tokens * heads * 256 + 1, generator=generator).bfloat16().cuda()
    k_pe = torch.randn(tokens, 1, 64, generator=generator).bfloat16().cuda()
    assert_is_stock(base[1:].view(tokens, heads, 256), k_pe, use_fp8=use_fp8)


@pytest.mark.parametrize("inside", [False, True], ids=["normal operands", "inference operands"])
def test_inference_mode_has_a_graph_of_its_own(*, inside: bool) -> None:
    """Under ``torch.inference_mode`` any layout works too, whatever kind of tensor it is given."""
    with torch.inference_mode(inside):
        wide = torch.randn(5, 3, 256).to(torch.bfloat16)
        workspace = torch.randn(5, 576).to(torch.bfloat16)
    for use_fp8 in (False, True):
        with torch.inference_mode():
            pe = workspace[:, 512:].unsqueeze(1)
            for tokens in (2, 5, 1):
                got = inductor_pack.kv_pack(wide[:tokens], pe[:tokens], use_fp8)
                want = stock.kv_pack(wide[:tokens], pe[:tokens], use_fp8)
                for a, b in zip(got, want, strict=True):
                    kind = torch.uint8 if use_fp8 else torch.int16
                    assert torch.equal(a.view(kind), b.view(kind))
