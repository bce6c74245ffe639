"""The contract of an op pair, and the registry that finds pairs.

A pair is found through the entry point group ``bytegate.pairs``: each entry names an object
with the attributes of ``OpPair``. It may live in any installed package. When the suite runs from
a checkout that isn't installed (a GPU host without a network), the entries of the checkout's own
``pyproject.toml`` are read instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from equiv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]
    Tensors = Mapping[str, Any]

GROUP = "bytegate.pairs"


class Dim(Protocol):
    """An integer dimension: its range, and values that deployments use."""

    @property
    def minimum(self) -> int: ...
    @property
    def maximum(self) -> int: ...
    @property
    def production(self) -> Sequence[int]: ...


class Operand(Protocol):
    """An input: name, shape in elements, dtype of ``equiv.dtypes``, alignment of the domain.

    ``layouts`` are views that deployments use: ``(pitches in elements, offset in bytes)``.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def align_bytes(self) -> int: ...
    @property
    def mutable(self) -> bool: ...
    @property
    def layouts(self) -> Sequence[tuple[tuple[int, ...], int]]: ...


class Output(Protocol):
    """An output: name, shape, dtype, what its dimensions count, and named column ranges."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def parts(self) -> Mapping[str, tuple[int, int]]: ...


class Candidate(Protocol):
    """A kernel that claims the reference's bytes; see ``kvpack.spec.Candidate``."""

    @property
    def name(self) -> str: ...
    @property
    def load(self) -> Callable[[str, str | None], Callable[..., Any]]: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def guard(self) -> str: ...
    @property
    def cpu_environment(self) -> Mapping[str, str]: ...
    @property
    def evidence(self) -> tuple[str, ...]: ...
    @property
    def rows_per_second(self) -> float: ...
    @property
    def takes_library(self) -> bool: ...
    @property
    def executions(self) -> Callable[[], int] | None: ...


class Fault(Protocol):
    """A planted fault and its clean twin; see ``kvpack.spec.Fault``."""

    @property
    def id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def faulty(self) -> str: ...
    @property
    def clean(self) -> str: ...
    @property
    def lane(self) -> str: ...
    @property
    def needs(self) -> str: ...


@runtime_checkable
class OpPair(Protocol):
    """A reference, an oracle, candidates, operands and their domain.

    A ``point`` maps each dimension and axis to its value.
    """

    name: str
    dims: Mapping[str, Dim]
    """Integer dimensions, in the order in which cases shrink."""
    axes: Mapping[str, Sequence[int | str]]
    """Choices such as the dtype; the first is the simplest."""
    domain_axes: Mapping[str, Sequence[int | str]]
    """The part of them for which identity is claimed."""
    models: Mapping[str, Callable[[NDArray[Any], str], NDArray[Any]]]
    """Named conversions, for declared divergences whose bytes follow a rule."""
    candidates: Mapping[str, Candidate]
    faults: Sequence[Fault]
    harmless: Sequence[Fault]
    """Variants with equal bytes: ``faulty`` names the variant, which must not be flagged."""
    classes: Mapping[str, Callable[[NDArray[Any], str], NDArray[Any]]]
    """Named predicates on an input element's bits and dtype, for the ledger.

    A pair may also have ``variants``: name to ``(inputs, point) -> outputs``, as ``oracle`` gives
    them, for declared divergences whose bytes don't follow from one input element; masked
    (``numpy.ma``) where any bytes will do, as after a race. And ``beside(point, device)``: name to
    a tensor that all calls are given beside the operands and a copy that none is.
    """

    def valid(self, point: Mapping[str, Any]) -> bool:
        """Whether the axes' values go together at all."""

    def operands(self, point: Mapping[str, Any]) -> Sequence[Operand]:
        """Return the inputs, in the order of the call."""

    def outputs(self, point: Mapping[str, Any]) -> Sequence[Output]:
        """Return the outputs."""

    def rows(self, point: Mapping[str, Any]) -> int:
        """Return the count of rows that the kernel's launch plan counts."""

    def rows_per_pass(self, multiprocessors: int) -> Sequence[int]:
        """Return row counts at which a launch plan changes on a device with so many SMs."""

    def outcome(self, point: Mapping[str, Any], aligned: bool) -> str:
        """Return what is claimed: ``"equal"``, ``"refused"`` or ``"undefined"``.

        ``aligned`` says whether every base and pitch is a multiple of the operand's alignment.
        """

    def call(
        self,
        kernel: Callable[..., Any],
        tensors: Tensors,
        point: Mapping[str, Any],
        out: Tensors | None,
    ) -> Mapping[str, Any]:
        """Call the kernel; return its outputs by name, as it gave them."""

    def reference(self, tensors: Tensors, point: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run the stock ops on the same device."""

    def oracle(self, inputs: Arrays, point: Mapping[str, Any]) -> Mapping[str, NDArray[Any]] | None:
        """Return the outputs' bits by an independent model; None where there is no model."""

    def layout(self, inputs: Arrays, point: Mapping[str, Any]) -> Mapping[str, NDArray[Any]]:
        """Move input elements, of any type, to where the outputs have them, unconverted.

        It may do so for operands that the op writes: only then can the ledger speak of their bytes.
        """


REQUIRED = (
    "name",
    "dims",
    "axes",
    "domain_axes",
    "models",
    "candidates",
    "faults",
    "harmless",
    "classes",
    "valid",
    "operands",
    "outputs",
    "rows",
    "rows_per_pass",
    "outcome",
    "call",
    "reference",
    "oracle",
    "layout",
)


def _checkout_entries() -> dict[str, str]:
    """Entries of the pyproject.toml beside this package, when it runs from a checkout."""
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if not path.is_file():
        return {}
    with path.open("rb") as f:
        entries = tomllib.load(f).get("project", {}).get("entry-points", {}).get(GROUP, {})
    return dict(entries)


def registered() -> dict[str, str]:
    """Return ``{pair: "module:object"}`` of every registered pair, without importing any."""
    found = _checkout_entries()
    for entry in importlib.metadata.entry_points(group=GROUP):
        found[entry.name] = entry.value
    return dict(sorted(found.items()))


def add_checkout_paths() -> None:
    """Make ``kernels/`` of an uninstalled checkout importable, as an installation does."""
    kernels = Path(__file__).resolve().parents[1] / "kernels"
    if kernels.is_dir() and str(kernels) not in sys.path:
        sys.path.append(str(kernels))


def load_pair(name: str) -> OpPair:
    """Import a registered pair.

    Raises
    ------
    UsageError : unknown name, an import that fails, or an object that isn't a pair.

    """
    known = registered()
    if name not in known:
        msg = (
            f"unknown pair {name!r}: registered are {', '.join(known) or 'none'}; "
            f"a package adds one through the entry point group {GROUP!r}"
        )
        raise UsageError(msg)
    add_checkout_paths()
    module, _, attribute = known[name].partition(":")
    try:
        pair = getattr(importlib.import_module(module), attribute)
    except Exception as e:  # whatever somebody's module does while it is imported
        what = f"{type(e).__name__}: {' '.join(str(e).split())}"
        msg = f"pair {name!r} ({known[name]}) can't be imported: {what}"
        raise UsageError(msg) from e
    missing = [a for a in REQUIRED if not hasattr(pair, a)]
    if missing:
        msg = f"pair {name!r} ({known[name]}) lacks {', '.join(missing)}; see equiv.pairs.OpPair"
        raise UsageError(msg)
    if pair.name != name:
        msg = f"pair {name!r} ({known[name]}) calls itself {pair.name!r}; the two names must agree"
        raise UsageError(msg)
    return pair  # type: ignore[no-any-return]
