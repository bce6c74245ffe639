"""``python -m ppl`` is ``bytegate ppl``."""

from __future__ import annotations

import sys

from equiv.command import run_app
from ppl.cli import ppl_app

if __name__ == "__main__":
    sys.exit(run_app(ppl_app, sys.argv[1:], "bytegate ppl"))
