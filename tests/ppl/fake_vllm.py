"""A stand-in for a vLLM server, to inject faults fast: deterministic log-probs, honest counters.

Nothing here says anything about vLLM; the tests in tests/servers do that, on real servers. It
answers what ``ppl`` asks, counts what ``kvroute.chunks.predict`` says, and logs its engine steps.

    python fake_vllm.py --port 8000 --route fused
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from kvroute.chunks import Layout, predict, steps

LAYERS, PAGE = 2, 16


def log_probs(ids: list[int], seed: int = 0) -> Any:
    """Return float32 ``[n - 1]``: each depends on all ids up to its own."""
    wide = np.asarray(ids, dtype=np.uint64)
    powers = np.cumprod(np.full(len(ids), 6364136223846793005, np.uint64))
    mixed = np.cumsum(wide * powers + np.uint64(seed + 1))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    unit = (mixed >> np.uint64(40)).astype(np.float64) / 2**24
    return -(unit[1:] * 8 + 0.01).astype(np.float32)


@dataclass
class Options:
    """A fake server; ``shift_nats`` lowers exposed log-probs, ``noise_nats`` draws by process.

    ``crowded_nats`` lowers them once several requests have run at the same time.
    ``dcp`` is ``ranks`` where it is 0; so many of the last ranks as ``silent`` tell nothing.
    ``fp8`` emulates fp8 prefill: ``yes``, or with a fault, ``bf16 calls``, ``bf16 packs`` or
    ``one rank``. ``decode`` is up to how many tokens run as decode. ``pynccl`` is told by each
    rank: ``on``, ``off``, or ``off in one rank``; by none where it is empty. ``shared``: its ranks
    share a GPU, ``yes``, or all but one, ``one rank``.
    """

    port: int = 0
    route: str = "stock"
    budget: int = 512
    workspace: int = 1024
    dev: bool = True
    metrics: bool = True
    scale_out: bool = False
    prefix_caching: bool = False
    speculative: bool = False
    seed: int = 0
    model: str = "fake"
    version: str = "0.0.fake"
    shift_nats: float = 0.0
    noise_nats: float = 0.0
    crowded_nats: float = 0.0
    delay_s: float = 0.0
    key: str = ""
    requests: str = ""
    die_at: int = 0
    extra_calls: int = 0
    log: bool = False
    tokenizer: int = -1
    restart_at: int = 0
    restart_seed: int = 0
    ranks: int = 2
    dcp: int = 0
    silent: int = 0
    max_logprobs: int = 20
    fp8: str = ""
    decode: int = 1
    pynccl: str = ""
    shared: str = ""


@dataclass
class Fake:
    """State of one fake server."""

    options: Options
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    tokens: int = 0
    running: int = 0
    crowded: bool = False
    step: int = 0
    generation: int = 0
    instance: str = field(default_factory=lambda: f"{os.getpid()}-{time.time_ns()}")

    def score(self, ids: list[int]) -> Any:
        """Score, count and log as a server does for a prompt that is alone."""
        o = self.options
        with self.lock:
            self.running += 1
            self.crowded |= self.running > 1
            if o.requests:
                with Path(o.requests).open("a", encoding="utf-8") as f:
                    f.write(f"{o.route} {hashlib.sha256(str(ids).encode()).hexdigest()}\n")
            mine = self.finished + 1
            if o.restart_at and mine == o.restart_at and not self.generation:
                self.start_again()
        time.sleep(o.delay_s)
        if o.die_at and mine >= o.die_at:
            os._exit(9)
        layout = Layout(PAGE, o.dcp or o.ranks, 1, o.workspace)
        cost = predict(len(ids), o.budget, layout, LAYERS, o.decode)
        packs = o.route not in {"stock", "untouched"} and not o.route.startswith("fault:L")
        values = log_probs(ids, o.seed)
        exposed = min(o.budget, len(values))
        values[exposed:] -= np.float32(o.shift_nats)
        if o.crowded_nats:
            time.sleep(0.05)  # so that a burst's requests meet
            values[exposed:] -= np.float32(o.crowded_nats * self.crowded)
        if o.noise_nats:
            own = int(hashlib.sha256(self.instance.encode()).hexdigest()[:8], 16)
            rng = np.random.default_rng([own, sum(ids)])
            values[exposed:] += rng.standard_normal(len(values) - exposed).astype(
                np.float32
            ) * np.float32(o.noise_nats)
            values = np.minimum(values, np.float32(0))
        with self.lock:
            for name, n in {
                "calls": cost.calls + o.extra_calls,
                "chunks": cost.chunks,
                "continuations": cost.continuations,
                "context_tokens": cost.context_tokens,
                "packs": cost.chunks if packs else 0,
                "pack_rows": cost.context_tokens if packs else 0,
            }.items():
                self.counts[name] = self.counts.get(name, 0) + n
            for _, new in steps(len(ids), o.budget) if o.log else ():
                sys.stdout.write(
                    f"Engine 000: Iteration({self.step}): 1 context requests, {new} context tokens,"
                    " 0 generation requests, 0 generation tokens, iteration elapsed time: 1.0 ms\n"
                )
                self.step += 1
            sys.stdout.flush()
            self.finished += 1
            self.tokens += len(ids)
            self.running -= 1
        return values

    def start_again(self) -> None:
        """Become another process, perhaps with another configuration."""
        self.generation += 1
        self.counts, self.finished, self.tokens = {}, 0, 0
        self.instance += "-again"
        self.options.seed = self.options.restart_seed

    def tallies(self) -> list[dict[str, Any]]:
        """Return the ranks' tallies."""
        o = self.options
        counts = {name: self.counts.get(name, 0) for name in _NAMES}
        packs = counts.pop("packs")
        kind = "bfloat16" if o.fp8 in {"", "bf16 packs"} else "bfloat16>float8_e4m3fn"
        return [
            {
                "schema": "bytegate.route/1",
                "pid": os.getpid() * 10 + rank + 1000 * self.generation,
                "layers": {o.route: LAYERS},
                "packs": {kind: packs} if packs else {},
                **counts,
                "fp8_calls": 0 if o.fp8 in {"", "bf16 calls"} else counts["calls"],
                **({"fp8_prefill": "FAKE_FP8_EMULATED"} if self.emulates(rank) else {}),
                "route": o.route,
                "switch": None,
                "rank": rank,
                "world": o.ranks,
                "dcp": o.dcp or o.ranks,
                "gather": "fake",
                "decode_tokens": o.decode,
                **({"pynccl": self.has_pynccl(rank)} if o.pynccl else {}),
                **({"share_gpu": {"ranks": o.ranks, "gpus": 1}} if self.shares(rank) else {}),
                "workspace_rows": o.workspace + o.workspace // (o.dcp or o.ranks)
                if self.finished
                else None,
                "vllm": o.version,
            }
            for rank in range(o.ranks - o.silent)
        ]

    def emulates(self, rank: int) -> bool:
        """Whether a rank says that it emulates fp8 prefill."""
        return bool(self.options.fp8) and not (self.options.fp8 == "one rank" and rank)

    def shares(self, rank: int) -> bool:
        """Whether a rank says that it shares a GPU."""
        return bool(self.options.shared) and not (self.options.shared == "one rank" and rank)

    def has_pynccl(self, rank: int) -> bool:
        """Whether a rank's PyNccl works."""
        return self.options.pynccl == "on" or (self.options.pynccl != "off" and rank == 0)

    def metrics(self) -> str:
        """Return ``/metrics``."""
        o = self.options
        caching = str(o.prefix_caching)
        lines = [
            f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{caching}"}} 1.0',
            f'vllm:num_requests_running{{engine="0"}} {self.running}.0',
            'vllm:num_preemptions_total{engine="0"} 0.0',
            f'vllm:prompt_tokens_total{{engine="0"}} {self.tokens}.0',
            'vllm:prompt_tokens_cached_total{engine="0"} 0.0',
            f'vllm:request_success_total{{engine="0",finished_reason="length"}} {self.finished}.0',
        ]
        if o.speculative:
            lines.append('vllm:spec_decode_num_drafts_total{engine="0"} 0.0')
        if o.metrics:
            lines += [
                f'bytegate_{name}_total{{rank="{rank}",route="{o.route}",switch=""}} '
                f"{self.counts.get(name, 0)}.0"
                for name in _NAMES
                if name != "context_tokens"
                for rank in range(o.ranks - o.silent)
            ]
        return "\n".join(lines) + "\n"

    def info(self) -> dict[str, Any]:
        """Return ``/server_info``."""
        o = self.options
        return {
            "vllm_config": {
                "scheduler_config": {
                    "max_num_batched_tokens": o.budget,
                    "max_num_seqs": 8,
                    "enable_chunked_prefill": True,
                },
                "cache_config": {
                    "block_size": PAGE,
                    "enable_prefix_caching": o.prefix_caching,
                    "num_gpu_blocks": os.getpid(),
                },
                "parallel_config": {
                    "decode_context_parallel_size": o.dcp or o.ranks,
                    "tensor_parallel_size": o.ranks,
                    "cp_kv_cache_interleave_size": 1,
                    "master_port": os.getpid(),
                },
                "model_config": {"max_model_len": 9216, "dtype": "fake", "seed": o.seed},
                "speculative_config": {"method": "mtp"} if o.speculative else None,
                "instance_id": self.instance,
            },
            "vllm_env": {"VLLM_PORT": o.port},
            "system_env": {"torch_version": "fake"},
        }


_NAMES = ("calls", "chunks", "continuations", "context_tokens", "packs", "pack_rows")


def handler(fake: Fake) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - a server's pages
    """Return the handler of a fake server."""
    o = fake.options

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
            """Log nothing."""

        def answer(self, body: Any, code: int = 200) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, code: int, words: str) -> None:
            self.answer({"error": {"message": words}}, code)

        def do_GET(self) -> None:
            pages: dict[str, Any] = {
                "/health": "",
                "/version": {"version": o.version},
                "/v1/models": {"data": [{"id": o.model, "max_model_len": 9216}]},
                "/metrics": fake.metrics(),
            }
            path = self.path.partition("?")[0]
            if path.startswith("/v1") and not self.allowed():
                return
            if path == "/server_info" and o.dev:
                self.answer(fake.info())
            elif path in pages:
                self.answer(pages[path])
            else:
                self.refuse(404, "Not Found")

        def allowed(self) -> bool:
            if o.key and self.headers.get("Authorization") != f"Bearer {o.key}":
                self.refuse(401, "Unauthorized")
                return False
            return True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/v1") and not self.allowed():
                return
            if self.path == "/collective_rpc" and o.dev:
                untouched = [{"untouched": True, "problems": []}] * o.ranks
                route = body["method"] == "bytegate_route"
                self.answer({"results": fake.tallies() if route else untouched})
            elif body.get("prompt_logprobs", 0) > o.max_logprobs:
                most = f"which is greater than max allowed: {o.max_logprobs}"
                self.refuse(400, f"Requested prompt logprobs of {body['prompt_logprobs']}, {most}")
            elif self.path == "/v1/completions":
                self.answer(completion(body, fake.score(body["prompt"])))
            elif self.path == "/inference/v1/generate" and o.scale_out:
                ids = body["token_ids"]
                file = io.BytesIO()
                np.save(file, fake.score(ids)[:, None])
                text = base64.b64encode(file.getvalue()).decode()
                self.answer(
                    {
                        "choices": [{"token_ids": [0]}],
                        "prompt_token_ids": ids,
                        "prompt_token_id_logprobs": text,
                        "usage": {"prompt_tokens": len(ids)},
                    }
                )
            elif self.path == "/tokenize" and o.tokenizer >= 0:
                words = body["prompt"].encode()
                self.answer({"tokens": [b + o.tokenizer for b in words]})
            elif self.path == "/inference/v1/generate":
                self.refuse(403, "Scale-out endpoints are disabled")
            else:
                self.refuse(404, "Not Found")

    return Handler


def best(own: int, value: Any, k: int) -> dict[str, Any]:
    """Return the k best tokens: one in five is the row's own, whose entry takes its rank."""
    if not k:
        return {}
    others = [(own + n, value * np.float32(n / 8)) for n in range(1, k + 1)]
    if own % 5 == 0:
        others = [(own, value), *((i, value * np.float32(2)) for i, _ in others[1:])]
    return {
        str(i): {"logprob": float(v), "rank": rank} for rank, (i, v) in enumerate(others, start=1)
    }


def completion(body: dict[str, Any], values: Any) -> dict[str, Any]:
    """Return an answer of ``/v1/completions``."""
    ids = body["prompt"]
    scored = zip(ids[1:], values, strict=True)
    k = body["prompt_logprobs"]
    rows = [{str(i): {"logprob": float(v), "rank": 9}, **best(i, v, k)} for i, v in scored]
    usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": 0}}
    choice = {"token_ids": [0], "prompt_token_ids": ids, "prompt_logprobs": [None, *rows]}
    return {"choices": [choice], "usage": usage}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


def serve(options: Options) -> tuple[_Server, Fake]:
    """Make a server; ``serve_forever`` runs it."""
    fake = Fake(options)
    made = _Server(("127.0.0.1", options.port), handler(fake))
    options.port = made.server_address[1]
    return made, fake


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    for name, value in vars(Options()).items():
        if isinstance(value, bool):
            parser.add_argument(
                f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, default=value
            )
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    made, _ = serve(Options(**vars(parser.parse_args())))
    made.serve_forever(0.05)


if __name__ == "__main__":
    main()
