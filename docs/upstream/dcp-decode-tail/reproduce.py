"""Reproduce: several query tokens of a request in vLLM's FLASH_ATTN_MLA decode under DCP.

    python reproduce.py                              # vLLM 0.33 on one Hopper GPU
    python reproduce.py --device cpu [--fault NAME]  # attention in torch: checks this script

One process plays every rank. Keys are sharded over ranks (key ``p`` is on rank ``p % D``) and laid
into pages; ``flash_attn_varlen_func`` is called for each rank as ``FlashAttnMLAImpl.forward_mqa``
calls it, and vLLM's ``correct_attn_out`` merges what comes out. Each rank's output and LSE are
compared with float64 attention over that rank's keys under the global causal mask, the merged
output with float64 attention over all keys. So a wrong mask, an LSE in another layout and a wrong
merge are told apart; ``engine.py`` asks what is left, the layers around them.

Exits with 1 while an output or an LSE is off beyond roundings, with 2 where a case didn't run or
nothing can (no Hopper GPU, no vLLM), else with 0.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LATENT, ROPE, PAGE, TABLE = 512, 64, 16, 4096
SCALE = (128 + ROPE) ** -0.5
OUTPUT_OFF, LSE_OFF = 0.02, 1e-3
"""Roundings of bf16 explain an output's relative rms of 2**-8 or so; an LSE is a float32 sum."""
STALE = 50.0
"""What cache rows hold that belong to nobody."""
CHUNK = 1 << 26
"""Scores of this many elements at a time."""


@dataclass(frozen=True)
class Case:
    """A call: requests as pairs of query tokens and context, and how it is made."""

    requests: tuple[tuple[int, int], ...]
    heads: int = 4
    ranks: int = 2
    page: int = PAGE
    metadata: bool = True
    splits: int = 0
    packed: bool = True

    def __str__(self) -> str:
        """Return the columns of the table."""
        asked = " ".join(f"{tokens}@{context}" for tokens, context in self.requests)
        how = "" if self.page == PAGE else f" page={self.page}"
        how += "" if self.metadata else " no-metadata"
        how += f" splits={self.splits}" if self.splits else ""
        how += "" if self.packed else " q-apart"
        return f"D={self.ranks} H={self.heads:<3} {asked}{how}"


def cases(context: int) -> list[Case]:
    """Return what is asked, D = 1 as the control; ``context`` is the long one."""
    steps = [((t, context),) for t in (1, 2, 69, 106, 254)]
    steps += [((106, 2 * context),), ((254, 0),), ((2, 0),)]
    asked = [Case(step, ranks=ranks) for ranks in (1, 2, 4) for step in steps]
    some = (steps[0], steps[3], steps[4])
    asked += [Case(step, heads=16, ranks=ranks) for ranks in (1, 2) for step in some]
    asked += [Case(step, heads=128) for step in some]
    base = Case(steps[3])
    asked += [
        replace(base, metadata=False),
        replace(base, splits=1),
        replace(base, splits=1, metadata=False),
        replace(base, page=64),
        replace(base, page=64, metadata=False),
        replace(base, packed=False),
        replace(base, requests=((1, 40), (69, context), (254, 0), (1, context), (300, 77))),
    ]
    return asked


@dataclass(frozen=True)
class Batch:
    """A case's operands: queries ``[T, H, 576]``, and each request's keys ``[N, 576]``, in bf16."""

    case: Case
    queries: Tensor
    keys: tuple[Tensor, ...]
    offsets: tuple[int, ...]


def draw(case: Case, device: str) -> Batch:
    """Draw a batch; the last keys weigh more, as they do in a model of texts."""
    source = torch.Generator().manual_seed(0)
    offsets = [0]
    for tokens, _ in case.requests:
        offsets.append(offsets[-1] + tokens)
    queries = torch.randn(offsets[-1], case.heads, LATENT + ROPE, generator=source)
    queries[..., -1] = 8
    keys = []
    for tokens, context in case.requests:
        rows = torch.randn(context + tokens, LATENT + ROPE, generator=source)
        rows[:, -1] = 0
        rows[-tokens - 64 :, -1] = 10
        keys.append(rows.to(device, torch.bfloat16))
    return Batch(case, queries.to(device, torch.bfloat16), tuple(keys), tuple(offsets))


def masks(case: Case, tokens: int, length: int, rank: int, heads: Tensor) -> dict[str, Tensor]:
    """Return which local keys a rank's kernel might show, ``[T, n]`` or ``[H, T, n]``, by name.

    ``global`` is right. ``local`` ignores the ranks and aligns the local keys' end with the
    queries', ``half`` takes the local length for the total, ``packed-row`` takes the row of token
    and head for the token, ``rank-0`` ignores the rank, ``strict`` hides a token's own key.
    """
    i = torch.arange(tokens, device=heads.device)[:, None]
    j = torch.arange(len(range(rank, length, case.ranks)), device=heads.device)[None]
    position, last, short = j * case.ranks + rank, length - tokens + i, j.shape[1] - tokens + i
    return {
        "global": position <= last,
        "local": j <= short,
        "half": position <= short,
        "none": (j >= 0) & (i >= 0),
        "packed-row": position <= length - tokens + i * case.heads + heads[:, None, None],
        "rank-0": position - rank <= last,
        "strict": position < last,
    }


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, H, 512]`` and LSEs ``[T, H]`` of masked scores ``[H, T, N]``."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return (weights @ values).transpose(0, 1), lse.T


@dataclass
class Reference:
    """Float64: the merged output ``[T, H, 512]``, and each rank's output and LSE ``[D, T, H]``."""

    merged: Tensor
    outputs: Tensor
    lses: Tensor
    guesses: dict[str, Tensor]


def reference(batch: Batch) -> Reference:
    """Compute it, heads and requests apart; ``guesses`` are the LSEs under each mask."""
    case = batch.case
    shape = (case.ranks, *batch.queries.shape[:2])
    wide = {"dtype": torch.float64, "device": batch.queries.device}
    made = Reference(
        torch.empty(*shape[1:], LATENT, **wide),
        torch.empty(*shape, LATENT, **wide),
        torch.empty(*shape, **wide),
        {},
    )
    for keys, start, end in zip(batch.keys, batch.offsets, batch.offsets[1:], strict=False):
        tokens, length = end - start, len(keys)
        rows = keys.double()
        step = max(1, CHUNK // (tokens * length))
        i = torch.arange(tokens, device=keys.device)[:, None]
        for h in range(0, case.heads, step):
            part = slice(h, min(h + step, case.heads))
            scores = batch.queries[start:end, part].double().transpose(0, 1) @ rows.T * SCALE
            causal = torch.arange(length, device=keys.device) <= length - tokens + i
            seen = scores.masked_fill(~causal, -torch.inf)
            made.merged[start:end, part] = attend(seen, rows[:, :LATENT])[0]
            head = torch.arange(part.start, part.stop, device=keys.device)
            for rank in range(case.ranks):
                local, mine = scores[..., rank :: case.ranks], rows[rank :: case.ranks, :LATENT]
                for name, shown in masks(case, tokens, length, rank, head).items():
                    kept = local.masked_fill(~shown, -torch.inf)
                    lses = made.guesses.setdefault(name, torch.empty_like(made.lses))
                    lses[rank, start:end, part] = torch.logsumexp(kept, -1).T
                    if name == "global":
                        made.outputs[rank, start:end, part] = attend(kept, mine)[0]
    made.lses.copy_(made.guesses["global"])
    return made


def paged(batch: Batch, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's cache ``[pages, page, 576]``, its block table and its lengths."""
    case, device = batch.case, batch.queries.device
    shards = [keys[rank :: case.ranks] for keys in batch.keys]
    counts = [-(-len(shard) // case.page) for shard in shards]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
    shape = (sum(counts) + 1, case.page, LATENT + ROPE)
    cache = torch.full(shape, STALE, dtype=torch.bfloat16, device=device)
    table = torch.zeros(len(shards), TABLE, dtype=torch.int32, device=device)
    for row, (shard, pages) in enumerate(zip(shards, order.split(counts), strict=True)):
        table[row, : len(pages)] = pages.to(device, torch.int32)
        room = torch.full((len(pages) * case.page, LATENT + ROPE), STALE, device=device).bfloat16()
        room[: len(shard)] = shard
        cache[pages.to(device)] = room.view(-1, *shape[1:])
    lengths = torch.tensor([len(s) for s in shards], dtype=torch.int32, device=device)
    return cache, table, lengths


def by_flash_attention(batch: Batch, rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's output ``[T, H, 512]`` and its LSE as it comes, called as vLLM calls it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    case, device = batch.case, batch.queries.device
    cache, table, lengths = paged(batch, rank)
    whole = torch.tensor([len(k) for k in batch.keys], dtype=torch.int32, device=device)
    offsets = torch.tensor(batch.offsets, dtype=torch.int32, device=device)
    longest = {
        "max_seqlen_q": max(tokens for tokens, _ in case.requests),
        "max_seqlen_k": -(-max(len(k) for k in batch.keys) // case.ranks),
    }
    metadata = None
    if case.metadata:
        metadata = get_scheduler_metadata(
            batch_size=len(batch.keys),
            num_heads_q=case.heads,
            num_heads_kv=1,
            headdim=ROPE,
            cache_seqlens=lengths,
            qkv_dtype=torch.bfloat16,
            headdim_v=LATENT,
            page_size=case.page,
            cu_seqlens_q=offsets,
            causal=True,
            num_splits=case.splits,
            **longest,
        )
    latent, rope = batch.queries.split((LATENT, ROPE), -1)
    if not case.packed:
        latent, rope = latent.contiguous(), rope.contiguous()
    out, lse = flash_attn_varlen_func(
        q=rope,
        k=cache[..., LATENT:].unsqueeze(-2),
        v=cache[..., :LATENT].unsqueeze(-2),
        q_v=latent,
        cu_seqlens_q=offsets,
        seqused_k=lengths,
        block_table=table,
        softmax_scale=SCALE,
        causal=True,
        return_softmax_lse=True,
        fa_version=3,
        scheduler_metadata=metadata,
        num_splits=case.splits,
        cp_world_size=case.ranks,
        cp_rank=rank,
        cp_tot_seqused_k=whole if case.ranks > 1 else None,
        **longest,
    )
    return out, lse


def in_torch(batch: Batch, rank: int, fault: str) -> tuple[Tensor, Tensor]:
    """Return the same from torch, through the pages, with a mask or an LSE layout of ``fault``."""
    case = batch.case
    cache, table, lengths = paged(batch, rank)
    out = torch.empty(*batch.queries.shape[:2], LATENT, dtype=torch.bfloat16)
    lse = torch.empty(batch.queries.shape[:2])
    for r, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        n, length = int(lengths[r]), len(batch.keys[r])
        rows = cache[table[r, : -(-n // case.page)].long()].flatten(0, 1)[:n].float()
        scores = batch.queries[start:end].float().transpose(0, 1) @ rows.T * SCALE
        known = masks(case, end - start, length, rank, torch.arange(case.heads))
        kept = scores.masked_fill(~known.get(fault, known["global"]), -torch.inf)
        made, sums = attend(kept, rows[:, :LATENT])
        out[start:end], lse[start:end] = made.bfloat16(), sums
    if fault == "lse-layout":  # memory as [T, H], shape as [H, T]
        return out, lse.contiguous().view(case.heads, -1)
    return out, lse.T.contiguous()


def without_keys(batch: Batch, rank: int, lse: Tensor) -> Tensor:
    """Return ``[T, H]``, -inf for requests without a key on the rank and for what isn't finite.

    vLLM does the first in ``mask_dcp_empty_shards_`` and the second in ``correct_attn_out``.
    """
    lse = torch.where(lse.isfinite(), lse, -torch.inf).contiguous()
    for keys, start, end in zip(batch.keys, batch.offsets, batch.offsets[1:], strict=False):
        if len(keys) <= rank:
            lse[start:end] = -torch.inf
    return lse


def merge(outputs: Tensor, lses: Tensor) -> Tensor:
    """Merge ranks' outputs ``[D, T, H, 512]`` by their LSEs ``[D, T, H]``, in float64."""
    weights = torch.softmax(lses.double(), 0).nan_to_num(0.0)[..., None]
    return torch.where(weights == 0, 0.0, outputs.double() * weights).sum(0)


def merge_by_vllm(outputs: Tensor, lses: Tensor) -> Tensor:
    """Merge them by what every rank runs, and add up what they would reduce and scatter."""
    from vllm.v1.attention.ops.dcp import CPTritonContext, correct_attn_out

    parts = [
        correct_attn_out(out.clone(), lses, rank, CPTritonContext())[0]
        for rank, out in enumerate(outputs)
    ]
    return torch.stack(parts).double().sum(0)


def apart(found: Tensor, expected: Tensor) -> Tensor:
    """Return |difference|, 0 where both are the same infinity, infinite where one is a NaN."""
    gap = (found.double() - expected).abs()
    gap = torch.where(found.double() == expected, 0.0, gap)
    return gap.nan_to_num(nan=torch.inf, posinf=torch.inf)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the rms of the difference over the rms of what is expected; of nothing, 0."""
    if not expected.numel():
        return 0.0
    return float(apart(found, expected).square().mean().sqrt() / expected.square().mean().sqrt())


def judge(batch: Batch, device: str, fault: str) -> tuple[str, set[str]]:
    """Run a case; its line of the table, and the names of what is wrong in it."""
    case, expected = batch.case, reference(batch)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        return by_flash_attention(batch, rank) if device == "cuda" else in_torch(batch, rank, fault)

    outputs = torch.stack([run(r)[0] for r in range(case.ranks)])
    again, raw = zip(*[run(r) for r in range(case.ranks)], strict=True)
    lses = torch.stack([without_keys(batch, r, x.T) for r, x in enumerate(raw)])
    turned = [x.contiguous().view(x.shape[1], x.shape[0]) for x in raw]
    other = torch.stack([without_keys(batch, r, x) for r, x in enumerate(turned)])
    wrong: set[str] = set()
    if any(not torch.equal(x, y) for x, y in zip(outputs, again, strict=True)):
        wrong.add("repeats differ")
    has_keys = expected.lses > -torch.inf
    ranks = []
    for r in range(case.ranks):
        lse_gap = float(apart(lses[r], expected.lses[r]).max())
        out_gap = relative(outputs[r][has_keys[r]], expected.outputs[r][has_keys[r]])
        fits = {k: float(apart(lses[r], v[r]).max()) for k, v in expected.guesses.items()}
        fits["lse-layout"] = float(apart(other[r], expected.lses[r]).max())
        best = min(fits, key=lambda k: fits[k])
        best = best if fits[best] <= LSE_OFF else "nothing"
        ranks.append(f"{lse_gap:8.1e} {out_gap:8.1e} {best}")
        wrong |= {"lse"} if lse_gap > LSE_OFF else set()
        wrong |= {"out"} if out_gap > OUTPUT_OFF else set()
    merged = {"plain": merge(outputs, lses), "turned": merge(outputs, other)}
    if device == "cuda":
        merged["vllm"] = merge_by_vllm(outputs, lses)
    off = {k: relative(v, expected.merged) for k, v in merged.items()}
    wrong |= {"merged"} if off["plain"] > OUTPUT_OFF else set()
    wrong |= {"vllm's merge"} if off.get("vllm", 0.0) > OUTPUT_OFF else set()
    judged = merged.get("vllm", merged["plain"])
    line = f"{off.get('vllm', torch.nan):8.1e} {off['plain']:8.1e} {off['turned']:8.1e}"
    line += f" {float(apart(judged, expected.merged).max()):8.1e} | {' | '.join(ranks)}"
    if wrong:
        rows = apart(judged, expected.merged).amax((1, 2)).tolist()
        spots = sorted({0, 1, len(rows) // 4, len(rows) // 2, 3 * len(rows) // 4, len(rows) - 1})
        shown = ", ".join(f"{i}: {rows[i]:.2g}" for i in spots if i < len(rows))
        line += f"\n    WRONG: {', '.join(sorted(wrong))}; largest by query token {shown}"
    return line, wrong


def conclude(found: dict[Case, set[str]]) -> str:
    """Say what the table decides."""
    alone = {what for case, wrong in found.items() for what in wrong if case.ranks == 1}
    shared = {what for case, wrong in found.items() for what in wrong if case.ranks > 1}
    if alone:
        return f"wrong without DCP too ({', '.join(sorted(alone))}): not a matter of DCP alone"
    if {"lse", "out"} & shared:
        return "a rank's own result is wrong: the kernel or its arguments; see what its LSE fits"
    if shared:
        return "each rank's result is right, what is made of it is not: the merge"
    return "every rank and the merge are right: look around them (engine.py)"


def refusal() -> str | None:
    """Say why no case can run here, if none can."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:  # noqa: PLR2004
        return "no Hopper GPU: FLASH_ATTN_MLA runs on no other"
    try:
        from vllm.vllm_flash_attn import is_fa_version_supported

        return None if is_fa_version_supported(3) else "this vLLM has no FlashAttention 3"
    except ImportError as error:
        return f"no vLLM: {error}"


def main(arguments: list[str]) -> int:
    """Print the table and what it decides."""
    parser = argparse.ArgumentParser(description="several query tokens under DCP")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--fault", default="", help="with --device cpu: a mask, or lse-layout")
    asked = parser.parse_args(arguments)
    why = refusal() if asked.device == "cuda" else None
    if why:
        print(f"NOT RUN: {why}")
        return 2
    print(
        "relative rms of the merged output: by vLLM, plain, with LSEs turned; its largest |error|"
    )
    print("then each rank: |LSE error|, output's relative rms, the mask that its LSE fits")
    found: dict[Case, set[str]] = {}
    failed = 0
    for case in cases(16_384 if asked.device == "cuda" else 160):
        if asked.device == "cpu" and case.heads > 16:  # noqa: PLR2004
            continue
        try:
            line, found[case] = judge(draw(case, asked.device), asked.device, asked.fault)
        except Exception as error:  # noqa: BLE001 - one case must not hide the others
            line, failed = f"RAISED {type(error).__name__}: {error}".splitlines()[0], failed + 1
        print(f"{case!s:<42} {line}", flush=True)
    print(f"{sum(map(bool, found.values()))} of {len(found)} cases wrong, {failed} not run")
    print(conclude(found))
    return 1 if any(found.values()) else 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
