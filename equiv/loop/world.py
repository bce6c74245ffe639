"""A case made real in one process: paged caches of all ranks, vLLM's metadata, served peers.

One rank's loop runs. The other ranks' shards are served inside the gather: each peer's rows are
gathered from its own pool, by vLLM's own gather with the peer's own metadata, where a collective
would bring them. Everything that a correct loop doesn't read is NaN: the pools' unused pages and
slots, the workspace, and, around the workspace, rows with a known pattern that nobody may write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equiv.loop.case import DIMS, LoopCase
from equiv.loop.payload import TORCH, Payload
from kvroute.switch import LOOP

GUARD_ROWS = 8
"""Rows on either side of the workspace."""
GUARD_BYTE = 0xA5
POISON = (float("nan"), 0x7F)
"""What fills rows that must not be read: a float, and an e4m3 byte (7F is its NaN)."""
SPARE_BLOCKS = 3
"""Pages of the pool that no request owns, beside page 0, vLLM's null block."""


@dataclass
class World:
    """What the loop is called with.

    Attributes
    ----------
    impl : the attention implementation whose loop runs.
    pools : ``[D, blocks, page, latent + rope]``, one paged cache for each rank.
    metadata : of every rank, as vLLM's builder makes it.
    backend : the prefill backend, which keeps the keys and values that it was given.
    query : as in the payload, on the case's device.
    scale : softmax scale.
    arena : workspace with its guard rows, as bytes.

    """

    case: LoopCase
    impl: Any
    pools: Tensor
    metadata: list[Any]
    backend: Any
    query: Tensor
    k_scale: Tensor
    scale: float
    arena: Tensor
    workspace: Tensor
    served: list[int] = field(default_factory=list)

    def poison(self) -> None:
        """Fill the workspace with NaN and the rows around it with the guard pattern."""
        self.arena.fill_(GUARD_BYTE)
        self.workspace.fill_(POISON[0])
        self.served.clear()

    def guards_intact(self) -> bool:
        """Whether nobody wrote beside the workspace."""
        rows = self.arena.view(-1, self.workspace.shape[1] * self.workspace.element_size())
        edges = (rows[:GUARD_ROWS], rows[-GUARD_ROWS:])
        return all(bool((edge == GUARD_BYTE).all()) for edge in edges)

    def call(self, keyword: str | None, pack: Any) -> tuple[Tensor, Tensor]:
        """Run vLLM's loop on the case's rank; with a pack under ``keyword``, or without.

        Under torch's deterministic mode fresh tensors are filled with NaN, so that an element
        that nobody writes shows.
        """
        extra = {} if keyword is None else {keyword: pack}
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            loop = getattr(self.impl, LOOP)
            out, lse = loop(
                self.query,
                self.pools[self.case.rank],
                self.metadata[self.case.rank],
                k_scale=self.k_scale,
                dcp_world_size=self.case.ranks,
                **extra,
            )
        finally:
            torch.use_deterministic_algorithms(False)
        return out, lse


class Projection:
    """A column-parallel linear layer as the loop sees it: ``weight``, and a call.

    ``y = x @ weight.T`` in the model's dtype. A plain one refuses rows of another dtype, as
    torch does; with an fp8 weight it takes the model's dtype, or under fp8 prefill fp8 alone.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, *, fp8_rows: bool) -> None:
        self.weight = weight
        self.params_dtype = dtype
        self._rows = torch.float8_e4m3fn if fp8_rows else dtype
        self._wide = weight.to(dtype)

    def __call__(self, rows: Tensor) -> tuple[Tensor, None]:
        """Project ``[n, (1,) latent]``."""
        if rows.dtype != self._rows:
            raise TypeError(f"projection takes {self._rows} rows, got {rows.dtype}")
        return torch.nn.functional.linear(rows.to(self._wide.dtype), self._wide), None


def build(case: LoopCase, payload: Payload) -> World:
    """Make the world of a case.

    Raises
    ------
    AssertionError
        vLLM's own, from its metadata builder.

    """
    from vllm.model_executor.layers.attention import mla_attention as mla

    latent, nope, rope, value = DIMS[case.dims]
    device = torch.device(case.device)
    dtype = TORCH[case.dtype]
    width = latent + rope
    scale = (nope + rope) ** -0.5
    table, rows = _place(case)
    pools = _pools(case, payload.latents, table, rows).to(device)
    total = case.workspace + case.workspace // case.ranks
    size = dtype.itemsize * width
    arena = torch.empty((total + 2 * GUARD_ROWS) * size, dtype=torch.uint8, device=device)
    inner = arena[GUARD_ROWS * size : (GUARD_ROWS + total) * size]
    workspace = inner.view(dtype).view(total, width)
    projection = Projection(
        payload.weight.to(device),
        dtype,
        fp8_rows=case.proj == "fp8" and bool(case.fp8),
    )
    backend = _backend(case.heads, scale, (latent, nope, rope, value), dtype, case.pad)
    starts = np.cumsum([0, *(query for query, _ in case.requests)]).tolist()
    world = World(
        case=case,
        impl=_impl(case, projection, scale),
        pools=pools,
        metadata=[],
        backend=backend,
        query=payload.query.to(device),
        k_scale=torch.tensor(float(case.k_scale), dtype=torch.float32, device=device),
        scale=scale,
        arena=arena,
        workspace=workspace,
    )
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    offsets = torch.tensor(starts, dtype=torch.int32)
    for rank in range(case.ranks):
        chunked = mla.build_mla_chunked_context_metadata(
            context_lens_cpu=contexts,
            prefill_query_start_loc_cpu=offsets,
            chunked_prefill_workspace=workspace,
            chunked_prefill_workspace_size=case.workspace,
            block_size=case.page,
            align_chunk_to_block=True,
            device=device,
            dcp_world_size=case.ranks,
            dcp_local_block_size=case.interleave,
            dcp_virtual_block_size=case.interleave * case.ranks,
            dcp_manager=_manager(world, rank),
        )
        prefill = mla.MLACommonPrefillMetadata(
            block_table=torch.from_numpy(table).to(device),
            query_start_loc=offsets.to(device),
            max_query_len=max(query for query, _ in case.requests),
            chunked_context=chunked,
            q_data_type=torch.float8_e4m3fn if case.fp8 else dtype,
            output_dtype=dtype,
            prefill_backend=backend,
        )
        world.metadata.append(SimpleNamespace(prefill=prefill))
    return world


def _place(case: LoopCase) -> tuple[np.ndarray, np.ndarray]:
    """Give every context token a place.

    Token ``p`` is the ``p // I``-th run of ``I`` tokens; runs go round the ranks. So it lives on
    rank ``run % D``, there at ``run // D * I + p % I``, and that row is in page ``row // page`` of
    the request's table.

    Returns
    -------
    table : int32 ``[requests, blocks]``, the same on all ranks, pages in a drawn order.
    rows : int64 ``[tokens]``, numbered over all ranks' pools.

    """
    per_block = case.page * case.ranks
    needed = [-(-context // per_block) for context in case.contexts]
    blocks = 1 + sum(needed) + SPARE_BLOCKS
    order = np.random.Generator(np.random.Philox(case.seed + 1)).permutation(blocks - 1) + 1
    table = np.zeros((len(needed), max(needed)), dtype=np.int32)
    rows, used = [], 0
    for request, count in enumerate(needed):
        table[request, :count] = order[used : used + count]
        used += count
        position = np.arange(case.contexts[request])
        run, inside = position // case.interleave, position % case.interleave
        local = run // case.ranks * case.interleave + inside
        block = table[request, local // case.page].astype(np.int64)
        rows.append((run % case.ranks * blocks + block) * case.page + local % case.page)
    return table, np.concatenate(rows)


def _pools(case: LoopCase, latents: Tensor, table: np.ndarray, rows: np.ndarray) -> Tensor:
    per_block = case.page * case.ranks
    blocks = 1 + sum(-(-c // per_block) for c in case.contexts) + SPARE_BLOCKS
    del table
    # torch can't index-assign every fp8 tensor; bytes it can.
    raw = latents.view(torch.uint8) if case.cache == "fp8" else latents
    poison = POISON[case.cache == "fp8"]
    flat = raw.new_full((case.ranks * blocks * case.page, raw.shape[1]), poison)
    flat[torch.from_numpy(rows)] = raw
    pools = flat.view(case.ranks, blocks, case.page, -1)
    return pools.view(torch.float8_e4m3fn) if case.cache == "fp8" else pools


def _manager(world: World, rank: int) -> Any:
    """Return vLLM's manager of one rank, whose collective is served from all ranks' pools."""
    from vllm.v1.attention.ops.dcp import MLADCPManager

    manager = object.__new__(MLADCPManager)
    manager.group = SimpleNamespace(world_size=world.case.ranks, rank_in_group=rank)

    def serve(gathered: Tensor, local: Tensor) -> None:
        chunk = len(world.served)
        world.served.append(local.shape[0])
        for peer in range(world.case.ranks):
            into = gathered[peer * local.shape[0] : (peer + 1) * local.shape[0]]
            if peer == rank:
                into.copy_(local)
            else:
                _gather(world, peer, chunk, into)

    manager._kv_gather = serve
    return manager


def _gather(world: World, peer: int, index: int, into: Tensor) -> None:
    """Gather what ``peer`` would send for its chunk ``index``, by vLLM's op, as the loop does."""
    from vllm import _custom_ops as ops

    prefill = world.metadata[peer].prefill
    chunk = prefill.chunked_context.chunks[index]
    if chunk.num_local_context_tokens != into.shape[0]:
        raise RankMismatch(
            f"chunk {index}: rank {peer} sends {chunk.num_local_context_tokens} rows, "
            f"rank {world.case.rank} expects {into.shape[0]}",
        )
    table = prefill.block_table[chunk.request_slice]
    if world.case.cache == "fp8":
        ops.gather_and_maybe_dequant_cache(
            src_cache=world.pools[peer],
            dst=into,
            block_table=table,
            cu_seq_lens=chunk.padded_local_cu_seq_lens,
            token_to_seq=chunk.padded_local_token_to_seq,
            num_tokens=into.shape[0],
            kv_cache_dtype="fp8",
            scale=world.k_scale,
            seq_starts=chunk.starts,
        )
    else:
        ops.cp_gather_cache(
            src_cache=world.pools[peer],
            dst=into,
            block_table=table,
            cu_seq_lens=chunk.padded_local_cu_seq_lens,
            batch_size=chunk.num_requests,
            seq_starts=chunk.starts,
        )


class RankMismatch(Exception):
    """Two ranks' metadata disagree: a collective would hang, or read beside its rows."""


def _impl(case: LoopCase, projection: Projection, scale: float) -> Any:
    latent, nope, rope, value = DIMS[case.dims]
    impl = _impl_class()(
        num_heads=case.heads,
        head_size=latent + rope,
        scale=scale,
        num_kv_heads=1,
        kv_cache_dtype="auto" if case.cache == "auto" else "fp8",
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        qk_head_dim=nope + rope,
        v_head_dim=value,
        kv_b_proj=projection,
    )
    impl._use_flashinfer_concat_mla_k = False  # noqa: SLF001 - what vLLM's CPU backend sets
    impl.dcp_world_size = case.ranks
    return impl


@lru_cache(maxsize=1)
def _impl_class() -> Any:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

    class LoopImpl(MLACommonBaseImpl):  # type: ignore[misc]
        """vLLM's shared implementation with nothing of its own: decode isn't what is tested."""

        def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    return LoopImpl


def _backend(
    heads: int,
    scale: float,
    dims: tuple[int, int, int, int],
    dtype: torch.dtype,
    pad: int,
) -> Any:
    latent, nope, rope, value = dims
    return _backend_class()(
        num_heads=heads,
        scale=scale,
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        vllm_config=None,
    ).configure(dtype, pad)


@lru_cache(maxsize=1)
def _backend_class() -> Any:
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    class LoopBackend(CPUSDPAMLAPrefillBackend):  # type: ignore[misc]
        """vLLM's torch backend, which keeps what it was given.

        An fp8 value is widened, which is exact, so that the output comes in the model's dtype,
        as from a backend with fp8 kernels. ``pad`` columns between heads model backends that
        pad theirs; continuations get them, so that the two sides of a merge differ.
        """

        def configure(self, dtype: torch.dtype, pad: int) -> Any:
            """Set the output's dtype and padding; returns the backend."""
            self.dtype, self.pad = dtype, pad
            self.seen: list[tuple[Tensor, Tensor]] = []
            return self

        def run_prefill_context_chunk(
            self,
            chunk: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            self.seen.append((k, v))
            result, lse = super().run_prefill_context_chunk(chunk, q, k, v.to(self.dtype), out)
            if self.pad and chunk.is_continuation:
                tokens, heads, width = result.shape
                wide = result.new_full((tokens, heads, width + self.pad), float("nan"))
                wide[..., :width] = result
                result = wide[..., :width]
            return result, lse

    return LoopBackend
