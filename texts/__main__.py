"""``python -m texts`` is ``bytegate texts``."""

from __future__ import annotations

import sys

from equiv.command import run_app
from texts.cli import texts_app

if __name__ == "__main__":
    sys.exit(run_app(texts_app, sys.argv[1:], "bytegate texts"))
