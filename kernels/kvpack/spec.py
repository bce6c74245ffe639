"""Plain values in which an op pair describes itself.

A pair is any object with the attributes that ``equiv.pairs.OpPair`` lists; the classes
here are the ones ``kvpack`` uses for them. They know nothing of who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Point = Mapping[str, Any]
"""One value for each dimension and axis, e.g. ``{"T": 3, "H": 2, "dtype": "bf16", "fp8": 1}``."""


@dataclass(frozen=True)
class Dim:
    """An integer dimension of the operands.

    Attributes
    ----------
    minimum, maximum : inclusive range in which the domain lies.
    production : values that deployments use; each is in the ``shapes`` lane.

    """

    minimum: int
    maximum: int
    production: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operand:
    """An input tensor as the caller sees it.

    Attributes
    ----------
    name : argument name.
    shape : elements, outermost first.
    dtype : one of ``equiv.fills.DTYPES`` (``"bf16"``, ``"fp16"``, ``"e4m3"``, ``"fp32"``).
    align_bytes : base alignment, and alignment of every pitch, for which identity is claimed.
    mutable : whether the op may write it; then its bytes are compared as an output.
    layouts : views that deployments use, ``(pitches in elements, base offset in bytes)``.

    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    align_bytes: int = 16
    mutable: bool = False
    layouts: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True)
class Output:
    """An output tensor.

    Attributes
    ----------
    axes : what each dimension counts, for messages: ``("token", "head", "column")``.
    parts : named column ranges of the last dimension, for messages.

    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A kernel that claims the reference's bytes.

    Attributes
    ----------
    load : ``load(device, library) -> kernel``; called once, in the worker process.
        ``library`` is a path given by the user, or ``None``. It raises ``Unavailable`` where
        the candidate can't run, with the reason.
    devices : device types on which it runs.
    guard : how its outputs get into guarded, poisoned memory: ``"dispatch"`` when it
        allocates them with torch (the suite serves the allocation), ``"out"`` when the
        kernel takes ``out={name: tensor}``.
    cpu_environment : variables that its worker sets on a CPU, before anything is imported.
    takes_library : whether a library that the user gives by path is for it.
    evidence : parts of kernel or operator names, one of which must appear in a profile of a call.
    executions : returns how often the kernel proper ran in this process, where that can be told.
    rows_per_second : rough speed on a CPU, by which a campaign sizes its cases; ``inf``
        where it is no slower than the reference.

    """

    name: str
    load: Callable[[str, str | None], Callable[..., Any]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    guard: str = "dispatch"
    cpu_environment: Mapping[str, str] = field(default_factory=dict)
    takes_library: bool = False
    evidence: tuple[str, ...] = ()
    rows_per_second: float = float("inf")
    executions: Callable[[], int] | None = None


@dataclass(frozen=True)
class Fault:
    """A kernel with one planted fault and the twin that differs from it in one place.

    Attributes
    ----------
    id : the catalogue's number, ``"K07"``.
    title : the fault, in a few words.
    faulty, clean : ``"module:function"``, given to ``--candidate``.
    lane : the lane expected to see it first.
    needs : ``""``, ``"cuda"``, ``"nightly"`` (memory and time; or gate on a GPU) or ``"large"``
        (gate or nightly, on a GPU).

    """

    id: str
    title: str
    faulty: str
    clean: str
    lane: str
    needs: str = ""


class Unavailable(RuntimeError):
    """A candidate can't run here; the message says why, in one line."""
