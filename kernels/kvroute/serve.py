"""``bytegate serve``: a real vLLM server on a chosen route.

On a machine without a GPU it serves the small model of ``kvroute.model`` with decode context
parallelism on gloo; with a GPU it takes ``--model`` and vLLM's own arguments.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvroute import fp8, model, settings, shared
from kvroute.errors import RouteError
from kvroute.process import STOP_SIGNALS, ServerProcess, free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_PORT = 65_535
PLUGIN = "bytegate"
"""Name of the entry point in the group ``vllm.general_plugins``."""
EXTENSION = "kvroute.extension.RouteExtension"

CPU_ENVIRONMENT = {
    settings.CPU_DCP: "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # TP2 on one NUMA node has no cores to divide
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a compile in the log-prob code: 9 s of the first request
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Environment of a CPU server, unless the caller's own has the variable."""

GPU_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": ("flashinfer",),
    "VLLM_KIMI_K3_GEMM_AR": ("flashinfer", "cutlass"),  # the CUTLASS DSL
}
"""What a GPU server switches off, with 0, where a package is missing; the caller's own wins."""

CPU_ARGUMENTS = {
    "--attention-backend": "CPU_MLA",  # where AMX exists vLLM would take a backend without DCP
    "--max-model-len": "9216",
    "--max-num-batched-tokens": "512",
    "--max-num-seqs": "8",
    "--kv-cache-memory-bytes": "128M",
    "--dtype": "bfloat16",
    "--skip-tokenizer-init": "",
}
"""Arguments of a CPU server, unless the caller gives the same one."""

BOTH_ARGUMENTS = {
    "--generation-config": "vllm",
    "--no-enable-prefix-caching": "",
    "--enforce-eager": "",
    "--enable-logging-iteration-details": "",
    "--enable-prompt-tokens-details": "",
}


@dataclass(frozen=True)
class ServeOptions:
    """What ``bytegate serve`` was asked for.

    Attributes
    ----------
    route : a value of ``BYTEGATE_ROUTE``; ``None`` leaves vLLM as it is.
    tp, dcp : tensor and decode context parallelism.
    model : folder or name; ``None``: the small model (CPU only).
    workspace : rows of the chunked-prefill workspace, or ``None``.
    patches : ``module:function`` values, called once in every process.
    host, port : where to listen; port 0 takes a free one.
    evidence : folder for the ranks' evidence files, or ``None``.
    emulate_fp8 : prefill in fp8 by a backend that upcasts (``kvroute.fp8``), with an fp8 cache.
    share_gpu : ranks share GPUs where there are fewer of these (``kvroute.shared``).
    extra : arguments for vLLM, passed on as they are.

    """

    route: str | None = "stock"
    tp: int = 2
    dcp: int = 2
    model: str | None = None
    workspace: int | None = None
    patches: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 0
    evidence: Path | None = None
    emulate_fp8: bool = False
    share_gpu: bool = False
    extra: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Launch:
    """A command with its environment and address."""

    command: list[str]
    environment: dict[str, str]
    url: str


def plan(options: ServeOptions, environ: Mapping[str, str], device: str) -> Launch:
    """Turn options into a command, without starting anything.

    Raises
    ------
    RouteError
        For a route or size that can't work, or where the plugin isn't installed.

    """
    _check(options, environ, device)
    port = options.port or free_port(options.host)
    environment = {**dict(environ), "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    for name in settings.VARIABLES:
        environment.pop(name, None)
    wanted = {
        settings.ROUTE: options.route,
        settings.PATCH: ",".join(options.patches),
        settings.WORKSPACE: str(options.workspace) if options.workspace else None,
        settings.EVIDENCE: str(options.evidence.resolve()) if options.evidence else None,
        settings.FP8_PREFILL: fp8.EMULATE if options.emulate_fp8 else None,
        settings.SHARE_GPU: "1" if options.share_gpu else None,
    }
    environment.update({name: value for name, value in wanted.items() if value})
    defaults = dict(BOTH_ARGUMENTS)
    if options.emulate_fp8:
        defaults.update(_fp8_arguments(options.extra))
    served = options.model
    if options.share_gpu:
        environment.update(shared.ENVIRONMENT)
        defaults.update(shared.ARGUMENTS)
    if device == "cpu":
        environment = {**CPU_ENVIRONMENT, **environment}
        defaults.update(CPU_ARGUMENTS)
        served = served or str(small_model(options.tp))
    else:
        lacking = {
            name: "0"
            for name, packages in GPU_ENVIRONMENT.items()
            if not all(map(importlib.util.find_spec, packages))
        }
        environment = {**lacking, **environment}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(served), "--host", options.host, "--port", str(port)),
        *("--tensor-parallel-size", str(options.tp)),
        *("--decode-context-parallel-size", str(options.dcp)),
        *("--worker-extension-cls", EXTENSION),
        *_defaults(defaults, options.extra),
        *options.extra,
    ]
    return Launch(command, environment, f"http://{options.host}:{port}")


def small_model(tp: int, *, heads: int | None = None) -> Path:
    """Return the folder of the small model, made where it isn't there.

    Parameters
    ----------
    heads : of all ranks; by default the fewest, from four on, that ``tp`` ranks can share.

    """
    wanted = heads or model.heads_for(tp)
    return model.make(model.default_folder(wanted), heads=wanted)


def start(
    options: ServeOptions,
    *,
    device: str | None = None,
    log: Path | None = None,
    before: Sequence[str] = (),
) -> ServerProcess:
    """Start a server and return at once; ``wait_healthy`` says when it is up.

    Parameters
    ----------
    before : words that stand before the server's command, and end by running it.

    Raises
    ------
    RouteError
        See ``plan``.

    """
    launch = plan(options, os.environ, device or detect_device())
    scratch: Path | None = None
    if "PROMETHEUS_MULTIPROC_DIR" not in launch.environment:
        # Every server needs a folder of its own, or it counts another's workers.
        scratch = Path(tempfile.mkdtemp(prefix="bytegate-metrics-"))
        launch.environment["PROMETHEUS_MULTIPROC_DIR"] = str(scratch)
    command = [*before, *launch.command]
    return ServerProcess(command, launch.environment, launch.url, log, scratch)


def serve(options: ServeOptions) -> int:
    """Serve in the foreground until the server ends or a signal comes; the exit code."""
    pending: list[int] = []  # a signal before the server has a handler must not leave it behind
    previous = {s: signal.signal(s, lambda n, _: pending.append(n)) for s in STOP_SIGNALS}
    try:
        server = start(options)
        sys.stdout.write(f"bytegate: route {options.route or 'as vLLM has it'} at {server.url}\n")
        sys.stdout.flush()
        return server.run(pending)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def detect_device() -> str:
    """``"cuda"`` where torch sees a GPU, else ``"cpu"``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse(arguments: Sequence[str]) -> ServeOptions:
    """Read the command line; what isn't ours is vLLM's.

    Raises
    ------
    RouteError
        For a value of one of ours that can't be read.

    """
    parser = _Parser(prog="bytegate serve", allow_abbrev=False)
    routes = "stock, fused, both, fault:ID, module:function or both:module:function"
    parser.add_argument("--route", default="stock", help=routes)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dcp", type=int, default=2)
    parser.add_argument("--model", help="default on a CPU: a small random model")
    parser.add_argument("--workspace", type=int, help="rows of the chunked-prefill workspace")
    parser.add_argument("--patch", action="append", default=[], help="module:function")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--evidence", type=Path, help="folder for the ranks' evidence")
    parser.add_argument(
        "--emulate-fp8-prefill",
        action="store_true",
        help="fp8 cache and prefill, attention by a backend that upcasts: for the pack's bytes",
    )
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help="ranks share GPUs, NCCL between them by sockets: for bytes on a host with one GPU",
    )
    own, extra = parser.parse_known_args(arguments)
    return ServeOptions(
        route=own.route,
        tp=own.tp,
        dcp=own.dcp,
        model=own.model,
        workspace=own.workspace,
        patches=tuple(own.patch),
        host=own.host,
        port=own.port,
        evidence=own.evidence,
        emulate_fp8=own.emulate_fp8_prefill,
        share_gpu=own.share_gpu,
        extra=tuple(argument for argument in extra if argument != "--"),
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other command does."""

    def error(self, message: str) -> NoReturn:
        raise RouteError(f"{message}; see bytegate serve --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m kvroute.serve``."""
    try:
        return serve(parse(sys.argv[1:] if arguments is None else arguments))
    except RouteError as error:
        sys.stderr.write(f"bytegate: {error}\n")
        return 2


def _check(options: ServeOptions, environ: Mapping[str, str], device: str) -> None:
    _check_route(options)
    if options.tp < 1 or options.dcp < 1 or options.tp % options.dcp:
        raise RouteError(
            f"tp={options.tp}, dcp={options.dcp}: dcp must divide tp, and both be positive",
        )
    heads = heads_of(options.model) if options.model else None
    if heads is not None and heads % options.tp:
        raise RouteError(
            f"tp={options.tp}: the model has {heads} heads, and every rank takes as many as another"
        )
    if options.workspace is not None and options.workspace < 1:
        raise RouteError(f"workspace={options.workspace}: expected a positive number of rows")
    if not 0 <= options.port <= MAX_PORT:
        raise RouteError(f"port={options.port}: expected 0 to {MAX_PORT}")
    if options.evidence is not None:
        _check_folder(options.evidence)
    if device != "cpu" and options.model is None:
        raise RouteError("--model is missing: the small model is for machines without a GPU")
    if device == "cpu" and options.share_gpu:
        raise RouteError("--share-gpu: there is no GPU here; ranks on a CPU need nothing of it")
    names = {p.name for p in importlib.metadata.entry_points(group="vllm.general_plugins")}
    allowed = environ.get("VLLM_PLUGINS")
    if PLUGIN not in names or (allowed is not None and PLUGIN not in allowed.split(",")):
        raise RouteError(
            f"vLLM would not load the plugin {PLUGIN!r}: install this project beside vLLM, and "
            "name it in VLLM_PLUGINS where that is set",
        )


def _fp8_arguments(extra: Sequence[str]) -> dict[str, str]:
    """Return what vLLM needs beside the plugin to take fp8 queries, unless it is given.

    Raises
    ------
    RouteError
        For a cache, or an attention configuration, with which it would not.

    """
    words = [word for given in extra for word in given.split("=", 1)]
    for name, value in pairwise(words):
        if name == "--kv-cache-dtype" and value not in fp8.CACHES:
            raise RouteError(
                f"--kv-cache-dtype {value}: fp8 prefill emulation needs {' or '.join(fp8.CACHES)}"
            )
    found = {"--kv-cache-dtype": "fp8"}
    quantize = "use_prefill_query_quantization"
    given = [word for word in extra if word.startswith(("--attention-config", "-ac"))]
    if not given:
        found["--attention-config"] = json.dumps({quantize: True})
    elif quantize not in " ".join(extra):
        raise RouteError(f"{given[0]}: fp8 prefill emulation needs {quantize}: true in it as well")
    return found


def heads_of(served: str) -> int | None:
    """Return the attention heads of a model in a folder; None where no folder tells them."""
    try:
        facts = json.loads((Path(served) / "config.json").read_text(encoding="utf-8"))
        return int(facts.get("text_config", facts)["num_attention_heads"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_route(route: str) -> None:
    """Check that a route is one, and that its fault, or its function, is there.

    Raises
    ------
    RouteError
        When it isn't.

    """
    settings.check_route(route)
    if route.startswith("fault:"):
        from kvroute import faults

        faults.known(route.removeprefix("fault:"))
    elif ":" in route:
        settings.resolve(route.removeprefix(settings.BOTH))


def _check_route(options: ServeOptions) -> None:
    if options.route is not None:
        check_route(options.route)
    for patch in options.patches:
        settings.resolve(patch)


def _check_folder(folder: Path) -> None:
    """Raise ``RouteError`` where the ranks couldn't write: they would serve, and leave nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RouteError(f"evidence={folder}: can't write there ({error.strerror})") from None


def _defaults(defaults: Mapping[str, str], extra: Sequence[str]) -> list[str]:
    given = {argument.partition("=")[0] for argument in extra}
    found = []
    for name, value in defaults.items():
        opposite = "--" + name.removeprefix("--no-") if name.startswith("--no-") else None
        if name in given or opposite in given:
            continue
        found += [name, value] if value else [name]
    return found


if __name__ == "__main__":
    sys.exit(main())
