"""The op pair ``dsmla``: the key of new tokens, and their entries in an ``fp8_ds_mla`` cache.

::

    k [T, H, 192] = [k_nope | k_pe]
    kv_cache[slot // block, slot % block] =
        [e4m3(kv_c / scale): 512 bytes | scales: 4 float32 | k_pe: 64 of 16 bits]   where slot >= 0

A scale is a power of two for each 128 columns (``k3common.arithmetic.tile_scales``). With
positions k_pe, and the last 64 columns of q in place, are rotated in float32 and rounded.

Domain: bf16 and fp16, any T, H from 1 up, any pitches and bases that are multiples of 16 bytes,
the cache's included; ``kv_c`` contiguous; with and without rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dsmla import stock
from dsmla.faults.catalogue import FAULTS, HARMLESS
from k3common import model, positions
from k3common.arithmetic import DS_ENTRY
from k3common.launches import launches
from k3insert import slots
from k3insert.row_pair import PROJECTION, RowPair
from k3insert.stock import LATENT, NOPE, ROPE
from kvpack.spec import Candidate, Dim, Fault, Operand, Output, Point

QK = NOPE + ROPE
KV_COLUMNS = 2 * NOPE

COMBINATIONS = (
    ("bf16", "in_order", "off"),
    ("bf16", "padded", "gptj"),
    ("bf16", "scattered", "off"),
    ("fp16", "scattered", "gptj"),
    ("fp32", "in_order", "off"),
)
"""Dtype, slots and rotation that go together: each value of each, not every combination."""


def _load_stock(device: str, library: str | None) -> Callable[..., Any]:
    del device, library
    return stock.concat_and_insert


def _load_vllm(device: str, library: str | None) -> Callable[..., Any]:
    from dsmla import vllm_op

    return vllm_op.load(device, library)


def _load_cache_op(device: str, library: str | None) -> Callable[..., Any]:
    from dsmla import vllm_op

    return vllm_op.load_cache_op(device, library)


def _load_integer(device: str, library: str | None) -> Callable[..., Any]:
    from dsmla.faults.kernel import Insert
    from k3common import integer

    del device, library
    return Insert(entries=integer.ds_entries)


def _load_triton(device: str, library: str | None) -> Callable[..., Any]:
    from dsmla import triton_insert

    return triton_insert.load(device, library)


def scale_of_words(inputs: Mapping[str, Any], point: Point) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return the cache whose scales come from fp16 words read as integers, for the ledger."""
    dtype, rope = point["dtype"], inputs["k_pe"]
    if point["rope"] != "off":
        rope = model.turned(rope, dtype)
    latent = inputs["kv_c"].reshape(-1, LATENT)
    slot = slots.mapping(int(point["T"]), point["slots"])
    entries = model.ds_entries_of_words(latent, rope[:, 0])
    return {"kv_cache": model.place(inputs["kv_cache"], entries, slot)}


class DsMla(RowPair):
    """The statements and the kernels that claim their bytes."""

    name = "dsmla"
    dims: Mapping[str, Dim] = {
        "T": Dim(0, 16_384, (1, 17, 1_024, 8_192, 16_384)),
        "H": Dim(1, 128, (8, 12, 16, 24)),
    }
    axes: Mapping[str, Sequence[int | str]] = {
        "dtype": ("bf16", "fp16", "fp32"),
        "slots": tuple(slots.BLOCK_SIZES),
        "rope": ("off", "gptj"),
    }
    combinations = COMBINATIONS
    domain_axes: Mapping[str, Sequence[int | str]] = {**axes, "dtype": ("bf16", "fp16")}
    variants: Mapping[str, Callable[..., Any]] = {"scale_of_words": scale_of_words}
    candidates: Mapping[str, Candidate] = {
        c.name: c
        for c in (
            Candidate("stock", _load_stock),
            Candidate(
                "vllm",
                _load_vllm,
                devices=("cuda",),
                takes_library=True,
                evidence=("fused_kimi_k3_mla_key_concat_ds_mla", "KeyConcatDsMla"),
            ),
            Candidate(
                "vllm_cache_op",
                _load_cache_op,
                devices=("cuda",),
                takes_library=True,
                evidence=("concat_and_cache",),
            ),
            Candidate("integer", _load_integer, devices=("cpu",)),
            Candidate(
                "triton",
                _load_triton,
                devices=("cuda",),
                evidence=("_k3_ds_rows",),
                executions=launches,
            ),
        )
    }
    faults: Sequence[Fault] = FAULTS
    harmless: Sequence[Fault] = HARMLESS

    def operands(self, point: Point) -> Sequence[Operand]:
        """Return q, kv_nope (k_nope is half of it), k_pe, kv_c and kv_cache."""
        t, h, dtype, kind = point["T"], point["H"], point["dtype"], point["slots"]
        cache = (slots.blocks(int(t), kind), slots.BLOCK_SIZES[kind], DS_ENTRY)
        return (
            Operand("q", (t, h, QK), dtype, mutable=True),
            Operand("kv_nope", (t, h, KV_COLUMNS), dtype),
            Operand("k_pe", (t, 1, ROPE), dtype, layouts=(PROJECTION,)),
            Operand("kv_c", (t * LATENT,), dtype),
            Operand("kv_cache", cache, "u8", mutable=True),
        )

    def outputs(self, point: Point) -> Sequence[Output]:
        """Return k."""
        shape, axes = (point["T"], point["H"], QK), ("token", "head", "column")
        return (Output("k", shape, point["dtype"], axes, {"nope": (0, NOPE), "rope": (NOPE, QK)}),)

    def bytes_moved(self, point: Point) -> int:
        """Return the fewest bytes that pass through memory, if every token has a slot."""
        turned = 4 * ROPE if point["rope"] != "off" else 0
        token = 2 * (ROPE + LATENT) + DS_ENTRY
        return int((2 * (NOPE + QK) + turned) * self.rows(point) + token * point["T"])

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
        """Call the kernel as ``stock.concat_and_insert`` is called."""
        del out
        tokens, cache = int(point["T"]), tensors["kv_cache"]
        made = kernel(
            tensors["q"],
            tensors["kv_nope"][..., :NOPE],
            tensors["k_pe"],
            tensors["kv_c"].view(tokens, LATENT),
            cache,
            slots.tensor(tokens, point["slots"], cache.device),
            *positions.on_device(tokens, point["rope"], cache.device),
        )
        return {"k": made}

    def beside(self, point: Point, device: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return what calls share beside the operands: each tensor, and what it must hold."""
        mapping = slots.kept(int(point["T"]), point["slots"], device)
        more = positions.kept(int(point["T"]), point["rope"], device, None)
        return {"slot_mapping": mapping, **more}

    def reference(self, tensors: Mapping[str, Any], point: Point) -> Mapping[str, Any]:
        """Run the statements."""
        return self.call(stock.concat_and_insert, tensors, point, None)

    def oracle(
        self, inputs: Mapping[str, Any], point: Point
    ) -> Mapping[str, np.ndarray[Any, Any]] | None:
        """Return the bits of k, and q and the cache as they have to be afterwards."""
        dtype, q, rope = point["dtype"], inputs["q"].copy(), inputs["k_pe"]
        if point["rope"] != "off":
            rope = model.turned(rope, dtype)
            q[..., NOPE:] = model.turned(q[..., NOPE:], dtype)
        nope = inputs["kv_nope"][..., :NOPE]
        shared = np.broadcast_to(rope, (*nope.shape[:2], ROPE))
        latent = inputs["kv_c"].reshape(-1, LATENT)
        entries = model.ds_entries(latent, rope[:, 0], dtype)
        slot = slots.mapping(int(point["T"]), point["slots"])
        return {
            "k": np.concatenate((nope, shared), axis=-1),
            "q": q,
            "kv_cache": model.place(inputs["kv_cache"], entries, slot),
        }

    def layout(self, inputs: Mapping[str, Any], point: Point) -> Mapping[str, np.ndarray[Any, Any]]:
        """Move input elements to where k has them."""
        del point
        nope, pe = inputs["kv_nope"][..., :NOPE], inputs["k_pe"]
        rope = np.broadcast_to(pe, (*nope.shape[:2], ROPE))
        return {"k": np.concatenate((nope, rope), axis=-1)}


PAIR = DsMla()
