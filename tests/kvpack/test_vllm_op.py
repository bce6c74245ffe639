"""vLLM's op: where it can't run it says why; where it can, its bytes are the stock tail's."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from kvpack import oracle, stock, vllm_op
from kvpack.spec import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = os.environ.get("BYTEGATE_VLLM_LIBRARY")


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Get past the check for a device, to those behind it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_op, "_registered", lambda: False)


def test_only_on_cuda() -> None:
    with pytest.raises(Unavailable, match="a CUDA kernel only, not one for cpu"):
        vllm_op.load("cpu")


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        vllm_op.load("cuda")


@pytest.mark.usefixtures("_cuda")
def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="vLLM is not installed"):
        vllm_op.load("cuda:0")


@pytest.mark.usefixtures("_cuda")
def test_a_vllm_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(Unavailable, match="expected a CUDA build"):
        vllm_op.load("cuda")


@pytest.mark.usefixtures("_cuda")
def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no library .*missing\.so"):
        vllm_op.load("cuda", str(tmp_path / "missing.so"))


@pytest.mark.usefixtures("_cuda")
def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / vllm_op.LIBRARY
    path.write_bytes(b"not one")
    with pytest.raises(Unavailable, match="does not load") as caught:
        vllm_op.load("cuda", str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_cuda")
def test_a_library_without_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / vllm_op.LIBRARY
    path.touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    with pytest.raises(Unavailable, match=r"has no op _C\.fused_kimi_k3_mla_kv_concat"):
        vllm_op.load("cuda", str(path))


@pytest.mark.parametrize("use_fp8", [False, True])
def test_the_wrapper_around_an_op_written_in_torch(
    monkeypatch: pytest.MonkeyPatch, *, use_fp8: bool
) -> None:
    class Ops:
        @staticmethod
        def fused_kimi_k3_mla_kv_concat(
            k_nope: torch.Tensor, k_pe: torch.Tensor, k_out: torch.Tensor
        ) -> None:
            assert k_pe.ndim == 2
            k_out[..., :128] = k_nope.to(k_out.dtype)
            k_out[..., 128:] = k_pe[:, None].to(k_out.dtype)

        @classmethod
        def fused_kimi_k3_mla_kv_concat_quant_fp8(
            cls,
            k_nope: torch.Tensor,
            k_pe: torch.Tensor,
            v: torch.Tensor,
            k_fp8: torch.Tensor,
            v_fp8: torch.Tensor,
        ) -> None:
            cls.fused_kimi_k3_mla_kv_concat(k_nope, k_pe, k_fp8)
            v_fp8.copy_(v.to(v_fp8.dtype))

    monkeypatch.setattr(torch.ops, "_C", Ops, raising=False)
    for tokens in (0, 5):
        kv_nope = torch.randn(tokens, 3, 256).bfloat16()
        k_pe = torch.randn(tokens, 1, 64).bfloat16()
        got = vllm_op.kv_pack(kv_nope, k_pe, use_fp8)
        for ours, theirs in zip(got, stock.kv_pack(kv_nope, k_pe, use_fp8), strict=True):
            assert torch.equal(
                ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
            )
        assert got[0].is_contiguous()
        assert got[1].is_contiguous() is (use_fp8 or tokens == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("use_fp8", [False, True])
def test_every_pattern_on_cuda(dtype: str, *, use_fp8: bool) -> None:
    try:
        pack = vllm_op.load("cuda", LIBRARY)
    except Unavailable as reason:
        pytest.skip(f"{reason} (BYTEGATE_VLLM_LIBRARY)")
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    kv_nope = patterns.view(256, 1, 256).view(kind).repeat(4, 1, 1)
    k_pe = patterns.view(1024, 1, 64).view(kind)
    k, v = pack(kv_nope.cuda(), k_pe.cuda(), use_fp8)
    torch.cuda.synchronize()
    storage = torch.uint8 if use_fp8 else torch.uint16
    want_k, want_v = oracle.pack(
        kv_nope.view(torch.uint16).numpy(),
        k_pe.view(torch.uint16).numpy(),
        dtype=dtype,
        fp8=use_fp8,
    )
    for got, want in ((k, want_k), (v, want_v)):
        found = got.cpu().contiguous().view(storage)
        # The hardware's NaN has no sign: 7F where the oracle, like torch, keeps FF.
        expected = torch.from_numpy(want)
        if use_fp8:
            expected = torch.where(expected == 0xFF, torch.tensor(0x7F, dtype=storage), expected)
        assert torch.equal(found, expected)
