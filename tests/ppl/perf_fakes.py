"""``bytegate perf --part serving`` with fake servers and a fake client: ``python perf_fakes.py``.

All that is replaced are the two commands that are started, and what takes seconds and proves
nothing here. ``FAKE`` has ``up_s``, ``down_s`` and ``client_s``, how long a server takes to be up
and to stop, and a client to measure; ``pids``, a file to which every process that starts adds its
name and id; ``silent``, for a client that leaves nothing; ``question``, what is to differ in it;
and ``path``, a folder to import from.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
FACTS: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))
PACKS = {"stock": 0, "fused": 8}


def note(name: str, pid: int) -> None:
    """Add a process to the list of all that started."""
    with Path(FACTS["pids"]).open("a", encoding="utf-8") as f:
        f.write(f"{name} {pid}\n")


def serve(route: str, port: int) -> None:
    """Serve with a child of our own, as vLLM has its ranks, until a signal comes."""
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(f"server-{route}", os.getpid())
    note("rank", rank.pid)

    def stop(*_: object) -> None:
        time.sleep(FACTS.get("down_s", 0.0))
        rank.kill()
        rank.wait()
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    time.sleep(FACTS.get("up_s", 0.0))
    text = "".join(
        f'bytegate_{name}_total{{rank="{rank}",route="{route}",switch=""}} {n}.0\n'
        for rank in range(2)
        for name, n in (("chunks", 8), ("packs", PACKS.get(route, 8)))
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever(0.05)


def measure(folder: str, stem: str, repeats: int) -> None:
    """Leave a result for each run, as vLLM's client does, the first before the waiting."""
    note(f"client-{stem}", os.getpid())
    if FACTS.get("silent"):
        return  # and it says that all went well
    arm = stem.partition("-")[0]
    counts = {"chunks": 8, "packs": PACKS[arm]}
    for n in range(1, repeats + 1):
        figures = {"completed": 4, "failed": 0, "total_token_throughput": 100.0 + time.time() % 1}
        place = Path(folder) / f"{stem}-{n}"
        ranks = {"before": {}, "after": counts, "ranks": {"0": counts, "1": counts}}
        Path(f"{place}.json").write_text(json.dumps({"duration": 2.0, **figures}), "utf-8")
        Path(f"{place}.counters.json").write_text(json.dumps(ranks), "utf-8")
        if n == 1:
            time.sleep(FACTS.get("client_s", 0.0))


def main(words: list[str]) -> int:
    """Run ``bytegate perf`` with these words."""
    from equiv import cli
    from equiv.command import run_app
    from kvroute import serve as serving_of
    from kvroute.process import free_port
    from ppl import serving, serving_client

    def plan(asked: Any, environ: Any, _device: str) -> serving_of.Launch:
        port = free_port()
        command = [sys.executable, str(HERE), "serve", str(asked.route), str(port)]
        return serving_of.Launch(command, dict(environ), f"http://127.0.0.1:{port}")

    def client(_url: Any, load: Any, *rest: Any) -> list[str]:
        folder, stem = rest[-2:]
        return [sys.executable, str(HERE), "measure", str(folder), stem, str(load.repeats)]

    serving_of.plan = plan
    serving_of.detect_device = lambda: "cpu"
    serving_client.client_command = client
    serving_client.tokenizer = lambda model, _folder: model
    serving._arguments = lambda options: list(options.extra)
    serving.folder_of = lambda _: Path("small")
    serving.here = lambda: {"version of torch": "2", **FACTS.get("question", {})}
    serving.tallies_of = lambda _: [{"packs": {"bfloat16": 1}}]
    return run_app(cli.app, ["perf", *words], "bytegate")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), *([FACTS["path"]] if "path" in FACTS else [])]
    # A shell's background job, such as CI may be, has Ctrl-C ignored, and so have its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "measure":
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(main(sys.argv[1:]))
