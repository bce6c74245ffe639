"""vLLM's loop, through the public functions of the loop layer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from equiv import evidence  # noqa: E402
from equiv.errors import ExitCode, UsageError  # noqa: E402
from equiv.loop import api, campaign, faults, harmless, lanes, payload, reference, world  # noqa: E402
from equiv.loop.case import LoopCase  # noqa: E402
from equiv.loop.run import pack_keyword, run  # noqa: E402
from equiv.profiles import profile_of  # noqa: E402
from kvroute.faults.loop_faults import EDITS  # noqa: E402
from kvroute.packs import cat_pack  # noqa: E402

MIXED = LoopCase("ragged", 2, 1, 1, 16, 2, 96, ((3, 545), (1, 0), (2, 3), (5, 0)), seed=1)


@pytest.fixture(autouse=True, scope="module")
def _ready() -> None:
    api.prepare("cpu", ())


VARIANTS = [
    {},
    {"dtype": "bf16"},
    {"dtype": "fp16", "ranks": 3, "rank": 2},
    {"ranks": 8, "rank": 3, "interleave": 16, "workspace": 256},
    {"cache": "fp8", "k_scale": "3.7"},
    {"dtype": "bf16", "cache": "fp8", "fp8": 1, "k_scale": "0.07"},
    {"dtype": "bf16", "fp8": 1, "proj": "fp8"},
    {"dims": "real", "heads": 12, "dtype": "bf16"},
]


@pytest.mark.parametrize("change", VARIANTS)
def test_the_pack_changes_nothing_and_the_loop_agrees_with_dense_attention(
    change: dict[str, Any],
) -> None:
    case = MIXED.with_(**change)
    result = run(case, cat_pack)
    assert (result.status, result.detail) == ("equal", "")
    assert 0 < result.worst < 1
    assert "no context" in result.kinds


@pytest.mark.parametrize("change", VARIANTS)
def test_without_a_pack_the_loop_gives_what_the_stock_statements_give(
    change: dict[str, Any],
) -> None:
    """Passing None, and passing the stock statements as a pack, are the same bytes."""
    case = MIXED.with_(**change)
    made = world.build(case, payload.make(case))

    def stock(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
        nope = kv_nope.shape[-1] // 2
        if use_fp8:
            kv_nope, k_pe = kv_nope.to(torch.float8_e4m3fn), k_pe.to(torch.float8_e4m3fn)
        k_nope, v = kv_nope.split([nope, nope], dim=-1)
        return made.impl._concat_k_nope_k_pe(k_nope, k_pe), v

    results = []
    for keyword, pack in ((None, None), (pack_keyword(), None), (pack_keyword(), stock)):
        made.poison()
        results.append(made.call(keyword, pack))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_pack_gets_the_uncast_projection_and_its_results_reach_the_backend() -> None:
    case = MIXED.with_(dtype="bf16", fp8=1)
    contents = payload.make(case)
    made = world.build(case, contents)
    seen = []

    def pack(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
        k, v = cat_pack(kv_nope, k_pe, use_fp8)
        seen.append((kv_nope, k_pe, use_fp8, k, v))
        return k, v

    made.poison()
    made.call(pack_keyword(), pack)
    assert len(seen) == len(made.metadata[0].prefill.chunked_context.chunks)
    for (kv_nope, k_pe, use_fp8, k, v), (at_k, at_v) in zip(seen, made.backend.seen, strict=True):
        assert kv_nope.dtype == k_pe.dtype == torch.bfloat16
        assert use_fp8 is True
        assert k is at_k
        assert v is at_v
    # The first chunk holds the first request's rows, gathered from both ranks, in rank order.
    first = seen[0][1].shape[0]
    rows = contents.values[:first, 32:]
    assert torch.equal(seen[0][1].squeeze(1), torch.cat((rows[0::2], rows[1::2])))


def wrong_row(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
    k, v = cat_pack(kv_nope, k_pe, use_fp8)
    k[-1, -1, -1] += 1
    return k, v


def raises(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
    raise RuntimeError("no such shape")


def changes_the_projection(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
    k, v = cat_pack(kv_nope, k_pe, use_fp8)
    v[0] = 0
    return k, v


def changes_its_operands(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
    k, v = cat_pack(kv_nope, k_pe, use_fp8)
    k_pe.zero_()
    return k, v.clone()


def ends_the_process(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("pack", "status"),
    [
        (wrong_row, "divergence"),
        (raises, "raised"),
        (ends_the_process, "raised"),
        (changes_the_projection, "input_changed"),
        (changes_its_operands, "input_changed"),
    ],
)
def test_a_wrong_pack_is_found(pack: Any, status: str) -> None:
    assert run(MIXED, pack).status == status


def test_a_pack_may_give_out_the_same_buffer_again() -> None:
    """Each chunk's key is used up before the next one is packed."""
    buffers: dict[Any, Any] = {}

    def reuses(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
        k, v = cat_pack(kv_nope, k_pe, use_fp8)
        kept = buffers.setdefault(k.dtype, torch.zeros(1 << 20, dtype=k.dtype))
        out = kept[: k.numel()].view(k.shape)
        return out.copy_(k), v

    result = run(MIXED, reuses)
    assert (result.status, result.detail) == ("equal", "")
    assert result.chunks > 1


def test_another_dtype_is_told_as_one() -> None:
    def wide(kv_nope: Any, k_pe: Any, use_fp8: bool) -> Any:  # noqa: FBT001
        k, v = cat_pack(kv_nope, k_pe, use_fp8)
        return k.float(), v.float()

    result = run(MIXED.with_(dtype="bf16"), wide)
    assert result.status == "divergence"


def test_a_change_of_the_cache_that_the_second_call_takes_back_is_found() -> None:
    from kvroute.faults.edit import Edit

    module = "vllm.model_executor.layers.attention.mla_attention"
    loop = "MLACommonBaseImpl._context_parallel_compute_prefill_context"
    old = "    return output, output_lse"
    flip = "    kv_c_and_k_pe_cache.view(-1).view(torch.uint8)[0] ^= 1\n"
    undo = Edit("M", module, loop, old, flip + old).plant()
    try:
        assert run(MIXED, cat_pack).status == "input_changed"
    finally:
        undo()


STATEFUL = """
from kvroute.packs import cat_pack

calls = [0]


def every_second(kv_nope, k_pe, use_fp8):
    k, v = cat_pack(kv_nope, k_pe, use_fp8)
    calls[0] += 1
    if calls[0] % 2 == 0:
        k[0, 0, 0] += 1
    return k, v


def always(kv_nope, k_pe, use_fp8):
    k, v = cat_pack(kv_nope, k_pe, use_fp8)
    k[0, 0, 0] += 1
    return k, v
"""


@pytest.mark.parametrize("name", ["every_second", "always"])
def test_the_command_of_a_finding_repeats_it_in_a_fresh_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equiv.loop.confirm import confirm

    (tmp_path / "stateful_pack.py").write_text(STATEFUL)
    monkeypatch.syspath_prepend(tmp_path)
    spec = f"stateful_pack:{name}"
    pack, any_dims = api.load_pack(spec, "cpu")
    options = campaign.Options(
        pack,
        spec,
        "cpu",
        profile_of("dev"),
        0,
        lanes=("ragged",),
        any_dims=any_dims,
        first_only=True,
        draws=10,
        shrink=False,
    )
    done, _ = campaign.run_lanes(options)
    ((before,), (after,)) = (lane.findings for lane in (done[0], confirm(done, options)[0]))
    if name == "always":
        assert after == before
        assert "repro" in after.repro
    else:
        assert after.case == after.found
        assert "depends on what ran before" in after.detail
        assert after.repro == (f"bytegate loop --lane ragged --profile dev --seed 0 --pack {spec}")


def test_a_patch_that_fails_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"\A--patch: textwrap:dedent: the patch failed [^\n]+\Z"):
        api.prepare("cpu", ("textwrap:dedent",))


def test_a_supervisor_stops_a_run_as_ctrl_c_does() -> None:
    import signal

    from equiv import stopping

    for number in (signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        with stopping.as_interrupt(signal.SIGTERM, signal.SIGHUP), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert signal.getsignal(number) is before


def test_an_interrupted_engine_leaves_no_rank_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from equiv.loop import engine

    ended: list[int] = []
    asked: list[int] = []

    class Rank:
        returncode = None

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def poll(self) -> None:
            if not ended and len(asked) == 0:
                asked.append(1)
                raise KeyboardInterrupt

        def wait(self) -> int:
            return -9

        def kill(self) -> None:
            ended.append(1)

    monkeypatch.setattr(engine.subprocess, "Popen", Rank)
    with pytest.raises(KeyboardInterrupt):
        engine.launch(1, 0, "both", ranks=3)
    assert len(ended) == 3


def test_a_vllm_that_plans_nothing_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.attention import mla_attention as mla

    monkeypatch.setattr(mla, "build_mla_chunked_context_metadata", lambda **_: None)
    assert run(MIXED, cat_pack).status == "raised"
    assert run(MIXED.with_(pad=8), cat_pack).status == "raised"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("token_offset += num_tokens", "token_offset -= num_tokens"),
        ("local_token_offset += num_local_tokens", "local_token_offset -= num_local_tokens"),
        ("max_query_len=max(query_lens)", "max_query_len=min(query_lens)"),
        ("max_seq_len=max(plan.seq_lens)", "max_seq_len=max(plan.seq_lens) + 1"),
        ("query_start_loc[plan.request_start + 1],", "query_start_loc[plan.request_end],"),
        (
            "for length in query_lens)\n            and all(",
            "for length in query_lens)\n            and not all(",
        ),
    ],
)
def test_a_field_that_the_cpu_does_not_read_is_checked_all_the_same(old: str, new: str) -> None:
    from kvroute.faults.edit import Edit

    module = "vllm.model_executor.layers.attention.mla_attention"
    undo = Edit("M", module, "build_mla_chunked_context_metadata", old, new).plant()
    try:
        found = [run(case, cat_pack) for case in lanes.plan("edges", MIXED, dims="small").explicit]
    finally:
        undo()
    assert any(result.failed for result in found)
    assert not any(result.status == "divergence" for result in found)


def test_one_context_row_is_enough_to_be_outside_the_bound() -> None:
    """The bound isn't so wide that a lost row of 545 hides in it, in float32."""
    contents = payload.make(MIXED)
    scale = (16 + 8) ** -0.5
    whole = reference.dense(MIXED, contents, 7, scale)
    fewer = payload.Payload(
        torch.cat((contents.latents[:544], contents.latents[545:])),
        torch.cat((contents.values[:544], contents.values[545:])),
        torch.cat((contents.projected[:544], contents.projected[545:])),
        contents.query,
        contents.weight,
    )
    less = reference.dense(
        MIXED.with_(requests=((3, 544), (1, 0), (2, 3), (5, 0))), fewer, 7, scale
    )
    assert ((whole.lse - less.lse).abs()[:, :3] > whole.lse_bound[:, :3]).any()


@pytest.mark.parametrize("number", sorted(EDITS))
def test_a_planted_fault_is_caught_and_its_twin_is_not(number: str) -> None:
    options = campaign.Options(
        pack=cat_pack,
        name="fused",
        device="cpu",
        profile=profile_of("dev"),
        seed=0,
        lanes=faults.LANES,
        first_only=True,
        draws=100,
        shrink=False,
    )
    undo = EDITS[number].plant()
    try:
        done, _ = campaign.run_lanes(options)
    finally:
        undo()
    (finding,) = [f for lane in done for f in lane.findings]
    assert finding.kind != "raised" or finding.raised_in.startswith("vllm.")
    undo = EDITS[number].plant(clean=True)
    try:
        again = run(campaign_case(finding.case), cat_pack)
    finally:
        undo()
    assert not again.failed


def campaign_case(line: str) -> LoopCase:
    from equiv.loop.case import parse

    return parse(line)


@pytest.mark.parametrize("name", sorted(harmless.CHANGES))
def test_a_harmless_change_is_not_flagged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harmless, "CASES", 25)
    options = campaign.Options(cat_pack, "fused", "cpu", profile_of("dev"), 0)
    count, problems = harmless.CHANGES[name](options)
    assert problems == []
    assert count >= 25


def test_a_run_leaves_evidence_that_reads_back(tmp_path: Path) -> None:
    made = api.run_loop(api.LoopRequest(lanes=("edges",), out=tmp_path, device="cpu"))
    assert (made.verdict, made.exit_code) == ("PASS", 0)
    (lane,) = made.lanes
    assert all(lane.kinds.get(kind, 0) >= least for kind, least in lane.least.items())
    assert made.untouched["untouched"]
    pytest.importorskip("pydantic")
    assert evidence.read(tmp_path / "loop.json", evidence.LoopEvidence).lanes[0].cases == lane.cases


def test_a_lane_below_its_least_count_is_not_covered() -> None:
    options = campaign.Options(
        cat_pack, "fused", "cpu", profile_of("dev"), 0, lanes=("ragged",), draws=3
    )
    (lane,), _ = campaign.run_lanes(options)
    assert lane.state == "not covered"
    untouched = {"untouched": True}
    assert api.judge([lane], untouched, ()) == ("NOT COVERED", ExitCode.INVALID)
    assert api.judge([], untouched, ()) == ("NOT COVERED", ExitCode.INVALID)
    assert api.judge([lane], {"untouched": False}, ())[0] == "INVALID"


def test_a_repro_tells_the_case_again() -> None:
    line = str(MIXED.with_(pack="fused"))
    done = api.repro(line)
    assert done.exit_code == ExitCode.PASS
    assert done.lines[0].endswith(line)
    assert any(text.startswith("result    equal") for text in done.lines)


@pytest.mark.parametrize(
    "request_",
    [
        api.LoopRequest(lanes=("nonsense",)),
        api.LoopRequest(pack="no.such:pack"),
        api.LoopRequest(patches=("no.such:patch",)),
        api.LoopRequest(profile="fast"),
        api.LoopRequest(device="tpu"),
    ],
)
def test_bad_input_is_one_line(request_: api.LoopRequest, tmp_path: Path) -> None:
    import dataclasses

    with pytest.raises(UsageError, match=r"\A[^\n]+\Z"):
        api.run_loop(dataclasses.replace(request_, out=tmp_path))


def test_batches_through_the_real_engine_run_both_ways_with_equal_bytes() -> None:
    from equiv.loop import engine

    ranks = engine.launch(3, 5, "both")
    assert engine._problem(ranks) == ""
    for found in ranks:
        tally = found["tally"]
        assert tally["compared"] == tally["calls"] > 0
        assert sum(tally["packs"].values()) == tally["chunks"] > tally["calls"]


def test_the_engine_lane_tells_unequal_bytes_and_other_tokens() -> None:
    from equiv.loop import engine

    def rank(unequal: int, tokens: list[int]) -> dict[str, Any]:
        return {"tally": {"unequal": unequal, "compared": 9}, "tokens": tokens}

    assert engine._problem([rank(0, [1]), rank(0, [1])]) == ""
    assert "2 of 9 loop calls" in engine._problem([rank(0, [1]), rank(2, [1])])
    assert "other tokens" in engine._problem([rank(0, [1]), rank(0, [2])])


def test_evidence_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    import dataclasses

    from equiv.errors import BytegateError

    made = api.run_loop(api.LoopRequest(lanes=("strides",), out=tmp_path, device="cpu"))
    for lie in (
        {"verdict": "PASS", "exit_code": 1},
        {"untouched": {"untouched": False}},
        {"lanes": [dataclasses.replace(made.lanes[0], state="not covered")]},
        {"lanes": [dataclasses.replace(made.lanes[0], cases=made.lanes[0].cases + 1)]},
    ):
        with pytest.raises(BytegateError, match="contradicts itself"):
            evidence.write(tmp_path / "loop.json", dataclasses.replace(made, **lie))


def test_every_lane_has_least_counts() -> None:
    base = LoopCase("x", 2, 0, 1, 16, 1, 32, ((1, 1),))
    for lane in lanes.LANES[: -len(lanes.APART)]:
        assert lanes.plan(lane, base, dims="small").least


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("bad_packs:late", "divergence", "loop calls gave other bytes with the pack"),
        ("bad_packs:raises", "raised", "ValueError: this pack gives up"),
        ("bad_packs:stock", "", ""),
    ],
)
def test_the_engine_lane_runs_the_pack_that_was_asked_for(
    name: str, kind: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(folder)
    made = api.run_loop(
        api.LoopRequest(pack=name, lanes=("engine",), out=tmp_path, profile="dev", device="cpu")
    )
    found = made.lanes[0].findings
    assert [f.kind for f in found] == ([kind] if kind else [])
    assert (made.verdict, made.exit_code) == (("FAIL", 1) if kind else ("PASS", 0))
    if kind:
        assert detail in found[0].detail
        assert found[0].repro == (
            f"bytegate loop --lane engine --profile dev --seed 0 --pack {name}"
        )


@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("dies", "crash", "the process died: SIGSEGV"),
        ("sleeps", "hang", "no sign in "),
    ],
)
@pytest.mark.parametrize("forked", [True, False], ids=["fork", "spawn"])
def test_a_pack_that_takes_the_process_with_it_is_a_finding_and_the_next_lane_runs(
    name: str,
    kind: str,
    detail: str,
    forked: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from equiv import patience
    from equiv.loop import isolate

    if not forked and name == "sleeps":
        pytest.skip("the same as where the process is forked, and slow")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(isolate, "HANG_S", 8.0)
    monkeypatch.setattr(patience, "MOST", 1.0)
    monkeypatch.setattr(isolate, "cuda_in_use", lambda: not forked)
    pack, _ = api.load_pack(f"bad_packs:{name}", "cpu")
    options = campaign.Options(
        pack, f"bad_packs:{name}", "cpu", profile_of("dev"), 0, ("real", "strides"), any_dims=False
    )
    (first, second), _ = isolate.run_lanes(options)
    (found,) = first.findings
    assert (first.lane, first.state, found.kind) == ("real", "failed", kind)
    assert found.detail.startswith(detail)
    assert (second.lane, second.cases > 0) == ("strides", True)
    if forked:
        from equiv.loop.case import parse

        again = isolate.run_one(parse(found.case), pack)
        assert again.status == kind
        assert f"loop repro {found.case}" in found.repro


def test_lanes_in_a_process_of_their_own_do_what_they_do_here() -> None:
    from equiv.loop import isolate

    options = campaign.Options(
        cat_pack, "fused", "cpu", profile_of("dev"), 3, lanes=("strides", "ragged"), draws=40
    )
    seen: list[str] = []
    there, worst_there = isolate.run_lanes(options, lambda *said: seen.append(said[1]))
    here, worst_here = campaign.run_lanes(options)
    assert worst_there == worst_here
    assert set(seen) == {"strides", "ragged"}
    for a, b in zip(there, here, strict=True):
        assert (a.kinds, a.samples, a.state) == (b.kinds, b.samples, b.state)


def test_what_the_loop_needs_quiet_leaves_servers_their_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that the same process starts later says its route, at vLLM's own level."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    api.prepare("cpu", ())
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    api.prepare("cpu", ())
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
