"""The stock tail: layout, bytes and the parts of vLLM's behaviour that others lean on."""

from __future__ import annotations

import pytest
import torch

from kvpack import stock

DTYPES = (torch.bfloat16, torch.float16)


def operands(tokens: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 131 + heads)
    kv_nope = torch.randn(tokens, heads, stock.NOPE + stock.V, generator=generator).to(dtype)
    return kv_nope, torch.randn(tokens, 1, stock.ROPE, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(0, 12), (3, 0), (1, 1), (5, 3)])
def test_pack_is_the_concatenation(
    tokens: int, heads: int, dtype: torch.dtype, *, use_fp8: bool
) -> None:
    kv_nope, k_pe = operands(tokens, heads, dtype)
    k, v = stock.kv_pack(kv_nope, k_pe, use_fp8)
    if use_fp8:
        kv_nope, k_pe = (x.to(torch.float8_e4m3fn) for x in (kv_nope, k_pe))
    whole = torch.cat([kv_nope[..., :128], k_pe.expand(tokens, heads, 64)], -1)
    assert k.shape == (tokens, heads, 192)
    assert v.shape == (tokens, heads, 128)
    assert k.is_contiguous()
    assert torch.equal(k.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(
        v.contiguous().view(torch.uint8), kv_nope[..., 128:].contiguous().view(torch.uint8)
    )


def test_v_is_a_view_of_kv_nope_in_16_bit() -> None:
    kv_nope, k_pe = operands(4, 2, torch.bfloat16)
    _, v = stock.kv_pack(kv_nope, k_pe, use_fp8=False)
    assert v.data_ptr() == kv_nope[..., 128:].data_ptr()
    assert v.stride() == kv_nope.stride()


def test_v_is_strided_in_fp8_too() -> None:
    _, v = stock.kv_pack(*operands(4, 2, torch.bfloat16), use_fp8=True)
    assert v.stride() == (512, 256, 1)


def test_fp8_rope_bytes_pass_through() -> None:
    kv_nope, _ = operands(256, 2, torch.float16)
    k_pe = torch.arange(256, dtype=torch.uint8).repeat(64).view(64, 256).T.contiguous()
    k_pe = k_pe.view(256, 1, 64).view(torch.float8_e4m3fn)
    k, _ = stock.kv_pack(kv_nope, k_pe, use_fp8=True)
    assert torch.equal(k[:, 1, 128:].view(torch.uint8), k_pe[:, 0].view(torch.uint8))


def test_operands_stay_as_they_are() -> None:
    kv_nope, k_pe = operands(3, 2, torch.float16)
    before = kv_nope.clone(), k_pe.clone()
    stock.kv_pack(kv_nope, k_pe, use_fp8=True)
    assert torch.equal(kv_nope, before[0])
    assert torch.equal(k_pe, before[1])


def test_other_columns_are_refused() -> None:
    with pytest.raises(RuntimeError):
        stock.kv_pack(torch.zeros(2, 2, 255), torch.zeros(2, 1, 64), use_fp8=False)
