"""The op pair ``k3insert``: the key of new tokens, and their entries in the paged cache.

::

    k [T, H, 192] = [k_nope | k_pe]
    kv_cache[slot // block, slot % block] = [kv_c | k_pe]    for each token with slot >= 0

Elements are moved and never converted. The slot mapping follows from the point
(``k3insert.slots``): it has to be a mapping, so it can't be an operand of any bits.

Domain: bf16 and fp16, any T, H from 1 up, any pitches and bases of ``q``, ``k_nope`` and ``k_pe``
that are multiples of 16 bytes. ``kv_c`` and the cache are contiguous, as vLLM's op demands; the
suite sees them as rows of elements without pitches. Not in it: rotary embedding, quantised caches,
and two tokens with one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from k3insert import slots, stock
from k3insert.faults.catalogue import FAULTS, HARMLESS
from k3insert.row_pair import PROJECTION, RowPair
from kvpack.spec import Candidate, Dim, Fault, Operand, Output, Point

KV_COLUMNS = stock.NOPE + stock.V


def _load_stock(device: str, library: str | None) -> Callable[..., Any]:
    del device, library
    return stock.insert


def _load_vllm(device: str, library: str | None) -> Callable[..., Any]:
    from k3insert import vllm_op

    return vllm_op.load(device, library)


def _load_cache_op(device: str, library: str | None) -> Callable[..., Any]:
    from k3insert import vllm_op

    return vllm_op.load_cache_op(device, library)


def _load_triton(device: str, library: str | None) -> Callable[..., Any]:
    from k3insert import triton_insert

    return triton_insert.load(device, library)


def _triton_launches() -> int:
    from k3insert import triton_insert

    return triton_insert.launches()


class K3Insert(RowPair):
    """The stock statements and the kernels that claim their bytes."""

    name = "k3insert"
    dims: Mapping[str, Dim] = {
        "T": Dim(0, 16_384, (1, 17, 1_024, 8_192, 16_384)),
        "H": Dim(1, 128, (8, 12, 16, 24)),
    }
    axes: Mapping[str, Sequence[int | str]] = {
        "dtype": ("bf16", "fp16", "fp32"),
        "slots": tuple(slots.BLOCK_SIZES),
    }
    domain_axes: Mapping[str, Sequence[int | str]] = {
        "dtype": ("bf16", "fp16"),
        "slots": tuple(slots.BLOCK_SIZES),
    }
    candidates: Mapping[str, Candidate] = {
        c.name: c
        for c in (
            Candidate("stock", _load_stock),
            Candidate(
                "vllm",
                _load_vllm,
                devices=("cuda",),
                takes_library=True,
                evidence=(
                    "fused_kimi_k3_mla_key_concat_kv_cache_insert",
                    "KeyConcatKVCacheInsert",
                ),
            ),
            Candidate(
                "vllm_cache_op",
                _load_cache_op,
                devices=("cuda",),
                takes_library=True,
                evidence=("concat_and_cache_mla",),
            ),
            Candidate(
                "triton",
                _load_triton,
                cpu_environment={"TRITON_INTERPRET": "1"},
                evidence=("_insert",),
                rows_per_second=10_000.0,
                executions=_triton_launches,
            ),
        )
    }
    faults: Sequence[Fault] = FAULTS
    harmless: Sequence[Fault] = HARMLESS

    def _cache_shape(self, point: Point) -> tuple[int, int, int]:
        kind = point["slots"]
        return slots.blocks(int(point["T"]), kind), slots.BLOCK_SIZES[kind], stock.ENTRY

    def operands(self, point: Point) -> Sequence[Operand]:
        """Return ``q``, ``kv_nope`` (k_nope is half of it), ``k_pe``, ``kv_c`` and ``kv_cache``."""
        t, h, dtype = point["T"], point["H"], point["dtype"]
        return (
            Operand("q", (t, h, stock.NOPE + stock.ROPE), dtype),
            Operand("kv_nope", (t, h, KV_COLUMNS), dtype),
            Operand("k_pe", (t, 1, stock.ROPE), dtype, layouts=(PROJECTION,)),
            Operand("kv_c", (t * stock.LATENT,), dtype),
            Operand("kv_cache", (prod(self._cache_shape(point)),), dtype, mutable=True),
        )

    def outputs(self, point: Point) -> Sequence[Output]:
        """Return ``k [T, H, 192]``."""
        shape = (point["T"], point["H"], stock.NOPE + stock.ROPE)
        parts = {"nope": (0, stock.NOPE), "rope": (stock.NOPE, shape[2])}
        return (Output("k", shape, point["dtype"], ("token", "head", "column"), parts),)

    def bytes_moved(self, point: Point) -> int:
        """Return the fewest bytes that pass through memory, if every token has a slot."""
        row = 2 * stock.NOPE + stock.ROPE
        token = stock.ROPE + stock.LATENT + stock.ENTRY
        return int(2 * (row * self.rows(point) + token * point["T"]))

    def rows_per_pass(self, multiprocessors: int) -> Sequence[int]:
        """Return the block of 16 rows; how vLLM's launch goes on isn't known."""
        del multiprocessors
        return (16,)

    def call(
        self,
        kernel: Callable[..., Any],
        tensors: Mapping[str, Any],
        point: Point,
        out: Mapping[str, Any] | None,
    ) -> Mapping[str, Any]:
        """Call ``kernel(q, k_nope, k_pe, kv_c, kv_cache, slot_mapping)``."""
        del out
        cache = tensors["kv_cache"].view(self._cache_shape(point))
        mapping = slots.tensor(int(point["T"]), point["slots"], cache.device)
        k_nope = tensors["kv_nope"][..., : stock.NOPE]
        kv_c = tensors["kv_c"].view(int(point["T"]), stock.LATENT)
        return {"k": kernel(tensors["q"], k_nope, tensors["k_pe"], kv_c, cache, mapping)}

    def beside(self, point: Point, device: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return what calls share beside the operands: each tensor, and what it must hold."""
        mapping = slots.kept(int(point["T"]), point["slots"], device)
        return {"slot_mapping": mapping}

    def reference(self, tensors: Mapping[str, Any], point: Point) -> Mapping[str, Any]:
        """Run the stock statements."""
        return self.call(stock.insert, tensors, point, None)

    def oracle(
        self, inputs: Mapping[str, Any], point: Point
    ) -> Mapping[str, np.ndarray[Any, Any]] | None:
        """Move the bits: the key, and the cache as it has to be afterwards."""
        cache = inputs["kv_cache"].copy().reshape(-1, stock.ENTRY)
        slot = slots.mapping(int(point["T"]), point["slots"])
        stored = np.flatnonzero(slot != slots.PADDING)
        cache[slot[stored], : stock.LATENT] = inputs["kv_c"].reshape(-1, stock.LATENT)[stored]
        cache[slot[stored], stock.LATENT :] = inputs["k_pe"][stored, 0]
        return {**self.layout(inputs, point), "kv_cache": cache.reshape(-1)}

    def layout(self, inputs: Mapping[str, Any], point: Point) -> Mapping[str, np.ndarray[Any, Any]]:
        """Move input elements to where ``k`` has them."""
        del point
        nope, pe = inputs["kv_nope"][..., : stock.NOPE], inputs["k_pe"]
        rope = np.broadcast_to(pe, (*nope.shape[:2], pe.shape[2]))
        return {"k": np.concatenate([nope, rope], axis=-1)}


PAIR = K3Insert()
