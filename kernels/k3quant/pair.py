"""The op pair ``k3quant``: q, k and v in e4m3, and the new tokens' entries in the fp8 cache.

::

    q8 [T, H, 192] = e4m3(q * q_inv)        k8 [T, H, 192] = e4m3([k_nope | k_pe] * k_inv)
    v8 [T, H, 128] = e4m3(v * v_inv)
    kv_cache[slot // block, slot % block] = e4m3([kv_c | k_pe] * cache_inv)   where slot >= 0

With positions the last 64 columns of q, and k_pe, are rotated in float32 first.

Domain: bf16 and fp16, any T, H from 1 up, any pitches and bases of q, kv_nope and k_pe that are
multiples of 16 bytes, of the cache of 8; ``kv_c`` contiguous; scales one, powers of two and others;
no rotation, or one whose table has multiples of 2^-8 (``k3common.positions``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from k3common import model, positions
from k3common.launches import launches
from k3insert import slots
from k3insert.row_pair import PROJECTION, RowPair
from k3insert.stock import ENTRY, LATENT, NOPE, ROPE
from k3quant import stock
from k3quant.faults.catalogue import FAULTS, HARMLESS
from kvpack.spec import Candidate, Dim, Fault, Operand, Output, Point

QK = NOPE + ROPE
KV_COLUMNS = 2 * NOPE

COMBINATIONS = (
    ("bf16", "in_order", "one", "off"),
    ("bf16", "scattered", "power", "off"),
    ("bf16", "padded", "odd", "gptj"),
    ("fp16", "scattered", "odd", "gptj"),
    ("fp32", "in_order", "one", "off"),
)
"""Dtype, slots, scales and rotation that go together: each value, not every combination."""


def _load_stock(device: str, library: str | None) -> Callable[..., Any]:
    del device, library
    return stock.quantise_and_insert


def _load_vllm(device: str, library: str | None) -> Callable[..., Any]:
    from k3quant import vllm_op

    return vllm_op.load(device, library)


def _load_integer(device: str, library: str | None) -> Callable[..., Any]:
    from k3common import integer
    from k3quant.faults.kernel import Quant

    del device, library
    return Quant(quantise=integer.quantise)


def _load_triton(device: str, library: str | None) -> Callable[..., Any]:
    from k3quant import triton_quant

    return triton_quant.load(device, library)


class K3Quant(RowPair):
    """The statements and the kernels that claim their bytes."""

    name = "k3quant"
    dims: Mapping[str, Dim] = {
        "T": Dim(0, 16_384, (1, 17, 1_024, 8_192, 16_384)),
        "H": Dim(1, 128, (8, 12, 16, 24)),
    }
    axes: Mapping[str, Sequence[int | str]] = {
        "dtype": ("bf16", "fp16", "fp32"),
        "slots": tuple(slots.BLOCK_SIZES),
        "scales": tuple(positions.SCALES),
        "rope": ("off", "gptj"),
    }
    combinations = COMBINATIONS
    domain_axes: Mapping[str, Sequence[int | str]] = {**axes, "dtype": ("bf16", "fp16")}
    candidates: Mapping[str, Candidate] = {
        c.name: c
        for c in (
            Candidate("stock", _load_stock),
            Candidate(
                "vllm",
                _load_vllm,
                devices=("cuda",),
                takes_library=True,
                evidence=("fused_kimi_k3_mla_qkv_quant", "QKVQuantKVCacheFp8"),
            ),
            Candidate("integer", _load_integer, devices=("cpu",)),
            Candidate(
                "triton",
                _load_triton,
                devices=("cuda",),
                evidence=("_k3_rows",),
                executions=launches,
            ),
        )
    }
    faults: Sequence[Fault] = FAULTS
    harmless: Sequence[Fault] = HARMLESS

    def operands(self, point: Point) -> Sequence[Operand]:
        """Return q, kv_nope (k_nope and v are its halves), k_pe, kv_c and kv_cache."""
        t, h, dtype, kind = point["T"], point["H"], point["dtype"], point["slots"]
        cache = (slots.blocks(int(t), kind), slots.BLOCK_SIZES[kind], ENTRY)
        return (
            Operand("q", (t, h, QK), dtype),
            Operand("kv_nope", (t, h, KV_COLUMNS), dtype),
            Operand("k_pe", (t, 1, ROPE), dtype, layouts=(PROJECTION,)),
            Operand("kv_c", (t * LATENT,), dtype),
            Operand("kv_cache", cache, "e4m3", align_bytes=8, mutable=True),
        )

    def outputs(self, point: Point) -> Sequence[Output]:
        """Return q8, k8 and v8."""
        shape, axes = (point["T"], point["H"], QK), ("token", "head", "column")
        parts = {"nope": (0, NOPE), "rope": (NOPE, QK)}
        return (
            Output("q8", shape, "e4m3", axes, parts),
            Output("k8", shape, "e4m3", axes, parts),
            Output("v8", (*shape[:2], NOPE), "e4m3", axes),
        )

    def bytes_moved(self, point: Point) -> int:
        """Return the fewest bytes that pass through memory, if every token has a slot."""
        row = 2 * (QK + KV_COLUMNS) + QK + QK + NOPE
        token = 2 * (ROPE + LATENT) + ENTRY
        return int(row * self.rows(point) + token * point["T"])

    def rows_per_pass(self, multiprocessors: int) -> Sequence[int]:
        """Return the 8 rows of a block of vLLM's launch, which has no pass."""
        del multiprocessors
        return (8,)

    def call(
        self,
        kernel: Callable[..., Any],
        tensors: Mapping[str, Any],
        point: Point,
        out: Mapping[str, Any] | None,
    ) -> Mapping[str, Any]:
        """Call the kernel as ``stock.quantise_and_insert`` is called."""
        del out
        tokens, cache = int(point["T"]), tensors["kv_cache"]
        mapping = slots.tensor(tokens, point["slots"], cache.device)
        scales = positions.scales(point["scales"], cache.device)
        turn = positions.on_device(tokens, point["rope"], cache.device)
        k_nope, v = tensors["kv_nope"].split([NOPE, NOPE], dim=-1)
        kv_c = tensors["kv_c"].view(tokens, LATENT)
        q, k_pe = tensors["q"], tensors["k_pe"]
        q8, k8, v8 = kernel(q, k_nope, k_pe, kv_c, v, cache, mapping, scales, *turn)
        return {"q8": q8, "k8": k8, "v8": v8}

    def beside(self, point: Point, device: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return what calls share beside the operands: each tensor, and what it must hold."""
        mapping = slots.kept(int(point["T"]), point["slots"], device)
        more = positions.kept(int(point["T"]), point["rope"], device, point["scales"])
        return {"slot_mapping": mapping, **more}

    def reference(self, tensors: Mapping[str, Any], point: Point) -> Mapping[str, Any]:
        """Run the statements."""
        return self.call(stock.quantise_and_insert, tensors, point, None)

    def oracle(
        self, inputs: Mapping[str, Any], point: Point
    ) -> Mapping[str, np.ndarray[Any, Any]] | None:
        """Return the bytes of q8, k8 and v8, and the cache as it has to be afterwards."""
        dtype, scales = point["dtype"], positions.SCALES[point["scales"]]
        moved = self.layout(inputs, point)
        made = {
            name: model.quantise_bits(moved[name], dtype, s)
            for name, s in zip(("q8", "k8", "v8"), scales, strict=False)
        }
        slot = slots.mapping(int(point["T"]), point["slots"])
        latent = inputs["kv_c"].reshape(-1, LATENT)
        entries = model.quantise_bits(
            np.concatenate((latent, inputs["k_pe"][:, 0]), axis=1), dtype, scales[3]
        )
        if point["rope"] != "off":
            turned = model.rotate(inputs["k_pe"], dtype)
            made["q8"][..., NOPE:] = model.quantise(
                model.rotate(inputs["q"][..., NOPE:], dtype), scales[0]
            )
            made["k8"][..., NOPE:] = model.quantise(turned, scales[1])
            entries[:, LATENT:] = model.quantise(turned[:, 0], scales[3])
        return {**made, "kv_cache": model.place(inputs["kv_cache"], entries, slot)}

    def layout(self, inputs: Mapping[str, Any], point: Point) -> Mapping[str, np.ndarray[Any, Any]]:
        """Move input elements to where the outputs and the cache have them."""
        nope, pe = inputs["kv_nope"][..., :NOPE], inputs["k_pe"]
        rope = np.broadcast_to(pe, (*nope.shape[:2], ROPE))
        moved = {
            "q8": inputs["q"],
            "k8": np.concatenate((nope, rope), axis=-1),
            "v8": inputs["kv_nope"][..., NOPE:],
        }
        cache, latent = inputs["kv_cache"], inputs["kv_c"].reshape(-1, LATENT)
        if cache.dtype == latent.dtype:  # of places: elements of the two are of two types
            slot = slots.mapping(int(point["T"]), point["slots"])
            entries = np.concatenate((latent, pe[:, 0]), axis=1)
            moved["kv_cache"] = model.place(cache, entries, slot)
        return moved


PAIR = K3Quant()
