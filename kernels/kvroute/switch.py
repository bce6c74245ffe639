"""The route switch: a gate in front of each layer's loop, placed when the layer is built.

vLLM's classes and functions stay as they are. After a layer's ``__init__`` its *instance* of the
attention implementation gets an attribute that shadows the loop's method: a ``LoopGate``, which
calls the method it shadows with the decided pack, and counts. So the same switch serves every
MLA model on the generic loop and Kimi-K3's layer, which calls the loop with a pack of its own.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from kvroute import fp8
from kvroute.decide import Decision, decide, pack_keyword
from kvroute.packs import Pack, counted, fused_pack
from kvroute.pynccl import pynccl
from kvroute.settings import BOTH, Settings, resolve
from kvroute.tally import TALLY, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

LOOP = "_context_parallel_compute_prefill_context"
"""The loop's name, in vLLM 0.32 and 0.33."""
LAYERS = (
    ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention"),
    ("vllm.models.kimi_k3.nvidia.mla", "MultiHeadLatentAttention"),
)
"""Layers whose construction decides a route: every MLA model's, and Kimi-K3's own."""
_MARK = "__bytegate_gated__"

logger = logging.getLogger("vllm.bytegate")  # below "vllm", so that vLLM's handlers print it


class LoopGate:
    """Calls a layer's loop on the decided route and counts what it did.

    On the route ``both``, or ``both:module:function``, every call runs with the pack and then
    without it, on the same cache and query; the results are compared byte for byte, and the stock
    one is returned.

    Parameters
    ----------
    loop : the bound method that it shadows.
    decision : the layer's route.
    pack : the counted pack, or ``None`` on ``stock``. With route ``fused`` a pack that the
        caller brings itself (Kimi-K3's) is kept.
    tally : where to count.

    """

    def __init__(
        self,
        loop: Callable[..., Any],
        decision: Decision,
        pack: Pack | None,
        tally: Tally = TALLY,
    ) -> None:
        self.loop = loop
        self.decision = decision
        self.pack = pack
        self.tally = tally
        self._signature = inspect.signature(loop)
        self._own: dict[int, Pack] = {}
        self._noted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loop as its caller meant it, but for the pack."""
        bound = self._signature.bind(*args, **kwargs)
        keyword = self.decision.keyword
        if keyword is not None:
            bound.arguments[keyword] = self._choose(bound.arguments.get(keyword))
        prefill = bound.arguments["attn_metadata"].prefill
        context = prefill.chunked_context
        if not self._noted:
            self._note(bound.arguments, context)
        result = self.loop(*bound.args, **bound.kwargs)
        if self.decision.both and keyword is not None:
            bound.arguments[keyword] = None
            again = self.loop(*bound.args, **bound.kwargs)
            self.tally.count_compared(equal=all(map(_same_bytes, result, again)))
            result = again
        self.tally.count_loop(
            chunks=len(context.chunks),
            continuations=sum(bool(chunk.is_continuation) for chunk in context.chunks),
            empty=len(context.empty_token_slices),
            tokens=sum(chunk.num_context_tokens for chunk in context.chunks),
            fp8=str(getattr(prefill, "q_data_type", None)).endswith(fp8.FP8),
        )
        return result

    def _choose(self, brought: Pack | None) -> Pack | None:
        if not self.decision.packs:
            return None
        if brought is None or self.decision.route not in ("fused", "both"):
            return self.pack
        # Bound methods are made anew at every access; one wrapper each would never end.
        key = hash(brought)
        return self._own.setdefault(key, counted(brought, self.tally))

    def _note(self, arguments: dict[str, Any], context: Any) -> None:
        self._noted = True
        manager = context.dcp_manager
        backend = arguments["attn_metadata"].prefill.prefill_backend
        self.tally.note(
            gather=describe_gather(getattr(manager, "_kv_gather", None)),
            workspace_rows=int(context.workspace.shape[0]),
            workspace_dtype=str(context.workspace.dtype).removeprefix("torch."),
            prefill_backend=backend.get_name() if backend is not None else None,
            dcp=int(arguments["dcp_world_size"]),
        )


def _same_bytes(a: Any, b: Any) -> bool:
    """Whether two tensors have equal bytes; NaN equals NaN of the same bits."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(left, right))


def describe_gather(gather: Any) -> str:
    """Which collective a manager's gather is: ``nccl``, ``gloo``, or ``symmetric memory``."""
    owner = getattr(gather, "__self__", None)
    if owner is not None:
        return f"symmetric memory ({type(owner).__name__})"
    if isinstance(gather, functools.partial):
        import torch.distributed as dist

        group = gather.keywords.get("group")
        name = getattr(gather.func, "__name__", repr(gather.func))
        return f"{dist.get_backend(group)} ({name})" if group is not None else name
    return "unknown" if gather is None else repr(gather)


def gate_layer(layer: Any, settings: Settings, tally: Tally = TALLY) -> Decision | None:
    """Decide a built layer's route and place its gate; ``None`` where there is no loop.

    A second call on the same layer changes nothing.
    """
    impl = getattr(layer, "impl", None)
    loop = getattr(impl, LOOP, None)
    if loop is None or isinstance(loop, LoopGate):
        return None
    if settings.emulate_fp8:
        tally.note(fp8_prefill=fp8.check_layer(layer))
    dcp_size = max(int(getattr(owner, "dcp_world_size", 1) or 1) for owner in (layer, impl))
    decision = decide(
        settings.route,
        dcp_size=dcp_size,
        keyword=pack_keyword(loop),
        environ=os.environ,
    )
    tally.layers[decision.route] += 1
    if decision.route == "untouched":
        if settings.route is not None:  # asked for, and impossible without sharding: to be told
            _announce(decision, None, layer, dcp_size, tally)
        return decision
    name, pack = _pack_for(decision, layer)
    setattr(impl, LOOP, LoopGate(loop, decision, counted(pack, tally) if pack else None, tally))
    _announce(decision, name, layer, dcp_size, tally)
    return decision


def install(settings: Settings) -> None:
    """Watch the construction of the layers, now or when their module is first imported."""
    for module_name, class_name in LAYERS:
        module = sys.modules.get(module_name)
        if module is not None:
            _hook(module, class_name, settings)
        else:
            sys.meta_path.insert(0, _Watch(module_name, class_name, settings))


def _hook(module: ModuleType, class_name: str, settings: Settings) -> None:
    layer_class = getattr(module, class_name)
    build = layer_class.__init__
    if getattr(build, _MARK, False):
        return

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        gate_layer(self, settings)

    setattr(init, _MARK, True)
    layer_class.__init__ = init


class _Watch(importlib.abc.MetaPathFinder):
    """Hooks one module when, and only when, vLLM imports it.

    Importing Kimi-K3's module from the plugin would load CUDA code in processes that need none.
    """

    def __init__(self, module_name: str, class_name: str, settings: Settings) -> None:
        self._target = (module_name, class_name, settings)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the watched module as everybody else would, and hook what its loader makes."""
        module_name, class_name, settings = self._target
        if fullname != module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _hook(module, class_name, settings)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _pack_for(decision: Decision, layer: Any) -> tuple[str | None, Pack | None]:
    if not decision.packs:
        return None, None
    if decision.route in ("fused", "both"):
        weight = next(layer.kv_b_proj.parameters(), None)
        return fused_pack("cpu" if weight is None else weight.device.type)
    if decision.route.startswith("fault:"):
        from kvroute.faults import pack_of

        spec = pack_of(decision.route.removeprefix("fault:"))
        return (spec, resolve(spec)) if spec else (None, None)
    spec = decision.route.removeprefix(BOTH)
    return spec, resolve(spec)


def _announce(
    decision: Decision,
    name: str | None,
    layer: Any,
    dcp_size: int,
    tally: Tally,
) -> None:
    first = "route" not in tally.facts
    tally.note(
        route=decision.route,
        switch=decision.switch,
        reason=decision.reason,
        pack=name,
        keyword=decision.keyword,
        dcp=dcp_size,
        layer=type(layer).__name__,
    )
    if first:
        logger.info(
            "bytegate: route=%s pack=%s switch=%s dcp=%d layer=%s (%s)",
            decision.route,
            name or "none",
            decision.switch or "none",
            dcp_size,
            type(layer).__name__,
            decision.reason,
        )
        tally.note(**_place())
        tally.note(metrics=tally.publish())


def _place() -> dict[str, Any]:
    """Rank, versions and PyNccl, read once the worker's groups exist."""
    import torch
    import torch.distributed as dist
    import vllm

    ready = dist.is_available() and dist.is_initialized()
    return {
        "rank": dist.get_rank() if ready else 0,
        "world": dist.get_world_size() if ready else 1,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "pynccl": pynccl(),
    }
