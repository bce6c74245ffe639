"""One case in this process: each check has a kernel that fails it, and a clean one that doesn't."""

# ruff: noqa: FBT001 - the signature is that of the op's callers

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor

from equiv import execute
from equiv.arena import Arena, OutputArena
from equiv.case import Case, Fill, View, parse
from equiv.compare import place_of
from equiv.execute import Executor, Loaded
from equiv.guards import global_state, restore_state
from equiv.ledger import Entry
from equiv.pairs import OpPair
from equiv.result import FINDINGS, Result
from kvpack import stock
from kvpack.faults.kernel import CLEAN, bits

Here = Callable[..., Result]
Line = Callable[..., str]
Bad = Callable[[str], str]

ELSEWHERE = {
    "crash": "it ends the process: tests of the pool",
    "hang": "it never returns: tests of the pool",
    "last_error": "CUDA alone keeps an error for whoever asks next",
    "not_run": "a kernel that counts its runs, below",
    "reference": "the reference's own fault, below",
    "reference_raised": "likewise",
}


@pytest.fixture(autouse=True)
def _same_state() -> Iterator[None]:
    before = global_state()
    yield
    restore_state(before)


def entry(**changes: Any) -> Entry:
    fields = {
        "id": "X1",
        "pair": "kvpack",
        "candidates": ("own",),
        "devices": ("cpu",),
        "versions": (),
        "kind": "bytes",
        "against": "reference",
        "case": (),
        "alignment": "any",
        "element": None,
        "expected": None,
        "actual": None,
        "reason": "because",
        "reference": "here",
    }
    return Entry(**{**fields, **changes})


# -- kinds of findings --------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in FINDINGS if k not in ELSEWHERE])
def test_a_bad_kernel_is_found_by_its_kind(kind: str, run_here: Here, bad: Bad, line: Line) -> None:
    # Held results need a second call, and a kernel that remembers needs the mode that makes one.
    mode = "held" if kind == "overwritten" else "eager"
    case = line(mode=mode, H=1 if kind == "wrong_shape" else 2)
    result = run_here(bad(kind), case)
    assert (result.status, result.failed) == (kind, True)
    assert result.detail
    assert "\n" not in result.detail
    assert not run_here(bad("clean"), case).failed


@pytest.mark.parametrize("fp8", [0, 1])
@pytest.mark.parametrize("mode", ["eager", "inference", "repeat", "held", "hog"])
def test_a_clean_kernel_is_equal_and_guarded(
    run_here: Here, bad: Bad, line: Line, fp8: int, mode: str
) -> None:
    result = run_here(bad("clean"), line(fp8=fp8, mode=mode))
    assert result.status == "equal"
    assert result.outputs_guarded
    assert result.oracle_checked
    assert len(result.input_hash) == len(result.output_hash) == 32
    assert result.guard == "dispatch"


def test_two_colours_are_compared_in_full(run_here: Here, line: Line) -> None:
    result = run_here(CLEAN, line(T=3, H=2, fp8=1))
    assert result.bytes_compared == 2 * 3 * 2 * (192 + 128)


def test_equal_cases_hash_alike_and_others_don_t(run_here: Here, line: Line) -> None:
    one, again, other = (run_here(CLEAN, line(fill=f)) for f in ("bits.0", "bits.0", "bits.1"))
    assert (one.input_hash, one.output_hash) == (again.input_hash, again.output_hash)
    assert one.input_hash != other.input_hash
    assert one.output_hash != other.output_hash


def test_a_difference_says_where_and_who(run_here: Here, bad: Bad, line: Line) -> None:
    result = run_here(bad("divergence"), line())
    assert result.difference is not None
    assert (result.difference.output, result.difference.index) == ("v", (2, 1, 127))
    assert "token 2, head 1, column 127" in result.detail
    assert result.voices == "the oracle agrees with the reference: the candidate is wrong"


def test_a_call_that_a_kernel_does_not_take_is_the_kernel_s(
    run_here: Here, bad: Bad, line: Line
) -> None:
    result = run_here(bad("takes_two"), line())
    assert result.status == "raised"
    assert "takes 2 positional arguments but 3 were given" in result.detail
    says = "the candidate can't be called as pair kvpack calls it; it takes (kv_nope: "
    assert says in result.detail
    assert result.raised_in == bad("takes_two")
    inside = run_here(bad("calls_takes_two"), line())
    assert "takes 2 positional arguments but 3 were given" in inside.detail
    assert "can't be called" not in inside.detail
    assert inside.raised_in.endswith("bad_kernels:calls_takes_two")


def test_an_exception_names_the_function_in_the_kernel_s_module(
    run_here: Here, bad: Bad, line: Line
) -> None:
    result = run_here(bad("raised"), line())
    assert result.detail == "RuntimeError: no kernel for this shape"
    assert result.raised_in == "bad_kernels:raised"


@pytest.mark.parametrize("name", ["input_squeezed", "beside_an_input", "exits", "negated_view"])
def test_other_bad_kernels_are_found(name: str, run_here: Here, bad: Bad, line: Line) -> None:
    kinds = {
        "input_squeezed": "input_changed",
        "beside_an_input": "out_of_bounds",
        "exits": "raised",
        "negated_view": "wrong_type",
    }
    assert run_here(bad(name), line(fp8=0)).status == kinds[name]


def odd_results(kv_nope: Tensor) -> dict[str, Any]:
    k, v = CLEAN(kv_nope, kv_nope[:, :1, :64], False)
    return {
        "nothing": None,
        "a list": [k, v],
        "three": (k, v, v),
        "a number": (k, 3),
        "sparse": (k, v.float().to_sparse()),
        "conjugated": (k, torch.view_as_complex(v.float().view(*v.shape[:2], 64, 2)).conj()),
    }


@pytest.mark.parametrize("which", sorted(odd_results(torch.zeros(1, 1, 256).bfloat16())))
def test_whatever_is_returned_is_a_result(which: str, run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Any:
        del k_pe, use_fp8
        return odd_results(kv_nope)[which]

    assert run_here(kernel, line(fp8=0)).status == "wrong_type"


# -- two colours --------------------------------------------------------------------

COLOURED = {"a5": 0xA5A5, "5a": 0x5A5A, "mixed": 0xA55A}


@pytest.mark.parametrize("pattern", COLOURED.values(), ids=COLOURED.keys())
def test_an_element_that_looks_like_the_poison_is_not_unwritten(
    pattern: int, run_here: Here, line: Line
) -> None:
    sets = ",".join(f"kv_nope.{i}:{pattern:x}" for i in range(256))
    assert run_here(CLEAN, line(T=1, H=1, fp8=0, fill="zero.0", set=sets)).status == "equal"


@pytest.mark.parametrize("pattern", COLOURED.values(), ids=COLOURED.keys())
def test_an_unwritten_row_that_looks_right_in_one_colour_is_unwritten(
    pattern: int, run_here: Here, bad: Bad, line: Line
) -> None:
    sets = ",".join(f"kv_nope.{i}:{pattern:x}" for i in range(256))
    case = line(T=1, H=1, fp8=0, fill="zero.0", set=sets)
    assert run_here(bad("unwritten"), case).status == "unwritten"


@pytest.mark.parametrize("byte", [0xA5, 0x5A])
def test_a_constant_that_is_the_poison_is_a_plain_difference(
    byte: int, run_here: Here, line: Line
) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        v.view(torch.uint8)[-1] = byte
        return k, v

    assert run_here(kernel, line()).status == "divergence"


def test_a_single_unwritten_byte_is_enough(run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        fresh = torch.empty(v.shape, dtype=v.dtype)
        fresh.view(torch.uint8).view(-1)[:-1] = v.view(torch.uint8).view(-1)[:-1]
        return k, fresh

    for fp8 in (0, 1):
        result = run_here(kernel, line(fp8=fp8))
        assert result.status == "unwritten"
        assert result.difference is not None
        assert (result.difference.elements, result.difference.index) == (1, (2, 1, 127))


def test_memory_read_before_it_was_written_is_found(run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        scratch = torch.empty(1, dtype=torch.uint8)
        bits(v)[0, 0, 0] += scratch[0] & 1
        return k, v

    assert run_here(kernel, line()).status == "unstable"


def test_a_gap_that_decides_a_byte_is_found(run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        beyond = bits(kv_nope).as_strided((1,), (1,), kv_nope.storage_offset() + 256)
        bits(v)[0, 0, 0] ^= (beyond[0] & 1).to(torch.uint8)
        return k, v

    assert run_here(kernel, line(views="kv_nope=528.264.1+0")).status == "unstable"


# -- operands -----------------------------------------------------------------------


def stretched(x: Tensor) -> None:
    x.unsqueeze_(0)


def turned(x: Tensor) -> None:
    x.transpose_(0, 1)


def trained(x: Tensor) -> None:
    x.requires_grad_()


def moved(x: Tensor) -> None:
    x.set_(x.untyped_storage(), 0, x.shape, x.stride())


@pytest.mark.parametrize("change", [stretched, turned, trained, moved])
def test_the_caller_s_own_tensors_stay_what_they_were(
    change: Callable[[Tensor], None], run_here: Here, line: Line
) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        result = CLEAN(kv_nope, k_pe, use_fp8)
        change(k_pe)
        return result

    result = run_here(kernel, line())
    assert result.status == "input_changed"
    assert result.detail.startswith("k_pe was torch.bfloat16 [3, 1, 64]")


def test_a_byte_in_a_gap_is_found(run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        result = CLEAN(kv_nope, k_pe, use_fp8)
        bits(kv_nope).as_strided((1,), (1,), kv_nope.storage_offset() + 256).fill_(3)
        return result

    result = run_here(kernel, line(views="kv_nope=528.264.1+0"))
    assert result.status == "input_changed"
    assert "gap of kv_nope (byte +512)" in result.detail


def test_allocations_are_numbered_where_one_is_overrun(
    run_here: Here, bad: Bad, line: Line
) -> None:
    detail = run_here(bad("out_of_bounds"), line()).detail
    assert detail == "wrote at byte +0 from the edge of allocation 2"


# -- refusals -----------------------------------------------------------------------


def refusing(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
    if kv_nope.dtype == torch.float32:
        raise TypeError("no float32")
    return CLEAN(kv_nope, k_pe, use_fp8)


def test_outside_the_domain_a_kernel_may_refuse(run_here: Here, line: Line) -> None:
    result = run_here(refusing, line(dtype="fp32", fp8=0))
    assert (result.status, result.failed) == ("refused", False)
    assert result.detail == "TypeError: no float32"


def test_a_refusal_that_changed_an_operand_is_none(run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> Any:
        del use_fp8
        k_pe.zero_()
        raise TypeError(kv_nope.dtype)

    assert run_here(kernel, line(dtype="fp32", fp8=0)).failed


def test_outside_the_domain_a_kernel_that_answers_is_compared(run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = stock.kv_pack(kv_nope, k_pe, use_fp8)
        return k, v + 1

    case = line(dtype="fp32", fp8=0)
    assert run_here(stock.kv_pack, case).status == "equal"
    assert run_here(kernel, case).status == "divergence"


# -- global state -------------------------------------------------------------------

STATE: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "default device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "random state": lambda: torch.manual_seed(0),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on CUDA": lambda: torch.set_autocast_enabled("cuda", True),
    "flushing of denormal numbers": lambda: torch.set_flush_denormal(True),
}


def changing(what: str, times: int) -> Callable[..., tuple[Tensor, Tensor]]:
    left = [times]

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        result = CLEAN(kv_nope, k_pe, use_fp8)
        if left[0]:
            left[0] -= 1
            STATE[what]()
        return result

    return kernel


@pytest.mark.parametrize("what", STATE)
def test_what_a_kernel_leaves_changed_is_named_and_put_back(
    what: str, pair: OpPair, line: Line
) -> None:
    before = global_state()
    executor = Executor(pair, Loaded("own", changing(what, 100), "dispatch"), "cpu", ())
    for _ in range(2):
        result = executor.run(parse(line()))
        assert (result.status, result.detail) == ("global_state", f"changed {what}")
        assert global_state() == before


@pytest.mark.parametrize("what", ["grad mode", "threads"])
def test_a_first_call_that_nobody_watched_counts_as_well(
    what: str, pair: OpPair, line: Line
) -> None:
    kernel = changing(what, 1)
    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    kernel(torch.zeros(1, 1, 256).bfloat16(), torch.zeros(1, 1, 64).bfloat16(), False)
    assert executor.run(parse(line())).detail == f"changed {what}"
    assert executor.run(parse(line())).status == "equal"


def test_state_that_is_put_back_is_no_finding(run_here: Here, line: Line) -> None:
    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.random.fork_rng(), torch.autocast("cpu"):
            torch.manual_seed(1)
            return CLEAN(kv_nope, k_pe, use_fp8)

    assert run_here(kernel, line()).status == "equal"


# -- kernels that torch compiles ----------------------------------------------------


def ran_wrong(graph: Any, _example: Any) -> Callable[..., Any]:
    """Compile to what flips a bit: only code that was compiled shows it."""
    return lambda *args: tuple(x ^ 1 for x in graph(*args))


def compiling(backend: Any, *, fp8_alone: bool = False) -> Callable[..., Any]:
    @functools.partial(torch.compile, backend=backend, dynamic=True)
    def part(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(x)
        return out

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        if fp8_alone and not use_fp8:
            return k, v
        return k, part(bits(v)).view(v.dtype)

    return kernel


@pytest.fixture
def _uncompiled() -> Iterator[None]:
    """Forget what earlier tests compiled: torch keeps it by a function's code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_uncompiled")
def test_a_compiled_kernel_is_noticed_and_runs_compiled(pair: OpPair, line: Line) -> None:
    executor = Executor(pair, Loaded("own", compiling("eager"), "dispatch"), "cpu", ())
    assert executor.run(parse(line())).guard == "malloc"
    assert executor.run(parse(line())).status == "equal"
    wrong = Executor(pair, Loaded("own", compiling(ran_wrong), "dispatch"), "cpu", ())
    for _ in range(2):
        assert wrong.run(parse(line())).status == "divergence"


@pytest.mark.usefixtures("_uncompiled")
def test_a_kernel_that_compiles_late_is_noticed_then(pair: OpPair, line: Line) -> None:
    kernel = compiling(ran_wrong, fp8_alone=True)
    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    early = executor.run(parse(line(fp8=0)))
    assert (early.status, early.guard) == ("equal", "dispatch")
    late = executor.run(parse(line(fp8=1)))
    assert (late.status, late.guard) == ("divergence", "malloc")


@pytest.mark.usefixtures("_uncompiled")
def test_an_unwritten_byte_of_a_compiled_kernel_shows(pair: OpPair, line: Line) -> None:
    @functools.partial(torch.compile, backend="eager", dynamic=True)
    def part(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1]
        return out

    def kernel(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        return k, part(bits(v)).view(v.dtype)

    executor = Executor(pair, Loaded("own", kernel, "dispatch"), "cpu", ())
    for _ in range(2):  # through the served allocation, then through malloc
        assert executor.run(parse(line(T=40, H=8))).status == "unwritten"


# -- proof --------------------------------------------------------------------------


def test_a_kernel_that_counts_its_runs_and_didn_t_run(run_here: Here, line: Line) -> None:
    result = run_here(CLEAN, line(), executions=lambda: 3)
    assert result.status == "not_run"
    runs = iter(range(100))
    assert run_here(CLEAN, line(), executions=lambda: next(runs)).status == "equal"


def test_no_rows_need_no_run(run_here: Here, line: Line) -> None:
    assert run_here(CLEAN, line(T=0), executions=lambda: 3).status == "equal"


# -- the reference ------------------------------------------------------------------


class Bent:
    """The pair with a reference of its own."""

    def __init__(self, pair: OpPair, reference: Callable[..., Any]) -> None:
        self._pair = pair
        self.reference = reference

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


def test_a_reference_that_departs_from_the_oracle_is_told_from_the_kernel(
    run_here: Here, pair: OpPair, line: Line
) -> None:
    def bent(tensors: Any, point: Any) -> Any:
        outputs = dict(pair.reference(tensors, point))
        outputs["k"].view(torch.uint8)[0, 0, 0] ^= 1
        return outputs

    def same(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = CLEAN(kv_nope, k_pe, use_fp8)
        k.view(torch.uint8)[0, 0, 0] ^= 1
        return k, v

    changed = Bent(pair, bent)
    both = run_here(same, line(), pair=changed)
    assert both.status == "reference"
    assert "k: 1 bytes" in both.detail
    alone = run_here(CLEAN, line(), pair=changed)
    assert alone.status == "divergence"
    assert "reference departs from the model" in alone.voices


@pytest.mark.parametrize("tokens", [3, 6])
def test_a_reference_without_memory_says_nothing_of_the_kernel(
    tokens: int, run_here: Here, pair: OpPair, line: Line
) -> None:
    def failing(tensors: Any, point: Any) -> Any:
        del tensors, point
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 21.34 GiB")

    with pytest.raises(torch.OutOfMemoryError):  # of which a worker makes that it doesn't fit
        run_here(CLEAN, line(T=tokens), pair=Bent(pair, failing))


@pytest.mark.parametrize(("device", "limit"), [("cuda:0", 0), ("cuda:0", 1 << 28), ("cpu", 0)])
def test_what_a_large_case_took_of_a_gpu_is_given_back_before_the_next(
    device: str, limit: int, pair: OpPair, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(execute, "LARGE_BYTES", limit)
    executor = Executor(pair, Loaded("own", CLEAN, "dispatch"), "cpu", ())
    assert executor.run(parse(line())).status == "equal"
    arenas = executor.arenas("cpu")
    executor.device = device
    executor.let_go()
    given_back = device != "cpu" and not limit
    assert bool(emptied) == given_back
    assert (executor.arenas("cpu") is not arenas) == given_back


@pytest.mark.parametrize("large", ["operands", "outputs"])
def test_so_is_it_where_the_operands_or_the_outputs_alone_were_large(
    large: str, pair: OpPair, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(pair, Loaded("own", CLEAN, "dispatch"), "cpu", ())
    given_back: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    arena, out = executor.arenas("cpu")
    arena.used, out.room = (1 << 40, 0) if large == "operands" else (0, 1 << 40)
    assert executor.run(parse(line())).status == "equal"
    assert not given_back  # of a CPU
    arena.used, out.room = (1 << 40, 0) if large == "operands" else (0, 1 << 40)
    executor.device = "cuda:0"
    monkeypatch.setattr(executor, "arenas", lambda _device: (Arena("cpu"), OutputArena("cpu")))
    assert executor.run(parse(line())).status == "equal"
    assert given_back == [True]


def test_a_reference_that_fails_is_told_from_the_kernel(
    run_here: Here, pair: OpPair, line: Line
) -> None:
    def failing(tensors: Any, point: Any) -> Any:
        raise RuntimeError(f"{sorted(tensors)} {point['T']}")

    result = run_here(CLEAN, line(), pair=Bent(pair, failing))
    assert result.status == "reference_raised"
    assert result.detail == "RuntimeError: ['k_pe', 'kv_nope'] 3"


# -- the ledger ---------------------------------------------------------------------


def one_wrong(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
    """Give 7e where 7f is due."""
    k, v = CLEAN(kv_nope, k_pe, use_fp8)
    if use_fp8:
        bits(v)[bits(v) == 0x7F] = 0x7E
    return k, v


NAN = "kv_nope.128:7fc0"


def test_a_declared_difference_passes_and_is_counted(run_here: Here, line: Line) -> None:
    case = line(fill="zero.0", set=NAN)
    assert run_here(one_wrong, case).status == "divergence"
    result = run_here(
        one_wrong, case, entries=[entry(element="nan", expected=(0x7F,), actual=(0x7E,))]
    )
    assert (result.status, result.eligible) == ("declared", ("X1",))
    (hit,) = {(h.entry, h.elements) for h in result.ledger}
    assert hit == ("X1", 1)
    assert result.ledger[0].patterns == {"bf16 v": (0x7FC0,)}


@pytest.mark.parametrize(
    "narrower",
    [
        {"element": "overflow"},
        {"expected": (0xFF,)},
        {"actual": (0x7D,)},
        {"case": (("dtype", ("fp16",)),)},
        {"alignment": "misaligned"},
    ],
    ids=lambda x: next(iter(x)),
)
def test_a_difference_beside_an_entry_is_no_declared_one(
    narrower: dict[str, Any], run_here: Here, line: Line
) -> None:
    whole = {"element": "nan", "expected": (0x7F,), "actual": (0x7E,)}
    result = run_here(
        one_wrong, line(fill="zero.0", set=NAN), entries=[entry(**{**whole, **narrower})]
    )
    assert result.status == "divergence"


def test_one_undeclared_element_among_declared_ones_fails(run_here: Here, line: Line) -> None:
    case = line(fill="zero.0", set=f"{NAN},kv_nope.129:7fc1")
    only = entry(element="nan", expected=(0x7F,), actual=(0x7E,))

    def worse(kv_nope: Tensor, k_pe: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
        k, v = one_wrong(kv_nope, k_pe, use_fp8)
        bits(v)[0, 0, 2] ^= 1
        return k, v

    result = run_here(worse, case, entries=[only])
    assert result.status == "divergence"
    assert result.difference is not None
    assert (result.difference.index, result.difference.elements) == ((0, 0, 2), 1)


def test_a_declared_exception_passes_in_its_cases(run_here: Here, bad: Bad, line: Line) -> None:
    entries = [entry(candidates=("x",), kind="raised", case=(("fp8", (1,)),))]
    assert run_here(bad("raised"), line(), entries=entries).status == "declared"
    assert run_here(bad("raised"), line(fp8=0), entries=entries).status == "raised"


# -- operands that the op writes ----------------------------------------------------


def adding(module: Any, *, mode: str = "eager", views: tuple[Any, ...] = ()) -> Case:
    return Case(
        module.PAIR.name,
        "modes",
        (("N", 5), ("C", 3), ("dtype", "i32")),
        views=views,
        fill=Fill("bits"),
        mode=mode,
        candidate="fused",
    )


@pytest.mark.parametrize("mode", ["eager", "inference", "repeat", "held", "hog"])
def test_an_operand_that_grows_is_put_back_between_calls(
    mode: str, second_pair: Any, run_here: Here
) -> None:
    case = adding(second_pair, mode=mode)
    assert run_here("fused", case, pair=second_pair.PAIR).status == "equal"
    result = run_here(second_pair.forgets_total, case, pair=second_pair.PAIR)
    assert result.status == "divergence"
    assert result.difference is not None
    assert result.difference.output == "total"


def test_its_gaps_are_still_guarded(second_pair: Any, run_here: Here) -> None:
    def kernel(a: Tensor, factor: Tensor, bias: Tensor, total: Tensor) -> Tensor:
        out: Tensor = second_pair.fused(a, factor, bias, total)
        total.as_strided((1,), (1,), total.storage_offset() + 3).fill_(9)
        return out

    case = adding(second_pair, views=(("total", View((8, 1))),))
    assert run_here("fused", case, pair=second_pair.PAIR).status == "equal"
    result = run_here(kernel, case, pair=second_pair.PAIR)
    assert result.status == "input_changed"
    assert "gap of total" in result.detail


def test_it_may_lie_far_apart(second_pair: Any, run_here: Here) -> None:
    case = adding(second_pair, views=(("total", View((1 << 27, 1))),))
    assert run_here("fused", case, pair=second_pair.PAIR).status == "equal"
    result = run_here(second_pair.forgets_total, case, pair=second_pair.PAIR)
    assert result.status == "divergence"


def test_an_oracle_may_speak_of_it(second_pair: Any, run_here: Here) -> None:
    class Voiced(Bent):
        def oracle(self, inputs: Any, point: Any) -> Any:
            del point
            out = inputs["a"] * inputs["factor"] + inputs["bias"]
            return {"out": out, "total": inputs["total"] + out + np.uint32(1)}

    pair = Voiced(second_pair.PAIR, second_pair.PAIR.reference)
    result = run_here("fused", adding(second_pair), pair=pair)
    assert result.status == "reference"
    assert "total: " in result.detail
    assert result.difference is not None
    assert place_of(second_pair.PAIR.outputs({"N": 1, "C": 1, "dtype": "i32"})[0], (0, 0))


# -- what isn't claimed -------------------------------------------------------------


def test_undefined_cases_aren_t_run(pair: OpPair, line: Line) -> None:
    class Undefined(Bent):
        def outcome(self, point: Any, aligned: bool) -> str:
            del point, aligned
            return "undefined"

    def never(*operands: Any) -> Any:
        raise AssertionError(operands)

    executor = Executor(
        Undefined(pair, pair.reference),  # type: ignore[arg-type]
        replace(Loaded("own", never, "dispatch")),
        "cpu",
        (),
    )
    assert executor.run(parse(line())).status == "undefined"


@pytest.mark.parametrize(("limit", "kind"), [(1 << 28, "raised"), (0, "")])
def test_a_large_case_without_memory_is_no_finding(
    limit: int,
    kind: str,
    bad: Callable[[str], str],
    line: Callable[..., str],
    run_here: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execute, "LARGE_BYTES", limit)
    case = line(T=6)
    if kind:
        assert run_here(bad("out_of_memory"), case).status == kind
        return
    with pytest.raises(torch.OutOfMemoryError):  # of which a worker makes that it doesn't fit
        run_here(bad("out_of_memory"), case)
