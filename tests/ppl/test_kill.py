"""Runs and servers that are killed at any moment: nothing lost, nothing asked for twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppl import evidence, facts
from ppl.evidence import PplEvidence
from ppl.store import Store
from texts.cut import ids_sha256

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEXTS = 4
RESULTS = TEXTS * 6
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(TEXTS):
        words = f"{i}: " + "The sky above the port was the color of television. " * (38 + i)
        (folder / f"text{i}.txt").write_text(words, encoding="utf-8")
    return folder


def start(texts: Path, out: Path, *words: str, **fake: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "launch_fakes.py"), "run", "--texts", str(texts)]
    return subprocess.Popen(
        [*command, "--out", str(out), *words],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
            "FAKE": json.dumps(fake),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(texts: Path, out: Path, *words: str, code: int = 0, **fake: Any) -> PplEvidence:
    with start(texts, out, *words, **fake) as run:
        said, _ = run.communicate(timeout=120)
    assert run.returncode == code, said
    return evidence.read(out / "ppl.json")


def stored(out: Path) -> list[tuple[Any, ...]]:
    return [(r.key.ids_sha256, r.array_sha256, *r.run) for r in Store(out).records()]


def asked(log: Path) -> Counter[tuple[str, str]]:
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return Counter((a, b) for a, b in (line.split() for line in lines))


def names(texts: Path) -> dict[str, str]:
    """Map what the fake server logs of a text's ids to the digest that records have."""
    import hashlib

    found = {}
    for path in texts.glob("*.txt"):
        data = path.read_bytes()
        for n in range(1800, 2200):
            ids = list(data[:n])
            found[hashlib.sha256(str(ids).encode()).hexdigest()] = ids_sha256(ids)
    return found


def no_server_is_left(out: Path) -> bool:
    known = facts.read(out)
    pids = [i.pid for i in known.instances if i.pid] if known else []
    return not any(psutil.pid_exists(p) for p in pids)


def test_a_run_that_is_never_killed(texts: Path, tmp_path: Path) -> None:
    made = finish(texts, tmp_path / "out")
    assert made.verdict == "IDENTICAL"
    assert made.runs == [
        ("stock", 1, 1),
        ("stock", 1, 2),
        ("stock", 2, 1),
        ("fused", 1, 1),
        ("fused", 1, 2),
        ("fused", 2, 1),
    ]
    assert not any("scheduler chunks" in x for x in made.not_covered)
    assert no_server_is_left(tmp_path / "out")
    # Complete: nothing is started, and the same comes out.
    with start(texts, tmp_path / "out") as again:
        said, _ = again.communicate(timeout=60)
    assert "nothing is asked of a server" in said
    assert evidence.read(tmp_path / "out" / "ppl.json").inputs_sha256 == made.inputs_sha256


def test_one_at_a_time(texts: Path, tmp_path: Path) -> None:
    made = finish(texts, tmp_path / "out", "--one-at-a-time")
    assert made.verdict == "IDENTICAL"
    assert len(made.runs) == 6
    assert made.run is not None
    assert [(i.arm, i.launch) for i in made.run.instances] == [
        ("stock", 1),
        ("fused", 1),
        ("fused", 2),
        ("stock", 2),
    ]


def test_the_runner_killed_at_ten_random_moments(texts: Path, tmp_path: Path) -> None:
    whole = finish(texts, tmp_path / "whole", "--burst")
    out, log = tmp_path / "out", tmp_path / "requests"
    rng = random.Random(20260101)
    of = names(texts)
    kills = 0
    before: list[tuple[Any, ...]] = []
    seen: Counter[tuple[str, str]] = Counter()
    while kills < 10:
        missing = Counter(
            (arm, ids)
            for ids in {a for a, *_ in stored(tmp_path / "whole")}
            for arm in ("stock", "fused")
            for _ in range(3 + 2 * 3)  # three results, and three bursts of each launch
        )
        missing -= Counter((arm, ids) for ids, _, arm, _, _ in stored(out) if out.exists())
        with start(texts, out, "--burst", requests=str(log), delay_s=0.15) as run:
            if kills == 0:
                time.sleep(2.5)
            time.sleep(rng.uniform(0.1, 6.0))
            ended = run.poll() is not None
            run.send_signal(signal.SIGKILL)
        kills += 1
        now = asked(log)
        for (route, digest), n in (now - seen).items():
            ids = of.get(digest)
            assert ids is None or n <= missing[route, ids], "asked again for a stored result"
        seen = now
        after = stored(out)
        assert set(before) <= set(after), "a stored result was lost or changed"
        before = after
        if ended:
            break
    made = finish(texts, out, "--burst", requests=str(log))
    assert made.verdict == "IDENTICAL", made.decided
    assert made.inputs_sha256 == whole.inputs_sha256
    assert set(before) <= set(stored(out))
    assert kills >= 5
    assert no_server_is_left(out)


@pytest.mark.parametrize("seed", range(5))
def test_a_server_killed_at_a_random_moment(seed: int, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rng = random.Random(seed)
    killed = 0
    with start(texts, out, delay_s=0.05) as run:
        end = time.monotonic() + 60
        while killed < 2 and run.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            try:
                known = facts.read(out)
            except evidence.PplError:
                continue
            alive = [i for i in known.instances if not i.stopped and i.pid] if known else []
            if not alive or (killed and not any(i.number > 1 for i in alive)):
                continue
            time.sleep(rng.uniform(0.0, 0.8))
            try:
                os.kill(int(rng.choice(alive).pid or 0), signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed += 1
        said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    made = evidence.read(out / "ppl.json")
    assert made.verdict == "IDENTICAL", made.decided
    assert made.run is not None
    again = [i for i in made.run.instances if i.number > 1]
    assert killed >= 1
    assert again
    assert all("ended with -9" in i.why or "stopped answering" in i.why for i in again)
    # A process that died before it scored anything is no part of its launch.
    used = {(r.arm, r.launch, r.response["instance"]) for r in Store(out).records()}
    assert any("server processes" in w for w in made.warnings) == (len(used) > 4)
    assert len(stored(out)) == RESULTS
    assert no_server_is_left(out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_says_so(number: signal.Signals, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(texts, out, delay_s=0.3) as run:
        end = time.monotonic() + 60
        while time.monotonic() < end and (not out.exists() or not stored(out)):
            time.sleep(0.05)
        run.send_signal(number)
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "stopped: what was scored is stored" in said
    assert "no report was written" not in said
    assert no_server_is_left(out)
    assert finish(texts, out).verdict == "IDENTICAL"


def test_stopped_while_its_pages_are_made(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(texts, out, pages_s=60) as run:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (out / "pages").exists():
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert said.count("stopped: what was scored is stored") == 1
    assert len(stored(out)) == RESULTS


def fake_process(**facts_: Any) -> tuple[subprocess.Popen[str], str]:
    from kvroute.process import free_port

    port = facts_.setdefault("port", free_port())
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in facts_.items()]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    server = subprocess.Popen([sys.executable, str(HERE / "fake_vllm.py"), *flags], env=env)
    end = time.monotonic() + 30
    import socket

    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    return server, f"http://127.0.0.1:{port}"


def test_a_server_that_is_not_ours_dies_and_comes_back(texts: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "requests"
    stock, a = fake_process(route="stock", requests=log)
    fused, b = fake_process(route="fused", requests=log, die_at=5)
    words = ["--stock", a, "--fused", b, "--workspace", "1024"]
    try:
        made = finish(texts, out, *words, code=4)
        assert made.verdict == "INVALID"
        assert f"the fused server at {b} went away while scoring" in made.decided.reasons[0]
        # The other arm was finished meanwhile.
        kept = stored(out)
        assert sum(1 for r in kept if r[2] == "stock") == TEXTS * 2
        assert 0 < sum(1 for r in kept if r[2] == "fused") < TEXTS * 2
        before = asked(log)
        fused.wait()
        fused, _ = fake_process(route="fused", requests=log, port=int(b.rsplit(":", 1)[1]))
        again = finish(texts, out, *words)
        assert again.verdict == "IDENTICAL", again.decided
        assert any("fused launch 1 is made of 2 server processes" in w for w in again.warnings)
        assert set(kept) <= set(stored(out))
        more = asked(log) - before
        assert sum(n for (route, _), n in more.items() if route == "stock") == 1  # its warm-up
        # Launched again once more, both: the noise floor.
        for server in (stock, fused):
            server.kill()
            server.wait()
        stock, _ = fake_process(route="stock", port=int(a.rsplit(":", 1)[1]))
        fused, _ = fake_process(route="fused", port=int(b.rsplit(":", 1)[1]))
        whole = finish(texts, out, *words)
        assert whole.verdict == "IDENTICAL"
        assert len(whole.runs) == 6
        assert whole.statistics is not None
        assert whole.statistics.noise is not None
    finally:
        for server in (stock, fused):
            server.kill()
            server.wait()


def test_a_server_that_comes_back_with_another_configuration(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stock, a = fake_process(route="stock")
    fused, b = fake_process(route="fused", die_at=5)
    words = ["--stock", a, "--fused", b, "--workspace", "1024"]
    try:
        finish(texts, out, *words, code=4)
        kept = stored(out)
        fused.wait()
        fused, _ = fake_process(route="fused", seed=1, port=int(b.rsplit(":", 1)[1]))
        made = finish(texts, out, *words, code=4)
        assert "restarted half-way with another configuration: seed was 0" in str(made.decided)
        assert stored(out) == kept
    finally:
        for server in (stock, fused):
            server.kill()
            server.wait()
