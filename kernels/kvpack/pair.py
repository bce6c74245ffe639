"""The op pair ``kvpack``: operands, domain, reference, oracle and candidates in one object.

::

    k [T, H, 192] = [f(kv_nope[..., :128]) | f(k_pe)]     v [T, H, 128] = f(kv_nope[..., 128:])

``f`` casts to ``float8_e4m3fn`` with ``fp8``, and does nothing otherwise. A row is a (token, head).

Domain: bf16 and fp16, any T and H from 1 up, any pitches and bases that are multiples of
16 bytes (8 for fp8 ``k_pe``). Elsewhere a kernel may refuse, with an exception and
nothing written: float32, another rope width, mixed layouts off that alignment, fp8 ``k_pe``,
no heads at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpack import oracle, stock
from kvpack.classes import CLASSES
from kvpack.faults.catalogue import FAULTS, HARMLESS, SANITIZER
from kvpack.spec import Candidate, Dim, Fault, Operand, Output, Point

KV_COLUMNS = stock.NOPE + stock.V
WORKSPACE_COLUMNS = 576
"""Latent (512) and rope (64) columns of vLLM's gathered workspace, of which k_pe is a slice."""
ROWS_PER_SM = 128
"""vLLM's op: at most 8 blocks of 16 rows on each SM, then a grid-stride loop."""


def _load_stock(device: str, library: str | None) -> Callable[..., Any]:
    del device, library
    return stock.kv_pack


def _load_vllm(device: str, library: str | None) -> Callable[..., Any]:
    from kvpack import vllm_op

    return vllm_op.load(device, library)


def _load_triton(device: str, library: str | None) -> Callable[..., Any]:
    from kvpack import triton_pack

    return triton_pack.load(device, library)


def _load_inductor(device: str, library: str | None) -> Callable[..., Any]:
    from kvpack import inductor_pack

    return inductor_pack.load(device, library)


def _triton_launches() -> int:
    from kvpack import triton_pack

    return triton_pack.launches()


def _inductor_calls() -> int:
    from kvpack import inductor_pack

    return inductor_pack.compiled_calls()


class KVPack:
    """The stock K/V pack tail and the kernels that claim its bytes."""

    name = "kvpack"
    dims: Mapping[str, Dim] = {
        "T": Dim(0, 66_048, (1, 17, 1_409, 5_504, 16_384, 65_536, 66_048)),
        "H": Dim(1, 128, (8, 12, 16, 24, 128)),
    }
    axes: Mapping[str, Sequence[int | str]] = {
        "dtype": ("bf16", "fp16", "fp32"),
        "fp8": (0, 1),
        "pe": ("same", "e4m3"),
        "rope": (stock.ROPE, 32),
    }
    domain_axes: Mapping[str, Sequence[int | str]] = {
        "dtype": ("bf16", "fp16"),
        "fp8": (0, 1),
        "pe": ("same",),
        "rope": (stock.ROPE,),
    }
    classes = CLASSES
    models: Mapping[str, Callable[..., Any]] = {
        "triton_interpreter": lambda bits, dtype: oracle.interpreter_table(dtype)[bits],
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
                evidence=("fused_kimi_k3_mla_kv_concat", "mla_kv_concat"),
            ),
            Candidate(
                "triton",
                _load_triton,
                cpu_environment={"TRITON_INTERPRET": "1"},
                evidence=("_pack",),
                rows_per_second=20_000.0,
                executions=_triton_launches,
            ),
            Candidate(
                "inductor",
                _load_inductor,
                guard="out",
                executions=_inductor_calls,
            ),
        )
    }
    faults: Sequence[Fault] = FAULTS
    sanitizer_faults: Sequence[Fault] = SANITIZER
    harmless: Sequence[Fault] = HARMLESS

    def valid(self, point: Point) -> bool:
        """Whether a point can be called at all: e4m3 k_pe goes into an e4m3 key alone."""
        return not (point["pe"] == "e4m3" and not point["fp8"])

    def operands(self, point: Point) -> Sequence[Operand]:
        """Return ``kv_nope [T, H, 256]`` and ``k_pe [T, 1, 64]``."""
        t, h, rope, dtype = point["T"], point["H"], point["rope"], point["dtype"]
        pe = dtype if point["pe"] == "same" else "e4m3"
        size = 1 if pe == "e4m3" else 2
        slice_of_workspace = ((WORKSPACE_COLUMNS, rope, 1), 512 * size)
        return (
            Operand("kv_nope", (t, h, KV_COLUMNS), dtype, align_bytes=16),
            Operand(
                "k_pe",
                (t, 1, rope),
                pe,
                align_bytes=8 if pe == "e4m3" else 16,
                layouts=(slice_of_workspace,),
            ),
        )

    def outputs(self, point: Point) -> Sequence[Output]:
        """Return ``k [T, H, 192]`` and ``v [T, H, 128]``."""
        t, h, rope = point["T"], point["H"], point["rope"]
        dtype = "e4m3" if point["fp8"] else point["dtype"]
        axes = ("token", "head", "column")
        width = stock.NOPE + rope
        parts = {"nope": (0, stock.NOPE), "rope": (stock.NOPE, width)}
        return (
            Output("k", (t, h, width), dtype, axes, parts),
            Output("v", (t, h, stock.V), dtype, axes),
        )

    def rows(self, point: Point) -> int:
        """Return T * H."""
        return int(point["T"] * point["H"])

    def bytes_moved(self, point: Point) -> int:
        """Return the fewest bytes that pass through memory: each read once, each written once.

        In 16-bit mode v stays where it is, and its half of ``kv_nope`` isn't read.
        """
        written = (stock.NOPE + point["rope"]) * self.rows(point)
        size = 1 if point["pe"] == "e4m3" else 2
        k_pe = point["T"] * point["rope"] * size
        if point["fp8"]:
            return int(
                KV_COLUMNS * self.rows(point) * 2 + k_pe + written + stock.V * self.rows(point)
            )
        return int(stock.NOPE * self.rows(point) * 2 + k_pe + written * 2)

    def rows_per_pass(self, multiprocessors: int) -> Sequence[int]:
        """Return where one grid pass ends: SMs x 128 rows, and the block of 16 rows."""
        return (16, multiprocessors * ROWS_PER_SM)

    def outcome(self, point: Point, aligned: bool) -> str:  # noqa: FBT001
        """Return ``"equal"`` in the domain, ``"refused"`` where a kernel may refuse."""
        standard = all(point[a] in values for a, values in self.domain_axes.items())
        degenerate = point["H"] == 0 and point["T"] > 0
        return "equal" if standard and aligned and not degenerate else "refused"

    def call(
        self,
        kernel: Callable[..., Any],
        tensors: Mapping[str, Any],
        point: Point,
        out: Mapping[str, Any] | None,
    ) -> Mapping[str, Any]:
        """Call ``kernel(kv_nope, k_pe, use_fp8)``, with ``out=`` where the suite allocates."""
        extra = {} if out is None else {"out": out}
        result = kernel(tensors["kv_nope"], tensors["k_pe"], bool(point["fp8"]), **extra)
        if isinstance(result, tuple) and len(result) == 2:  # noqa: PLR2004
            return {"k": result[0], "v": result[1]}
        return {"result": result}

    def reference(self, tensors: Mapping[str, Any], point: Point) -> Mapping[str, Any]:
        """Run the stock tail."""
        return self.call(stock.kv_pack, tensors, point, None)

    def oracle(
        self, inputs: Mapping[str, Any], point: Point
    ) -> Mapping[str, np.ndarray[Any, Any]] | None:
        """Return the outputs' bits by the integer model; None for float32."""
        if point["dtype"] == "fp32":
            return None
        k, v = oracle.pack(
            inputs["kv_nope"],
            inputs["k_pe"],
            dtype=point["dtype"],
            fp8=bool(point["fp8"]),
            pe_dtype="e4m3" if point["pe"] == "e4m3" else None,
        )
        return {"k": k, "v": v}

    def layout(self, inputs: Mapping[str, Any], point: Point) -> Mapping[str, np.ndarray[Any, Any]]:
        """Move input elements to where the outputs have them, unconverted."""
        del point
        kv, pe = inputs["kv_nope"], inputs["k_pe"]
        rope = np.broadcast_to(pe, (*kv.shape[:2], pe.shape[2]))
        k = np.concatenate([kv[..., : stock.NOPE], rope], axis=-1)
        return {"k": k, "v": np.ascontiguousarray(kv[..., stock.NOPE :])}


PAIR = KVPack()
