"""Workers die and hang; what they died of is a result, and the next case runs in a new one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equiv import cuda_runtime, pool
from equiv.case import parse
from equiv.errors import DoesNotFit, ExitCode, UsageError
from equiv.ledger import Entry
from equiv.pairs import OpPair
from equiv.pool import Unavailable, Worker
from equiv.result import Result
from equiv.worker import WorkerSpec, _device_health

Line = Callable[..., str]
Bad = Callable[[str], str]


@pytest.fixture
def spec(folder: Path) -> Callable[..., WorkerSpec]:
    del folder

    def make(candidate: str, entries: tuple[Entry, ...] = ()) -> WorkerSpec:
        paths = tuple(p for p in sys.path if p)
        return WorkerSpec("kvpack", candidate, "cpu", None, entries, (), "", paths=paths)

    return make


@pytest.fixture
def worker(pair: OpPair, spec: Callable[..., WorkerSpec], bad: Bad) -> Callable[..., Worker]:
    return lambda name, *entries: Worker(pair, spec(bad(name), entries))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


DEATHS = {
    "leaves": "the process died: exit code 7",
    "killed": "the process died: SIGKILL",
    "crash": "the process died: SIGSEGV; in bad_kernels.crash",
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_dead_worker_is_a_result_and_is_replaced(
    name: str, worker: Callable[..., Worker], line: Line
) -> None:
    with worker(name) as w:
        assert w.run(parse(line(H=1))).status == "equal"
        first = w._process.pid
        result = w.run(parse(line(H=2)))
        assert (result.status, result.detail) == ("crash", DEATHS[name])
        assert w.run(parse(line(H=1))).status == "equal"
        assert w._process.pid != first
        assert (w.toll.crashes, w.toll.hangs) == (1, 0)
        assert w.run(parse(line(H=2))).status == "crash"
        assert w.toll.crashes == 2


def test_a_crash_is_placed_in_the_kernel_s_function(
    worker: Callable[..., Worker], line: Line
) -> None:
    with worker("crash") as w:
        assert w.run(parse(line())).raised_in == "bad_kernels:crash"


def test_a_later_death_isn_t_placed_where_an_earlier_one_was(
    worker: Callable[..., Worker], line: Line
) -> None:
    with worker("crash_then_leave") as w:
        assert w.run(parse(line(H=2))).raised_in == "bad_kernels:crash_then_leave"
        result = w.run(parse(line(H=3)))
        assert (result.detail, result.raised_in) == ("the process died: exit code 7", "")


def test_a_spent_worker_is_replaced_and_is_no_loss(
    worker: Callable[..., Worker], line: Line
) -> None:
    with worker("spends") as w:
        pids = []
        for heads in (1, 1, 2, 1):
            result = w.run(parse(line(H=heads)))
            assert (result.status, result.spent) == ("equal", heads == 2)
            pids.append(w._process and w._process.pid)
        assert pids[0] == pids[1] != pids[3]
        assert pids[2] is None
        assert (w.toll.crashes, w.toll.hangs) == (0, 0)


def test_a_spent_worker_whose_case_does_not_fit_is_replaced_as_well(
    worker: Callable[..., Worker], line: Line
) -> None:
    with worker("spends_and_does_not_fit") as w:
        assert w.run(parse(line(H=1))).status == "equal"
        with pytest.raises(DoesNotFit):
            w.run(parse(line(H=2)))
        assert w._process is None
        assert w.run(parse(line(H=1))).status == "equal"
        assert (w.toll.crashes, w.toll.hangs) == (0, 0)


def test_a_hanging_worker_is_a_result_and_is_replaced(
    worker: Callable[..., Worker], line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "HANG_S", 2.0)
    monkeypatch.setattr(pool, "stretched", lambda limit_s: limit_s)  # whatever else runs here
    with worker("hang") as w:
        assert w.run(parse(line(T=3))).status == "equal"
        first = w._process.pid
        with within(20):
            result = w.run(parse(line(T=2)))
        assert (result.status, result.detail) == ("hang", "no result within 2 s")
        assert (w.toll.crashes, w.toll.hangs) == (0, 1)
        with pytest.raises(ProcessLookupError):  # no process is left behind
            os.kill(first, 0)
        assert w.run(parse(line(T=3))).status == "equal"


def test_the_first_case_of_a_combination_may_take_long(
    worker: Callable[..., Worker], line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "HANG_S", 0.0)
    with worker("clean") as w:  # compilers run then
        assert w.run(parse(line(T=3))).status == "equal"


def test_a_kernel_that_hangs_while_it_is_profiled_is_no_end(
    worker: Callable[..., Worker], line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "FIRST_S", 2.0)
    monkeypatch.setattr(pool, "HANG_S", 1.0)
    with worker("hang") as w:
        answer = w.prove(parse(line(T=2)), ())
        assert answer["candidate_ok"] is None
        assert "died or hung" in answer["error"]
        assert w.run(parse(line(T=3))).status == "equal"


def test_a_kernel_that_dies_while_it_is_profiled_is_no_end(
    worker: Callable[..., Worker], line: Line
) -> None:
    with worker("leaves") as w:
        assert "died or hung" in w.prove(parse(line(H=2)), ())["error"]
        assert w.run(parse(line(H=1))).status == "equal"


def test_a_kernel_that_raises_while_it_is_profiled_is_no_failure_of_the_suite(
    worker: Callable[..., Worker], line: Line
) -> None:
    with worker("takes_two") as w:
        said = w.prove(parse(line()), ())["error"]
        assert said.startswith("its call raised TypeError: takes_two() takes 2 positional")
        assert "the suite failed" not in said
        assert w.run(parse(line())).status == "raised"


def test_a_profile_names_what_ran(worker: Callable[..., Worker], line: Line) -> None:
    with worker("clean") as w:
        proof = w.prove(parse(line()), ("no_such_kernel",))
    assert "aten::index_select" in proof["candidate"]
    assert "aten::_to_copy" in proof["reference"]
    assert (proof["candidate_ok"], proof["reference_ok"]) == (None, True)


def test_a_fused_kernel_in_the_reference_is_seen(worker: Callable[..., Worker], line: Line) -> None:
    with worker("clean") as w:
        assert w.prove(parse(line()), ("_to_copy",))["reference_ok"] is False


def test_what_a_kernel_prints_goes_to_a_log_that_doesn_t_stay(
    worker: Callable[..., Worker], line: Line, capfd: pytest.CaptureFixture[str]
) -> None:
    with worker("prints") as w:
        assert w.run(parse(line())).status == "equal"
        log = w.log.read_text(encoding="utf-8")
        assert "a kernel's own words" in log
        assert "and more of them" in log
    assert not w.log.exists()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def declared() -> Entry:
    return Entry(
        id="X9",
        pair="kvpack",
        candidates=("x:y",),
        devices=("cpu",),
        versions=(),
        kind="crash",
        against="reference",
        case=(("fp8", (1,)),),
        alignment="any",
        element=None,
        expected=None,
        actual=None,
        reason="because",
        reference="here",
    )


def test_a_declared_crash_passes_in_its_cases(
    worker: Callable[..., Worker], line: Line, declared: Entry
) -> None:
    with worker("leaves", declared) as w:
        result = w.run(parse(line(H=2)))
        assert (result.status, [h.entry for h in result.ledger]) == ("declared", ["X9"])
        assert w.run(parse(line(H=2, fp8=0))).status == "crash"


def test_a_declared_hang_is_no_crash(
    worker: Callable[..., Worker], line: Line, declared: Entry
) -> None:
    with worker("leaves", replace(declared, kind="hang")) as w:
        result = w.run(parse(line(H=2)))
    assert (result.status, result.eligible) == ("crash", ("X9",))


# -- candidates that don't load -----------------------------------------------------

LOADING = {
    "import no_such_module\n": "ModuleNotFoundError: No module named 'no_such_module'",
    "raise SystemExit(3)\n": "SystemExit: 3",
    "def other(): ...\n": "kernel doesn't exist",
    "kernel = 3\n": "kernel isn't callable",
    "import os\nos._exit(5)\n": "ended its process while it was loaded (exit code 5)",
    "def kernel(:\n": "SyntaxError: invalid syntax",
}


@pytest.mark.parametrize("source", LOADING, ids=lambda s: s.split("\n")[0])
def test_a_candidate_that_doesn_t_load_is_bad_usage(
    source: str, pair: OpPair, spec: Callable[..., WorkerSpec], folder: Path
) -> None:
    (folder / "mine.py").write_text(source, encoding="utf-8")
    worker = Worker(pair, spec("mine.py:kernel"))
    with pytest.raises(UsageError, match=r"mine\.py") as e:
        worker.start()
    assert worker.log.exists() == ("_exit" in source)  # the one message that names the log
    worker.close()
    assert e.value.exit_code == ExitCode.USAGE
    assert LOADING[source] in str(e.value)
    assert len(str(e.value).splitlines()) == 1


def test_a_candidate_that_can_t_run_here_is_unavailable(
    pair: OpPair, spec: Callable[..., WorkerSpec]
) -> None:
    with pytest.raises(Unavailable, match=r"CUDA|cuda|GPU"), Worker(pair, spec("vllm")):
        pass


def test_variables_of_a_candidate_are_set_in_its_worker_alone(
    pair: OpPair, spec: Callable[..., WorkerSpec], folder: Path, line: Line
) -> None:
    source = "import os\nfrom kvpack.faults.kernel import kv_pack\n"
    source += "assert os.environ['SOME_SWITCH'] == '1'\n"
    (folder / "mine.py").write_text(source, encoding="utf-8")
    made = spec("mine.py:kv_pack")
    with pytest.raises(UsageError, match="KeyError"), Worker(pair, made):
        pass
    given = WorkerSpec(
        *("kvpack", "mine.py:kv_pack", "cpu", None, (), (("SOME_SWITCH", "1"),), ""),
        paths=made.paths,
    )
    with Worker(pair, given) as w:
        assert w.run(parse(line())).status == "equal"
    assert "SOME_SWITCH" not in os.environ


def test_a_worker_ignores_a_death_between_cases(worker: Callable[..., Worker], line: Line) -> None:
    with worker("clean") as w:
        assert w.run(parse(line())).status == "equal"
        os.kill(w._process.pid, signal.SIGKILL)
        w._process.join(10)
        assert w.run(parse(line())).status == "crash"  # it can't be told from the case's own
        assert w.run(parse(line())).status == "equal"


# -- what a GPU keeps, with one played ----------------------------------------------


def gone() -> None:
    raise RuntimeError("CUDA error: misaligned address\nmore")


@pytest.mark.parametrize(
    ("status", "error", "synchronize", "wanted", "detail"),
    [
        ("equal", "", lambda: None, "equal", ""),
        ("equal", "invalid value", lambda: None, "last_error", "left invalid value behind"),
        ("raised", "invalid value", lambda: None, "raised", ""),
        ("equal", "", gone, "crash", "the CUDA context is lost: CUDA error: misaligned address"),
        ("raised", "", gone, "crash", "the CUDA context is lost: CUDA error: misaligned address"),
    ],
)
def test_the_device_is_looked_at_after_each_case(
    status: str,
    error: str,
    synchronize: Callable[[], None],
    wanted: str,
    detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(cuda_runtime, "take_last_error", lambda: error)
    result = _device_health(Result(status))
    assert (result.status, result.detail) == (wanted, detail)
