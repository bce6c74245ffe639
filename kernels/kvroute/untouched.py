"""Proof, in a live process, that vLLM's loop and what it calls are the wheel's own.

Three questions, each about the objects that would run, not about files:

1. Is each subject's ``__code__`` the one that a compile of the wheel's file gives
   (``kvroute.fingerprint``), under the name where vLLM would look it up?
2. Are the globals that a subject reads, and the attributes of modules and of its own class that
   it reaches through them, originals too? Functions are compared like subjects, classes and
   modules by identity.
3. Does a worker's implementation object call those functions? Its methods are looked up on the
   instance; the one that the switch shadows is listed, with what its gate calls.

What is knowingly replaced stands in ``ALLOWED`` and is printed, with whatever replaces it.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import sys
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from kvroute import fp8
from kvroute.errors import UnknownVLLM
from kvroute.fingerprint import compiled, distribution, is_wheels, relative
from kvroute.switch import LOOP, LoopGate

if TYPE_CHECKING:
    from collections.abc import Iterator

_MLA = "vllm.model_executor.layers.attention.mla_attention"
_DCP = "vllm.v1.attention.ops.dcp"
_MERGE = "vllm.v1.attention.ops.merge_attn_states"
_SDPA = "vllm.v1.attention.backends.mla.prefill.cpu_sdpa"

SUBJECTS = (
    (_MLA, f"MLACommonBaseImpl.{LOOP}"),
    (_MLA, "MLACommonBaseImpl._concat_k_nope_k_pe"),
    (_MLA, "MLACommonBaseImpl.forward_mha"),
    (_MLA, "_get_kv_b_proj_input_dtype"),
    (_MLA, "reorg_kvcache"),
    (_MLA, "neutralize_empty_context_partials"),
    (_MLA, "init_mla_context_partial"),
    (_MLA, "accumulate_mla_context_chunk"),
    (_MLA, "plan_mla_context_chunks"),
    (_MLA, "align_mla_chunked_context_workspace_size"),
    (_MLA, "build_mla_chunked_context_metadata"),
    (_MLA, "MLACommonMetadataBuilder.__init__"),
    (_MLA, "MLACommonMetadataBuilder.build"),
    (_MLA, "MLACommonMetadataBuilder.determine_prefill_query_data_type"),
    (_DCP, "MLADCPManager.__init__"),
    (_DCP, "MLADCPManager._init_combine"),
    (_DCP, "MLADCPManager._init_query_gather"),
    (_DCP, "MLADCPManager.init_kv_gather"),
    (_DCP, "MLADCPManager.kv_gather"),
    (_DCP, "cp_lse_ag_out_rs"),
    (_DCP, "_cp_lse_common"),
    (_MERGE, "merge_attn_states"),
    (_MERGE, "_merge_attn_states_torch"),
    (_SDPA, "CPUSDPAMLAPrefillBackend._ragged_sdpa"),
    (_SDPA, "CPUSDPAMLAPrefillBackend.run_prefill_context_chunk"),
    (_SDPA, "CPUSDPAMLAPrefillBackend.run_prefill_new_tokens"),
)
"""The loop, reorganisation, metadata builder, manager, merge and the CPU's prefill backend."""

ALLOWED = {
    "vllm._custom_ops.cp_gather_cache": "the op has no CPU build (kvroute.cpu.gather)",
    "vllm._custom_ops.gather_and_maybe_dequant_cache": "likewise, for an fp8 cache",
    f"{_DCP}.correct_attn_out": "exists in Triton only (kvroute.cpu.combine)",
    f"{_MLA}.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size": (
        "a workspace of a chosen size (kvroute.workspace)"
    ),
}
"""What a subject may reach although it isn't the wheel's, and why."""

EMULATED = {
    f"{_MLA}.{fp8.SWITCH}": "says that the upcasting prefill backend takes fp8 (kvroute.fp8)",
}
"""Likewise, where fp8 prefill is emulated, and what replaces it is ``kvroute.fp8``'s own."""
_REGISTRY = "vllm.v1.attention.backends.mla.prefill.registry"


@dataclass
class Report:
    """The answer.

    Attributes
    ----------
    distribution : name and version of the wheel.
    subjects : subjects whose code was compared and is the wheel's.
    globals : how many names that they reach were compared.
    allowed : replaced things that ``ALLOWED`` names, with what replaces them.
    shadowed : methods that an instance shadows, with what the shadow calls.
    problems : everything else; empty means untouched.

    """

    distribution: str = ""
    subjects: list[str] = field(default_factory=list)
    globals: int = 0
    allowed: dict[str, str] = field(default_factory=dict)
    shadowed: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def untouched(self) -> bool:
        """Whether nothing but the allowed things differs."""
        return bool(self.subjects) and not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {**vars(self), "untouched": self.untouched}


def inspect_worker() -> Report:
    """Inspect this process: the subjects, what they reach, and every live implementation.

    Raises
    ------
    UnknownVLLM
        Where no wheel owns the running vLLM, or a file of it was edited.

    """
    dist = distribution()
    report = Report(f"{dist.metadata['Name']} {dist.version}")
    for module, qualname in SUBJECTS:
        try:
            _inspect_subject(module, qualname, report)
        except (ImportError, AttributeError) as error:
            report.problems.append(f"{module}.{qualname}: not there ({error})")
    for impl in _live_impls():
        _inspect_instance(impl, report)
    _inspect_backends(report)
    return report


def _inspect_subject(module: str, qualname: str, report: Report) -> None:
    function, owner = _find(module, qualname)
    if not is_wheels(function, module, qualname):
        report.problems.append(f"{module}.{qualname}: {_whence(function)} instead of the wheel's")
        return
    report.subjects.append(f"{module}.{qualname}")
    plain = getattr(function, "__func__", function)
    for name, attribute in sorted(_reads(plain.__code__), key=str):
        _inspect_read(plain, owner, name, attribute, report)


def _inspect_read(
    function: FunctionType,
    owner: type | None,
    name: str | None,
    attribute: str | None,
    report: Report,
) -> None:
    """Compare one global, or one attribute of a global module or of the subject's own class."""
    if name is None:
        found = _class_function(owner, attribute)
        if found is not None and owner is not None:
            _compare(found, f"{owner.__module__}.{owner.__qualname__}.{attribute}", report)
        return
    if name in function.__globals__:
        value = function.__globals__[name]
        _compare(value, f"{function.__module__}.{name}", report)
        if attribute is not None and isinstance(value, ModuleType):
            inner = getattr(value, attribute, None)
            _compare(inner, f"{value.__name__}.{attribute}", report)
    elif not hasattr(builtins, name):
        report.problems.append(f"{function.__module__}.{name}: read, but not there")


def _compare(value: Any, label: str, report: Report) -> None:
    report.globals += 1
    problem = _problem(value) or _misplaced(value, label)
    if problem is None:
        return
    known = ALLOWED.get(label) or (EMULATED.get(label) if _emulates(value) else None)
    if known is not None:
        report.allowed[label] = f"{problem}: {known}"
        return
    entry = f"{label}: {problem}"
    if entry not in report.problems:
        report.problems.append(entry)


def _emulates(value: Any) -> bool:
    """Whether a function is ``kvroute.fp8``'s, put there by its ``install``."""
    namespace = getattr(value, "__globals__", {})
    return bool(fp8.installed()) and namespace.get("__name__") == fp8.__name__


def _inspect_backends(report: Report) -> None:
    """List classes that were registered in the place of vLLM's own prefill backends."""
    registry = sys.modules.get(_REGISTRY)
    for member, path in getattr(registry, "_MLA_PREFILL_OVERRIDES", {}).items():
        label = f"{_REGISTRY}.{type(member).__name__}.{member.name}"
        entry = f"{path} instead of {member.value}"
        if fp8.installed().get(f"MLAPrefillBackendEnum.{member.name}") == path:
            report.allowed[label] = f"{entry}: converts fp8 and computes as before (kvroute.fp8)"
        else:
            report.problems.append(f"{label}: {entry}")


def _problem(value: Any) -> str | None:
    """Say what is wrong with an object that a subject reaches, ``None`` where it is original."""
    if isinstance(value, ModuleType):
        return None if sys.modules.get(value.__name__) is value else "another module of that name"
    if isinstance(value, type):
        home: Any = sys.modules.get(value.__module__)
        for part in value.__qualname__.split("."):
            home = getattr(home, part, None)
        return None if home is value or "<locals>" in value.__qualname__ else "another class"
    if isinstance(value, BuiltinFunctionType):
        return None
    plain = getattr(value, "__func__", value)
    if isinstance(plain, FunctionType):
        return _function_problem(plain)
    return None  # constants, loggers, platforms: objects without code of their own


def _misplaced(value: Any, label: str) -> str | None:
    """Say so where a function of vLLM's stands under another one's name."""
    plain = getattr(value, "__func__", value)
    if not isinstance(plain, FunctionType) or plain.__name__ == label.rpartition(".")[2]:
        return None
    return f"{_whence(plain)} under another name"


def _function_problem(function: FunctionType) -> str | None:
    path = relative(function.__code__.co_filename)
    claimed = (function.__module__ or "").partition(".")[0]
    if path is None:
        return _whence(function) if claimed == "vllm" or _ours(function) else None
    try:
        same = function.__code__ in compiled(path).get(function.__code__.co_qualname, [])
    except UnknownVLLM as error:
        return str(error)
    return None if same else f"{_whence(function)} is not what {path} compiles to"


def _ours(function: FunctionType) -> bool:
    """Whether a function stands outside vLLM, torch and the standard library."""
    top = (function.__module__ or "").partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("torch", "numpy", "cuda")


def _reads(code: CodeType) -> set[tuple[str | None, str | None]]:
    """Collect ``(global, attribute)`` pairs that ``code`` reads, in nested code as well.

    ``(name, None)`` for a plain global, ``(name, attribute)`` for an attribute of one, and
    ``(None, attribute)`` for an attribute of anything else, such as ``self``.
    """
    found: set[tuple[str | None, str | None]] = set()
    previous: str | None = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            previous = str(step.argval)
            found.add((previous, None))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.add((previous, str(step.argval)))
            previous = None
        elif step.opname != "CACHE":
            previous = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _reads(constant)
    return found


def _find(module: str, qualname: str) -> tuple[Any, type | None]:
    holder: Any = importlib.import_module(module)
    *outer, name = qualname.split(".")
    for part in outer:
        holder = getattr(holder, part)
    if name not in vars(holder):
        raise AttributeError(name)
    return vars(holder)[name], holder if isinstance(holder, type) else None


def _class_function(owner: type | None, attribute: str | None) -> Any:
    if owner is None or attribute is None:
        return None
    found = next((vars(c)[attribute] for c in owner.__mro__ if attribute in vars(c)), None)
    return found if isinstance(getattr(found, "__func__", found), FunctionType) else None


def _live_impls() -> Iterator[Any]:
    """Yield the attention implementations of this process's layers."""
    import gc

    mla = sys.modules.get(_MLA)
    base = getattr(mla, "MLACommonBaseImpl", None)
    if base is not None:
        # By type: asking a proxy whose object is gone for its class raises.
        yield from (o for o in gc.get_objects() if issubclass(type(o), base))


def _inspect_instance(impl: Any, report: Report) -> None:
    label = type(impl).__qualname__
    for module, qualname in SUBJECTS:
        owner, _, name = qualname.rpartition(".")
        if module != _MLA or owner != "MLACommonBaseImpl":
            continue
        method = getattr(impl, name)
        if isinstance(method, LoopGate):
            report.shadowed[f"{label}.{name}"] = f"LoopGate, calling {_whence(method.loop)}"
            method = method.loop
        if not is_wheels(method, module, qualname):
            report.problems.append(f"{label}.{name}: {_whence(method)} instead of the wheel's")


def _whence(function: Any) -> str:
    """Name the code that runs: ``functools.wraps`` copies names, but not globals and code."""
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, FunctionType):
        return repr(plain)
    return f"{plain.__globals__.get('__name__')}.{plain.__code__.co_qualname}"
