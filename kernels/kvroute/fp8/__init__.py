"""Prefill in fp8 on a device that has no fp8 prefill backend: emulated, and named so everywhere.

vLLM runs the fp8 branch of the K/V pack tail when the cache is fp8, when
``use_prefill_query_quantization`` is on, and when ``backend_supports_prefill_query_quantization``
says so; on Hopper and on a CPU it never does. Two things are replaced, each through the place that
vLLM itself looks at:

1. the class behind ``MLAPrefillBackendEnum.FLASH_ATTN`` (on a CPU ``CPU``), by vLLM's own
   ``register_mla_prefill_backend``: a subclass that converts fp8 q, k and v to the model's dtype
   and calls the ordinary backend (``kvroute.fp8.upcast``);
2. ``backend_supports_prefill_query_quantization`` in ``mla_attention``: true once a layer has such
   a backend.

Everything between is vLLM's: the cast of the query, the tail's fp8 branch, the fused fp8 op, the
loop, the merge. So a pair of servers is evidence for the bytes of the fp8 pack in a served model,
and for no fp8 attention kernel.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kvroute.errors import RouteError

EMULATE = "emulate"
"""Value of ``BYTEGATE_FP8_PREFILL``."""
CACHES = ("fp8", "fp8_e4m3")
"""Values of ``--kv-cache-dtype`` with which vLLM takes fp8 queries and the fused fp8 op."""
FP8 = "float8_e4m3fn"
"""The dtype to which the tail casts, in torch's word."""

MLA = "vllm.model_executor.layers.attention.mla_attention"
SWITCH = "backend_supports_prefill_query_quantization"
"""What of ``MLA`` decides whether a prefill backend takes fp8."""

BACKENDS = {
    "CPU": "kvroute.fp8.cpu.UpcastCPUSDPA",
    "FLASH_ATTN": "kvroute.fp8.flash.UpcastFlashAttn",
}
"""By the member of ``MLAPrefillBackendEnum`` whose class they stand in for."""

_installed: dict[str, str] = {}


def install() -> list[str]:
    """Replace what decides, in this process; names of what was done. A second call does nothing.

    Raises
    ------
    RouteError
        When something else has replaced a backend or the switch before.

    """
    if _installed:
        return []
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill import registry

    name = "CPU" if current_platform.is_cpu() else "FLASH_ATTN"
    member = registry.MLAPrefillBackendEnum[name]
    if member.is_overridden():
        raise RouteError(f"fp8 prefill emulation: {member.get_path()} stands for {name} already")
    mla: Any = importlib.import_module(MLA)
    original = getattr(mla, SWITCH)
    if getattr(original, "__module__", None) != MLA:
        raise RouteError(f"fp8 prefill emulation: {SWITCH} was replaced already")
    registry.register_mla_prefill_backend(member, BACKENDS[name])
    setattr(mla, SWITCH, supports(original))
    _installed[f"MLAPrefillBackendEnum.{name}"] = BACKENDS[name]
    return [f"fp8:{name}", f"fp8:{SWITCH}"]


def supports(original: Any) -> Any:
    """``SWITCH``: true where a layer of this process has an upcasting backend, else as before."""

    @functools.wraps(original)
    def backend_supports_prefill_query_quantization() -> bool:
        from kvroute.fp8 import upcast

        return upcast.built > 0 or bool(original())

    return backend_supports_prefill_query_quantization


def installed() -> dict[str, str]:
    """Return the classes that stand in for vLLM's own, by whom they replace; usually none."""
    return dict(_installed)


def of_layer(layer: Any) -> str | None:
    """Return the name of a layer's upcasting backend; None where it has another."""
    from kvroute.fp8.upcast import Upcast

    backend = getattr(layer, "prefill_backend", None)
    return str(backend.get_name()) if isinstance(backend, Upcast) else None


def check_layer(layer: Any) -> str:
    """Return the name of a layer's upcasting backend.

    Raises
    ------
    RouteError
        When it has none, or vLLM's configuration keeps the queries in the model's dtype: a server
        that was to reach the fp8 branch and can't must not start.

    """
    name = of_layer(layer)
    if name is None:
        backend = getattr(layer, "prefill_backend", None)
        found = backend.get_name() if backend is not None else "none"
        raise RouteError(f"fp8 prefill emulation: the layer's prefill backend is {found}")
    cache = str(getattr(layer, "kv_cache_dtype", "auto"))
    if cache not in CACHES:
        raise RouteError(
            f"fp8 prefill emulation: the layer's cache is {cache}: give --kv-cache-dtype fp8"
        )
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and not config.attention_config.use_prefill_query_quantization:
        raise RouteError(
            "fp8 prefill emulation: vLLM keeps queries unquantized: give "
            "--attention-config '{\"use_prefill_query_quantization\": true}'"
        )
    return name
