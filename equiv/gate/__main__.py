"""``python -m equiv.gate``: ``bytegate gate``, also from a checkout that isn't installed."""

from __future__ import annotations

import sys

from equiv.pairs import add_checkout_paths

if __name__ == "__main__":
    add_checkout_paths()
    from equiv.cli import main

    main(["gate", *sys.argv[1:]])
