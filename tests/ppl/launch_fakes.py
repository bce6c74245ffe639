"""``ppl run`` that launches fake servers instead of vLLM's: ``python launch_fakes.py OUT OPTIONS``.

All that is replaced is the command which starts a server, and what takes seconds and proves
nothing here: hashing a model and collecting the environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main(words: list[str]) -> int:
    """Run ``ppl run`` with these words."""
    from equiv.command import run_app
    from kvroute import serve
    from kvroute.process import free_port
    from ppl import options, outputs, runner, servers
    from ppl.cli import ppl_app

    facts: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))
    pages_s = facts.pop("pages_s", 0)

    def plan(asked: Any, environ: Any, _device: str) -> serve.Launch:
        port = free_port()
        mine = {**facts, "port": port, "route": asked.route}
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in mine.items()]
        command = [sys.executable, str(HERE / "fake_vllm.py"), "--log", *flags]
        return serve.Launch(command, dict(environ), f"http://127.0.0.1:{port}")

    def leave(out: Path, *_: Any, **__: Any) -> None:
        (out / "pages").touch()
        time.sleep(pages_s)

    serve.plan = plan
    if pages_s:
        outputs.leave = leave
    servers.has_vllm = lambda: True
    serve.detect_device = lambda: "cpu"
    options.default_model = lambda: HERE
    runner.model_identity = lambda _: "fake"
    runner._sources = dict
    runner.environment.collect = lambda *_: {}
    return run_app(ppl_app, words, "bytegate ppl")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    # A shell's background job, such as CI may be, has Ctrl-C ignored, and so have its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
