"""The op pair ``k3decode``: the latent query of decode tokens, and their entries in the cache.

::

    mqa_q [T, H, 576] = f([ql_nope | q_pe])
    kv_cache[slot // block, slot % block] = g([kv_c | k_pe])    where slot >= 0

``f`` and ``g`` follow from the format of the cache: nothing is converted in ``auto``; both are e4m3
of a scaled value in ``fp8``; in ``ds_mla`` the entry has 656 bytes (``k3common.arithmetic``).

Domain: bf16 and fp16, any T, H from 1 up, any pitches and bases of the query's parts, of k_pe and
of the cache that are multiples of 16 bytes; ``kv_c`` contiguous; with and without rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from k3common import model, positions
from k3common.arithmetic import DS_ENTRY
from k3common.launches import launches
from k3decode import stock
from k3decode.faults.catalogue import FAULTS, HARMLESS
from k3insert import slots
from k3insert.row_pair import PROJECTION, RowPair
from k3insert.stock import ENTRY, LATENT, NOPE, ROPE
from kvpack.spec import Candidate, Dim, Fault, Operand, Output, Point

QK = NOPE + ROPE
SPLIT = 64
"""Tokens up to which vLLM's launch gives a row three warps."""

COMBINATIONS = (
    ("bf16", "auto", "in_order", "one", "off"),
    ("bf16", "auto", "scattered", "one", "gptj"),
    ("bf16", "fp8", "padded", "odd", "off"),
    ("bf16", "fp8", "scattered", "power", "gptj"),
    ("bf16", "ds_mla", "padded", "one", "gptj"),
    ("bf16", "ds_mla", "scattered", "one", "off"),
    ("fp16", "fp8", "in_order", "odd", "gptj"),
    ("fp32", "auto", "in_order", "one", "off"),
)
"""Dtype, format, slots, scales and rotation that go together: each value, not every combination."""


def _load_stock(device: str, library: str | None) -> Callable[..., Any]:
    del device, library
    return stock.concat_and_insert


def _load_vllm(device: str, library: str | None) -> Callable[..., Any]:
    from k3decode import vllm_op

    return vllm_op.load(device, library)


def _load_integer(device: str, library: str | None) -> Callable[..., Any]:
    from k3common import integer
    from k3decode.faults.kernel import Decode

    del device, library
    return Decode(quantise=integer.quantise)


def _load_triton(device: str, library: str | None) -> Callable[..., Any]:
    from k3decode import triton_decode

    return triton_decode.load(device, library)


def race(inputs: Mapping[str, Any], point: Point) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return the cache as it was before the call, masked where entries go, for the ledger.

    What is stored too early is taken away by the late write, or made of operands that it hasn't
    reached yet, or both in parts: any bytes will do in an entry's place, and nowhere else.
    """
    cache = inputs["kv_cache"]
    rows = np.zeros(cache.shape[0] * cache.shape[1], dtype=bool)
    slot = slots.mapping(point["T"], point["slots"])
    rows[slot[slot != slots.PADDING]] = True
    places = np.broadcast_to(rows.reshape(*cache.shape[:2], 1), cache.shape)
    made: np.ma.MaskedArray[Any, Any] = np.ma.masked_array(cache, mask=places)  # type: ignore[no-untyped-call]
    return {"kv_cache": made}


class K3Decode(RowPair):
    """The statements and the kernels that claim their bytes."""

    name = "k3decode"
    dims: Mapping[str, Dim] = {
        "T": Dim(0, 4_096, (1, 8, 64, 65, 256, 512, 1_024)),
        "H": Dim(1, 128, (8, 12, 16, 24, 96)),
    }
    axes: Mapping[str, Sequence[int | str]] = {
        "dtype": ("bf16", "fp16", "fp32"),
        "cache": stock.FORMATS,
        "slots": tuple(slots.BLOCK_SIZES),
        "scales": tuple(positions.SCALES),
        "rope": ("off", "gptj"),
    }
    combinations = COMBINATIONS
    domain_axes: Mapping[str, Sequence[int | str]] = {**axes, "dtype": ("bf16", "fp16")}
    variants: Mapping[str, Callable[..., Any]] = {"race": race}
    candidates: Mapping[str, Candidate] = {
        c.name: c
        for c in (
            Candidate("stock", _load_stock),
            Candidate(
                "vllm",
                _load_vllm,
                devices=("cuda",),
                takes_library=True,
                evidence=("fused_kimi_k3_mla_decode", "DecodeQConcat"),
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
        """Return ql_nope, q_pe, kv_c, k_pe and kv_cache."""
        t, h, dtype, kind = point["T"], point["H"], point["dtype"], point["slots"]
        by_head = ((LATENT, max(t, 1) * LATENT, 1), 0)  # a bmm's result, transposed back
        sliced = ((max(h, 1) * QK, QK, 1), 2 * NOPE)
        stored, columns = {
            "auto": (dtype, ENTRY),
            "fp8": ("e4m3", ENTRY),
            "ds_mla": ("u8", DS_ENTRY),
        }[point["cache"]]
        cache = (slots.blocks(int(t), kind), slots.BLOCK_SIZES[kind], columns)
        return (
            Operand("ql_nope", (t, h, LATENT), dtype, layouts=(by_head,)),
            Operand("q_pe", (t, h, ROPE), dtype, layouts=(sliced,)),
            Operand("kv_c", (t * LATENT,), dtype),
            Operand("k_pe", (t, 1, ROPE), dtype, layouts=(PROJECTION,)),
            Operand("kv_cache", cache, stored, mutable=True),
        )

    def outputs(self, point: Point) -> Sequence[Output]:
        """Return mqa_q."""
        shape = (point["T"], point["H"], ENTRY)
        dtype = "e4m3" if point["cache"] == "fp8" else point["dtype"]
        parts = {"latent": (0, LATENT), "rope": (LATENT, ENTRY)}
        return (Output("mqa_q", shape, dtype, ("token", "head", "column"), parts),)

    def bytes_moved(self, point: Point) -> int:
        """Return the fewest bytes that pass through memory, if every token has a slot."""
        narrow = 1 if point["cache"] == "fp8" else 2
        entry = DS_ENTRY if point["cache"] == "ds_mla" else narrow * ENTRY
        row = (2 + narrow) * ENTRY
        return int(row * self.rows(point) + (2 * ENTRY + entry) * point["T"])

    def rows_per_pass(self, multiprocessors: int) -> Sequence[int]:
        """Return the 8 rows of a block of vLLM's launch, and the tokens at which it changes."""
        del multiprocessors
        return (8, SPLIT)

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
            tensors["ql_nope"],
            tensors["q_pe"],
            tensors["kv_c"].view(tokens, LATENT),
            tensors["k_pe"],
            cache,
            slots.tensor(tokens, point["slots"], cache.device),
            point["cache"],
            positions.scales(point["scales"], cache.device),
            *positions.on_device(tokens, point["rope"], cache.device),
        )
        return {"mqa_q": made}

    def beside(self, point: Point, device: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return what calls share beside the operands: each tensor, and what it must hold."""
        mapping = slots.kept(int(point["T"]), point["slots"], device)
        more = positions.kept(int(point["T"]), point["rope"], device, point["scales"])
        return {"slot_mapping": mapping, **more}

    def reference(self, tensors: Mapping[str, Any], point: Point) -> Mapping[str, Any]:
        """Run the statements."""
        return self.call(stock.concat_and_insert, tensors, point, None)

    def oracle(
        self, inputs: Mapping[str, Any], point: Point
    ) -> Mapping[str, np.ndarray[Any, Any]] | None:
        """Return the bits of mqa_q, and the cache as it has to be afterwards."""
        dtype, turn = point["dtype"], point["rope"] != "off"
        latent, pe = inputs["kv_c"].reshape(-1, LATENT), inputs["k_pe"]
        if point["cache"] == "fp8":
            scales = positions.SCALES[point["scales"]]
            mqa = model.quantise_row(inputs["ql_nope"], inputs["q_pe"], dtype, scales[0], turn=turn)
            made = model.quantise_row(latent[:, None], pe, dtype, scales[-1], turn=turn)[:, 0]
        else:
            q_pe = model.turned(inputs["q_pe"], dtype) if turn else inputs["q_pe"]
            rope = (model.turned(pe, dtype) if turn else pe)[:, 0]
            mqa = np.concatenate((inputs["ql_nope"], q_pe), axis=-1)
            if point["cache"] == "ds_mla":
                made = model.ds_entries(latent, rope, dtype)
            else:
                made = np.concatenate((latent, rope), axis=1)
        slot = slots.mapping(int(point["T"]), point["slots"])
        return {"mqa_q": mqa, "kv_cache": model.place(inputs["kv_cache"], made, slot)}

    def layout(self, inputs: Mapping[str, Any], point: Point) -> Mapping[str, np.ndarray[Any, Any]]:
        """Move input elements to where mqa_q, and the cache unless it is ds_mla, have them."""
        moved = {"mqa_q": np.concatenate((inputs["ql_nope"], inputs["q_pe"]), axis=-1)}
        cache, latent = inputs["kv_cache"], inputs["kv_c"].reshape(-1, LATENT)
        if point["cache"] != "ds_mla" and cache.dtype == latent.dtype:
            slot = slots.mapping(int(point["T"]), point["slots"])
            entries = np.concatenate((latent, inputs["k_pe"][:, 0]), axis=1)
            moved["kv_cache"] = model.place(cache, entries, slot)
        return moved


PAIR = K3Decode()
