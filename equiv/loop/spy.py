"""The pack under test, watched: what it got, what it gave back, and whether that arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from equiv.loop import payload, world
from equiv.loop.result import Finding

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(tensor: Tensor) -> Any:
    """Return a tensor's elements as unsigned integers of its item size."""
    host = tensor.detach().cpu().contiguous()
    flat = host.view(torch.uint8).numpy().view(_UINT[tensor.element_size()])
    return flat.reshape(tuple(tensor.shape))


def digest(*tensors: Tensor) -> str:
    """Return the xxh3-128 of the tensors' bytes, one after another."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Spy:
    """A pack that notes what it got, and whether its results arrived."""

    def __init__(
        self,
        pack: Callable[..., Any],
        made: world.World,
        stock_seen: list[tuple[Tensor, Tensor]],
    ) -> None:
        self._pack = pack
        self._stock = stock_seen
        self._world = made
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._problem = ""
        self._difference = ""

    def __call__(self, kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Any:  # noqa: FBT001
        """Call the pack as the loop calls it."""
        case = self._world.case
        dtype = payload.TORCH[case.dtype]
        if kv_nope.dtype != dtype or k_pe.dtype != dtype:
            self._problem = f"got {kv_nope.dtype} and {k_pe.dtype}, expected the un-cast {dtype}"
        if bool(use_fp8) != bool(case.fp8):
            self._problem = f"got use_fp8={use_fp8}, expected {bool(case.fp8)}"
        if kv_nope.shape[0] != k_pe.shape[0] or k_pe.shape[1] != 1:
            self._problem = f"got shapes {tuple(kv_nope.shape)} and {tuple(k_pe.shape)}"
        before = digest(kv_nope, k_pe)
        try:
            result = self._pack(kv_nope, k_pe, use_fp8)
        except SystemExit as error:  # else the run would end here, with the pack's exit code
            raise Finding("raised", f"the pack raised SystemExit({error})") from None
        if digest(kv_nope, k_pe) != before:
            raise Finding("input_changed", "the pack changed the projection or the gathered key")
        k, v = result
        self._compare(k, v)
        self._calls.append((k, v))
        return result

    def _compare(self, k: Any, v: Any) -> None:
        """Hold key and value against the stock ones now: a pack may use its buffers again."""
        index = len(self._calls)
        if self._difference or index >= len(self._stock):
            return
        for name, ours, theirs in zip("kv", (k, v), self._stock[index], strict=True):
            if not isinstance(ours, Tensor):
                return  # vLLM itself stumbles over it
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
                got, expected = ((t.dtype, tuple(t.shape)) for t in (ours, theirs))
                self._difference = f"chunk {index}: {name} is {got}, stock's {expected}"
                return
            if not np.array_equal(bits(ours), bits(theirs)):
                self._difference = f"chunk {index}: {name} has other bytes than stock"
                return

    def check(self, chunks: int) -> None:
        """Raise ``Finding`` unless it was called for each chunk and its results were used.

        The backend widens nothing that it keeps, so the tensors it got are the pack's own; the
        operands are right when the pack's key and value have the stock tail's bytes.
        """
        if self._problem:
            raise Finding("wrong_operands", self._problem)
        if len(self._calls) != chunks:
            raise Finding("not_run", f"{len(self._calls)} packs for {chunks} context chunks")
        for index, ((k, v), (seen_k, seen_v)) in enumerate(
            zip(self._calls, self._world.backend.seen, strict=True),
        ):
            if k is not seen_k or v is not seen_v:
                raise Finding("dropped", f"chunk {index}: the backend got other tensors")
        if self._difference:
            raise Finding("divergence", self._difference)
