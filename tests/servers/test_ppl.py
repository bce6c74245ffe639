"""``ppl run`` on real vLLM servers: the default run, faults, and processes that are killed."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
for name in ("httpx2", "scipy", "stamina"):
    pytest.importorskip(name)
psutil = pytest.importorskip("psutil")

from kvroute.serve import ServeOptions, start  # noqa: E402 - vLLM decides first
from ppl import evidence, facts  # noqa: E402
from ppl.evidence import PplEvidence  # noqa: E402
from ppl.store import Store  # noqa: E402

ROOT = Path(__file__).parents[2]
SEVEN_MINUTES_S = 420
FEW = ("alice", "hamlet", "workshop", "britannica", "poemata")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


def begin(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ppl", "run", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(out: Path, *words: str, code: int | None = 0) -> PplEvidence:
    with begin("--out", str(out), *words) as running:
        said, _ = running.communicate()
    sys.stdout.write(said)
    assert code is None or running.returncode == code, said
    return evidence.read(out / "ppl.json")


def few(*, launches: int = 1) -> list[str]:
    words = [w for t in FEW for w in ("--texts", t)]
    return [*words, "--launches", str(launches), "--repeats", "1"]


def test_the_default_run_is_identical_within_seven_minutes(tmp_path: Path) -> None:
    began = time.monotonic()
    made = run(tmp_path)
    took_s = time.monotonic() - began
    assert made.verdict == "IDENTICAL"
    assert made.identity is not None
    assert made.identity.texts == 10
    assert made.identity.exposed_tokens > 10_000
    assert len(made.runs) == 6
    for record in Store(tmp_path).records():
        seen = record.observed
        assert seen.counters is not None
        assert seen.counters == {n: seen.counters[n] for n in (seen.planned or {})} == seen.planned
        assert seen.counters["continuations"][0] > 0
        assert seen.scheduler_chunks is not None
        assert len(seen.scheduler_chunks) >= 4
        assert (seen.route, seen.cached_tokens, seen.preemptions) == (record.arm, 0, 0)
    assert took_s < SEVEN_MINUTES_S


@pytest.mark.parametrize("fault", ["L04", "L07", "L10", "L11"])
def test_a_faulty_server_is_never_passed(fault: str, tmp_path: Path) -> None:
    made = run(tmp_path, "--route", f"fault:{fault}", *few(), code=None)
    assert made.exit_code != 0
    assert made.verdict in {"DIFFERENT", "INVALID", "INCONCLUSIVE"}
    assert made.identity is None or made.identity.identical_texts == 0
    assert all(t.unexposed.differing == 0 for t in made.texts)


def test_a_pair_of_one_route_is_told(tmp_path: Path) -> None:
    made = run(tmp_path, "--route", "stock", *few(), code=4)
    assert "both servers run the same route, stock" in made.decided.reasons[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pair")
    begun = {
        r: start(ServeOptions(route=r, workspace=1024), log=folder / f"{r}.log")
        for r in ("stock", "fused")
    }
    try:
        for server in begun.values():
            server.wait_healthy(300)
        yield begun
    finally:
        for server in begun.values():
            server.stop()


def proxy(url: str, fault: str) -> Any:
    folder = str(ROOT / "tests" / "ppl")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.find_spec("fault_proxy")
    assert spec is not None
    return importlib.import_module("fault_proxy").Proxy(url, fault)


@pytest.mark.parametrize(
    ("fault", "word", "says"),
    [
        ("none", "IDENTICAL", "every scored token"),
        ("shift rows", "INVALID", "shifted by one token from row 0 on"),
        ("-9999.0", "INVALID", "a sentinel"),
        ("NaN", "INVALID", "NaN or infinite"),
        ("null", "INVALID", "null in row 60"),
        ("one in 5 fails", "INVALID", "refused with HTTP 500"),
        ("other ids", "INVALID", "answered for other token ids"),
        ("prefix cache", "INVALID", "prefix caching is on"),
        ("bias", "DIFFERENT", "lies outside"),
    ],
)
def test_a_fault_between_real_servers_and_the_client(
    fault: str, word: str, says: str, pair: dict[str, Any], tmp_path: Path
) -> None:
    between = proxy(pair["fused"].url, fault)
    try:
        addresses = ["--stock", pair["stock"].url, "--fused", between.url]
        made = run(tmp_path, *addresses, *few(), "--margin", "1e-4", code=None)
    finally:
        between.close()
    assert made.verdict == word
    assert any(says in r for r in made.decided.reasons), made.decided


@pytest.mark.parametrize(
    ("fault", "word"), [("none", "IDENTICAL"), ("best tokens swapped", "EQUIVALENT")]
)
def test_arg_maxes_of_real_servers(
    fault: str, word: str, pair: dict[str, Any], tmp_path: Path
) -> None:
    between = proxy(pair["fused"].url, fault)
    try:
        addresses = ["--stock", pair["stock"].url, "--fused", between.url]
        made = run(tmp_path, *addresses, *few(), "--top1", code=None)
    finally:
        between.close()
    assert made.verdict == word, made.decided
    assert len(made.top1) == len(made.texts)
    assert all((t.agreeing == t.rows) == (fault == "none") for t in made.top1)
    assert all(t.noise_agreeing is None for t in made.top1)  # one launch has no A/A


def test_real_servers_without_dev_mode(pair: dict[str, Any], tmp_path: Path) -> None:
    between = {arm: proxy(server.url, "no dev mode") for arm, server in pair.items()}
    addresses = ["--stock", between["stock"].url, "--fused", between["fused"].url]
    stated = ["--workspace", "1024", "--", "--max-num-batched-tokens", "512", "--dcp", "2"]
    try:
        made = run(tmp_path, *addresses, *few(), *stated)
    finally:
        for one in between.values():
            one.close()
    assert made.verdict == "IDENTICAL"
    assert made.run is not None
    assert {f.channel for f in made.run.servers} == {"metrics"}
    assert all(r.observed.counters == r.observed.planned for r in Store(tmp_path).records())


def test_twenty_runs_on_one_pair_are_all_identical(pair: dict[str, Any], tmp_path: Path) -> None:
    """A/A of one route is INVALID by design, so two routes of equal bits stand in for it."""
    for i in range(20):
        addresses = ["--stock", pair["stock"].url, "--fused", pair["fused"].url]
        made = run(tmp_path / str(i), *addresses, *few(), code=None)
        assert made.verdict == "IDENTICAL"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_and_a_server_killed_at_random_moments(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    words = ["--out", str(tmp_path), *few(launches=2)]
    with begin(*words) as running:
        until = time.monotonic() + 300
        while time.monotonic() < until and not any(Store(tmp_path).records()):
            time.sleep(0.2)
        time.sleep(rng.uniform(0, 3))
        running.send_signal(signal.SIGKILL)
    before = {(r.key.text, *r.run): r.array_sha256 for r in Store(tmp_path).records()}
    assert before
    with begin(*words) as running:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            known = facts.read(tmp_path)
            noted = [i for i in known.instances if i.identity and i.pid] if known else []
            alive = [i for i in noted if psutil.pid_exists(i.pid)]
            if len(alive) > 1 and len(list(Store(tmp_path).records())) > len(before):
                break
            time.sleep(0.2)
        time.sleep(rng.uniform(0, 2))
        os.kill(int(rng.choice(alive).pid or 0), signal.SIGKILL)
        said, _ = running.communicate()
    assert running.returncode == 0, said
    made = evidence.read(tmp_path / "ppl.json")
    after = {(r.key.text, *r.run): r.array_sha256 for r in Store(tmp_path).records()}
    assert made.verdict == "IDENTICAL"
    assert before.items() <= after.items()
    assert made.run is not None
    assert not [i for i in made.run.instances if i.pid and psutil.pid_exists(i.pid)]
