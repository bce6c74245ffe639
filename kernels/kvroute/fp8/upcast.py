"""A prefill backend that takes fp8 and computes in the model's dtype."""

from __future__ import annotations

from typing import Any

from kvroute.tally import TALLY

built = 0
"""Upcasting backends that this process has built: what makes vLLM choose fp8 queries."""


class Upcast:
    """Mixin before a ``MLAPrefillBackend``: ``attention(w(q), w(k), w(v))`` where q, k, v are fp8.

    ``w`` converts ``float8_e4m3fn`` to the model's dtype, which is exact: bfloat16, float16 and
    float32 hold every e4m3 value. No scale is applied, as in vLLM's fp8 prefill backends: TRT-LLM's
    gets ``bmm1_scale`` = the softmax scale and ``bmm2_scale`` = 1, for the tail casts q, k and v
    unscaled. Output and log-sum-exp are the ordinary backend's: the model's dtype, as
    ``MLACommonPrefillMetadata.output_dtype`` has it and the fp8 backends return it, and float32.
    Anything but fp8 is passed on as it is.
    """

    _prefill_metadata: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        global built  # noqa: PLW0603 - one process, one count
        built += 1

    @classmethod
    def get_name(cls) -> str:
        """Return the name that vLLM's log and the evidence give it: the ordinary one's, marked."""
        return f"{super().get_name()}_FP8_EMULATED"  # type: ignore[misc]

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        """Attention of new tokens to each other; see the class."""
        run: Any = super().run_prefill_new_tokens  # type: ignore[misc]
        return run(*self._wide(q, k, v), *args, **kwargs)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Attention of new tokens to a chunk of their context; see the class."""
        run: Any = super().run_prefill_context_chunk  # type: ignore[misc]
        return run(chunk, *self._wide(q, k, v), *args, **kwargs)

    def _wide(self, *tensors: Any) -> tuple[Any, ...]:
        import torch

        fp8 = [t.dtype == torch.float8_e4m3fn for t in tensors]
        if not any(fp8):
            return tensors
        if not all(fp8):  # an fp8 kernel would read the one as the other
            dtypes = ", ".join(str(t.dtype) for t in tensors)
            raise TypeError(f"fp8 prefill: q, k and v are {dtypes}; expected one dtype")
        TALLY.count_upcast()
        dtype = self._prefill_metadata.output_dtype
        return tuple(t.to(dtype) for t in tensors)
