"""The variables that tell the plugin what to do in a process of vLLM's.

They are read in every process, so what starts a server (``bytegate serve``, a unit file, an
image) sets them once in its environment.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvroute.errors import RouteError
from kvroute.fp8 import EMULATE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROUTE = "BYTEGATE_ROUTE"
"""``stock``, ``fused``, ``both``, ``fault:ID``, ``module:function`` or ``both:module:function``;
unset: vLLM as it is."""
PATCH = "BYTEGATE_PATCH"
"""``module:function`` values, comma-separated; each is called once a process, without arguments."""
WORKSPACE = "BYTEGATE_WORKSPACE_ROWS"
"""Rows of the chunked-prefill workspace, instead of vLLM's own choice."""
CPU_DCP = "BYTEGATE_CPU_DCP"
"""``1`` restores decode context parallelism on vLLM's CPU platform (``kvroute.cpu``)."""
EVIDENCE = "BYTEGATE_EVIDENCE_DIR"
"""Folder in which each worker keeps ``route-<rank>-<pid>.json``, rewritten as it counts."""

FP8_PREFILL = "BYTEGATE_FP8_PREFILL"
"""``emulate``: prefill in fp8 where no backend takes it, by one that upcasts (``kvroute.fp8``)."""

SHARE_GPU = "BYTEGATE_SHARE_GPU"
"""``1``: ranks share GPUs where there are fewer of these (``kvroute.shared``)."""

BOTH = "both:"
"""Before a pack: every call of the loop runs with it and without it."""

VARIABLES = (ROUTE, PATCH, WORKSPACE, CPU_DCP, EVIDENCE, FP8_PREFILL, SHARE_GPU)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes
    ----------
    route : the requested route, or ``None``.
    patches : ``module:function`` values.
    workspace_rows : forced workspace size in rows, or ``None``.
    cpu_dcp : whether the CPU platform's lacks are to be filled.
    evidence : folder for evidence files, or ``None``.
    emulate_fp8 : whether fp8 prefill is to be emulated.
    share_gpu : whether ranks are to share GPUs.

    """

    route: str | None = None
    patches: tuple[str, ...] = ()
    workspace_rows: int | None = None
    cpu_dcp: bool = False
    evidence: Path | None = None
    emulate_fp8: bool = False
    share_gpu: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """Read and check the variables.

        Raises
        ------
        RouteError
            For a value that can't mean anything; what exists is looked up later.

        """
        rows = environ.get(WORKSPACE, "")
        if rows and not (rows.isdecimal() and int(rows) > 0):
            raise RouteError(f"{WORKSPACE}={rows!r}: expected a positive number of rows")
        for name in (CPU_DCP, SHARE_GPU):
            if environ.get(name, "") not in ("", "0", "1"):
                raise RouteError(f"{name}={environ[name]!r}: expected 0 or 1")
        fp8 = environ.get(FP8_PREFILL, "")
        if fp8 not in ("", EMULATE):
            raise RouteError(f"{FP8_PREFILL}={fp8!r}: expected {EMULATE}")
        route = environ.get(ROUTE, "") or None
        if route is not None:
            check_route(route)
        patches = tuple(p for p in environ.get(PATCH, "").split(",") if p)
        for patch in patches:
            _split(patch)
        folder = environ.get(EVIDENCE, "")
        return cls(
            route=route,
            patches=patches,
            workspace_rows=int(rows) if rows else None,
            cpu_dcp=environ.get(CPU_DCP) == "1",
            evidence=Path(folder) if folder else None,
            emulate_fp8=bool(fp8),
            share_gpu=environ.get(SHARE_GPU) == "1",
        )


def check_route(route: str) -> None:
    """Raise ``RouteError`` unless ``route`` has the form of one."""
    if route in ("stock", "fused", "both"):
        return
    if route.startswith("fault:") and len(route) > len("fault:"):
        return
    own = route.removeprefix(BOTH)
    if own.count(":") == 1:
        _split(own)
        return
    raise RouteError(
        f"route {route!r}: expected stock, fused, both, fault:ID, module:function or "
        "both:module:function",
    )


def resolve(spec: str) -> Callable[..., Any]:
    """Import ``module:function`` and return the function.

    Raises
    ------
    RouteError
        When the module can't be imported, or the name is missing or not callable.

    """
    module_name, name = _split(spec)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RouteError(f"{spec}: can't import {module_name} ({error})") from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise RouteError(f"{spec}: {module_name} has no callable {name!r}")
    return found  # type: ignore[no-any-return]


def _split(spec: str) -> tuple[str, str]:
    module, _, name = spec.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise RouteError(f"{spec!r}: expected module:function")
    return module, name
