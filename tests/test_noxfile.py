"""The noxfile: exit codes, what it refuses, and its one environment when things go wrong."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from types import ModuleType

pytest.importorskip("nox", reason="nox is not installed here; the checkout works without it")

ROOT = Path(__file__).resolve().parents[1]
STUB = """
import os, sys, time
if sys.argv[1:] == ["wait"]:
    print("waiting", flush=True)
    time.sleep(120)
print("ran with", sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose `equiv` ends with the exit code that it is given."""
    for name in ("noxfile.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "equiv").mkdir()
    (tmp_path / "equiv" / "__init__.py").touch()
    (tmp_path / "equiv" / "__main__.py").write_text(STUB, encoding="utf-8")
    return tmp_path


def nox_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nox", "--no-color", *arguments]


def nox_variables(**more: str) -> dict[str, str]:
    return {**os.environ, "BYTEGATE_PYTHON": sys.executable, **more}


def nox(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        nox_command(*arguments),
        cwd=checkout,
        env=nox_variables(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4])
def test_exit_code_of_bytegate_is_the_exit_code_of_nox(checkout: Path, code: int) -> None:
    done = nox(checkout, "-s", "equiv", "--", str(code), "--profile", "gate")
    assert done.returncode == code, done.stdout
    assert f"ran with ['{code}', '--profile', 'gate']" in done.stdout


@pytest.mark.parametrize("session", ["ppl", "gate", "texts"])
def test_what_does_not_exist_is_refused(checkout: Path, session: str) -> None:
    done = nox(checkout, "-s", session)
    assert done.returncode == 2, done.stdout
    assert f"{session} is not built yet" in done.stdout


def test_a_python_that_lacks_modules_is_refused_by_name(checkout: Path) -> None:
    described = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    described = described.replace('"numpy>=2.0"', '"numpy>=999", "nowhere-to-be-found>=1"')
    (checkout / "pyproject.toml").write_text(described, encoding="utf-8")
    done = nox(checkout, "-s", "equiv", "--", "0")
    assert done.returncode == 2, done.stdout
    refusal = next(line for line in done.stdout.splitlines() if "lacks what equiv needs" in line)
    assert "numpy>=999 (it has " in refusal
    assert "nowhere-to-be-found>=1" in refusal
    assert "ran with" not in done.stdout


def test_a_python_that_is_not_there_is_refused(checkout: Path) -> None:
    done = nox(checkout, "-s", "equiv", BYTEGATE_PYTHON="/nowhere/python")
    assert done.returncode == 2, done.stdout
    assert "BYTEGATE_PYTHON=/nowhere/python: expected a Python" in done.stdout


def test_a_failed_set_up_is_invalid_and_not_a_divergence(checkout: Path) -> None:
    done = nox(checkout, "-s", "equiv", BYTEGATE_PYTHON="cpu", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.returncode == 4, done.stdout
    assert "could not be set up" in done.stdout
    assert not (checkout / ".nox" / "bytegate" / "bytegate-stamp.json").exists()


def test_terminating_nox_terminates_what_it_runs(checkout: Path) -> None:
    with subprocess.Popen(
        nox_command("-s", "equiv", "--", "wait"),
        cwd=checkout,
        env=nox_variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        while "waiting" not in running.stdout.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        # Both ends of the pipe are closed only once the stub is gone too.
        running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile_under_test", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def noxfile(loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The noxfile as a module whose environment lies in an empty folder."""
    module = loaded
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / ".nox" / "bytegate")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".nox" / "bytegate" / "stamp.json")
    monkeypatch.setattr(module, "LOCK", tmp_path / ".nox" / "bytegate.lock")
    monkeypatch.setattr(module, "_set_up", module._set_up)  # each test brings its own
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return module


class Commands:
    """Stands in for nox's session and for running commands: records both."""

    def __init__(self, noxfile: ModuleType, fails_at: str = "") -> None:
        self.lines: list[str] = []
        self.commands: list[str] = []
        self.fails_at = fails_at
        self.fails = noxfile.CommandFailed
        self.name = "tests"

    def error(self, line: str) -> NoReturn:
        raise RuntimeError(line)

    def log(self, line: str) -> None:
        self.lines.append(line)

    def step(self, _session: object, lock: IO[str], *command: str) -> None:
        line = " ".join(command)
        self.commands.append(line)
        with Path(lock.name).open("a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if "virtualenv" in line:
            Path(command[-1]).mkdir(parents=True)
        if self.fails_at and re.search(self.fails_at, line):
            raise self.fails(line)


def set_up(noxfile: ModuleType, fails_at: str = "") -> list[str]:
    recorded = Commands(noxfile, fails_at)
    noxfile._set_up = recorded.step
    with noxfile._own_environment(recorded):
        pass
    return recorded.commands


def test_the_environment_is_made_once(noxfile: ModuleType) -> None:
    first = set_up(noxfile)
    assert sum("virtualenv" in line for line in first) == 1
    assert sum(line.endswith(f"install {noxfile.TORCH}") for line in first) == 1
    assert not any(noxfile.TORCH_INDEX in line for line in first)
    assert set_up(noxfile) == []


def test_torch_comes_from_its_own_index_where_pip_has_none(noxfile: ModuleType) -> None:
    commands = set_up(noxfile, fails_at=r"check install torch\S+$")
    assert f"install --index-url {noxfile.TORCH_INDEX} {noxfile.TORCH}" in commands[3]


def test_a_changed_project_is_installed_into_the_same_environment(noxfile: ModuleType) -> None:
    set_up(noxfile)
    pyproject = noxfile.ROOT / "pyproject.toml"
    described = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(described.replace("line-length = 100", "line-length = 99"), "utf-8")
    assert set_up(noxfile) == []
    pyproject.write_text(described.replace("numpy>=2.0", "numpy>=2.1"), "utf-8")
    again = set_up(noxfile)
    assert again
    assert not any("virtualenv" in line for line in again)


def test_another_way_of_set_up_starts_afresh(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(noxfile)
    monkeypatch.setattr(noxfile, "SETUP", noxfile.SETUP + 1)
    assert any("virtualenv" in line for line in set_up(noxfile))


@pytest.mark.parametrize("step", ["virtualenv", r"pip>=25\.1", "--editable"])
def test_a_set_up_that_broke_off_is_repeated_whole(noxfile: ModuleType, step: str) -> None:
    with pytest.raises(RuntimeError, match="could not be set up"):
        set_up(noxfile, fails_at=step)
    rubble = noxfile.ENVIRONMENT / "rubble"
    rubble.touch()
    assert any("virtualenv" in line for line in set_up(noxfile))
    assert not rubble.exists()
    assert set_up(noxfile) == []


def test_a_damaged_stamp_counts_as_none(noxfile: ModuleType) -> None:
    set_up(noxfile)
    noxfile.STAMP.write_text('{"base": ', encoding="utf-8")
    assert any("virtualenv" in line for line in set_up(noxfile))


KILLED_HALF_WAY = """
import fcntl, importlib.util, sys, types
spec = importlib.util.spec_from_file_location("noxfile_under_test", sys.argv[1])
noxfile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(noxfile)
step = "import time; print('step', flush=True); time.sleep(1.5)"
with open(sys.argv[2], "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    session = types.SimpleNamespace(log=str)
    noxfile._set_up(session, lock, sys.executable, "-c", step)
"""


def test_a_step_that_outlives_nox_keeps_the_lock(tmp_path: Path) -> None:
    """A pip whose nox was killed must not meet the next session in one folder."""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", KILLED_HALF_WAY, str(ROOT / "noxfile.py"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "step\n"
        running.kill()
        running.wait()
        with path.open("a") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_EX)


HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_SH if sys.argv[2] == "use" else fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(1.5)
"""


@pytest.mark.parametrize(
    ("other", "stale", "waits"),
    [("use", False, False), ("use", True, True), ("change", False, True), ("change", True, True)],
)
def test_two_sessions_at_once(noxfile: ModuleType, *, other: str, stale: bool, waits: bool) -> None:
    set_up(noxfile)
    if stale:
        noxfile.STAMP.unlink()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(noxfile.LOCK), other], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        begun = time.monotonic()
        session = Commands(noxfile)
        noxfile._set_up = session.step
        with noxfile._own_environment(session):
            waited_s = time.monotonic() - begun
            with noxfile.LOCK.open("a") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert (waited_s > 1) == waits, session.lines
        assert any("waiting" in line for line in session.lines) == waits
        assert bool(session.commands) == stale
    assert json.loads(noxfile.STAMP.read_text(encoding="utf-8")) == noxfile._wanted()
