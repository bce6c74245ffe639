"""The op pair ``scale_add``: integers, a scalar and a row among the operands, one written in place.

::

    out [N, C] = a * factor + bias        total [N, C] += out

Nothing of bytegate is imported: the values below have the attributes that its contract names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Point = Mapping[str, Any]


@dataclass(frozen=True)
class Dim:
    """An integer dimension."""

    minimum: int
    maximum: int
    production: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operand:
    """An input."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    align_bytes: int = 16
    mutable: bool = False
    layouts: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True)
class Output:
    """An output."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] = ("row", "column")
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A kernel that claims the reference's bytes."""

    name: str
    load: Callable[[str, str | None], Callable[..., Any]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    guard: str = "dispatch"
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    rows_per_second: float = math.inf
    takes_library: bool = False
    executions: Callable[[], int] | None = None


@dataclass(frozen=True)
class Fault:
    """A planted fault and its clean twin."""

    id: str
    title: str
    faulty: str
    clean: str
    lane: str
    needs: str = ""


def stock(a: Tensor, factor: Tensor, bias: Tensor, total: Tensor) -> Tensor:
    """Run the reference, op by op."""
    out = a * factor
    out = out + bias
    total.add_(out)
    return out


def fused(a: Tensor, factor: Tensor, bias: Tensor, total: Tensor) -> Tensor:
    """Do the same in fewer passes."""
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    torch.mul(a, factor, out=out)
    out += bias
    total += out
    return out


def forgets_total(a: Tensor, factor: Tensor, bias: Tensor, total: Tensor) -> Tensor:
    """Leave the last row of the total as it was."""
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    torch.mul(a, factor, out=out)
    out += bias
    total[:-1] += out[:-1]
    return out


def not_the_kernel(device: str, library: str | None) -> Callable[..., Tensor]:
    """Load a candidate whose own kernel never runs."""
    del device, library
    return fused


class ScaleAdd:
    """See the module."""

    name = "scale_add"
    dims: Mapping[str, Dim] = {"N": Dim(0, 4_096, (1, 128, 2_048)), "C": Dim(1, 64, (8, 48))}
    axes: Mapping[str, tuple[int | str, ...]] = {"dtype": ("i32", "i64")}
    domain_axes = axes
    models: Mapping[str, Any] = {}
    classes: Mapping[str, Any] = {}
    candidates: Mapping[str, Candidate] = {
        "stock": Candidate("stock", lambda _device, _library: stock),
        "fused": Candidate("fused", lambda _device, _library: fused),
        "absent": Candidate("absent", not_the_kernel, devices=("cuda",)),
    }
    faults = (
        Fault(
            "A1",
            "last row of the total forgotten",
            "scale_add.pair:forgets_total",
            "scale_add.pair:fused",
            "shapes",
        ),
    )
    harmless = (Fault("B1", "the stock ops", "scale_add.pair:stock", "", "shapes"),)

    def valid(self, point: Point) -> bool:
        """Accept every combination of axes."""
        del point
        return True

    def operands(self, point: Point) -> tuple[Operand, ...]:
        """Return ``a [N, C]``, ``factor []``, ``bias [C]`` and ``total [N, C]``."""
        rows, columns, dtype = int(point["N"]), int(point["C"]), str(point["dtype"])
        return (
            Operand("a", (rows, columns), dtype),
            Operand("factor", (), dtype),
            Operand("bias", (columns,), dtype),
            Operand("total", (rows, columns), dtype, mutable=True),
        )

    def outputs(self, point: Point) -> tuple[Output, ...]:
        """Return ``out [N, C]``."""
        shape = (int(point["N"]), int(point["C"]))
        return (Output("out", shape, str(point["dtype"])),)

    def rows(self, point: Point) -> int:
        """Return N * C: one thread does one element."""
        return int(point["N"]) * int(point["C"])

    def rows_per_pass(self, multiprocessors: int) -> tuple[int, ...]:
        """Return nothing: there is no launch plan to speak of."""
        del multiprocessors
        return ()

    def outcome(self, point: Point, aligned: bool) -> str:  # noqa: FBT001
        """Return ``"equal"``, whatever the alignment."""
        del point, aligned
        return "equal"

    def call(
        self,
        kernel: Callable[..., Any],
        tensors: Mapping[str, Any],
        point: Point,
        out: Mapping[str, Any] | None,
    ) -> Mapping[str, Any]:
        """Call ``kernel(a, factor, bias, total)``."""
        del point
        assert out is None
        return {"out": kernel(*(tensors[name] for name in ("a", "factor", "bias", "total")))}

    def reference(self, tensors: Mapping[str, Any], point: Point) -> Mapping[str, Any]:
        """Run the stock ops."""
        return self.call(stock, tensors, point, None)

    def oracle(self, inputs: Mapping[str, Any], point: Point) -> None:
        """Have no model."""
        del inputs, point

    def layout(self, inputs: Mapping[str, Any], point: Point) -> Mapping[str, Any]:
        """Take each output element to come from ``a``."""
        del point
        return {"out": inputs["a"]}


PAIR = ScaleAdd()
