"""What ``/collective_rpc`` can ask every worker.

Start the server with ``--worker-extension-cls kvroute.extension.RouteExtension`` and
``VLLM_SERVER_DEV_MODE=1``; ``bytegate serve`` does both.
"""

from __future__ import annotations

from typing import Any


class RouteExtension:
    """Methods that vLLM adds to its worker class."""

    def bytegate_route(self) -> dict[str, Any]:
        """Return the rank's tally (``kvroute.tally``), as JSON values."""
        from kvroute.pynccl import pynccl
        from kvroute.tally import TALLY
        from kvroute.threshold import decode_tokens

        if "decode_tokens" not in TALLY.facts:  # builders are there before the first request
            TALLY.note(decode_tokens=decode_tokens(self))
        TALLY.note(pynccl=pynccl())
        TALLY.write()
        return TALLY.snapshot()

    def bytegate_untouched(self) -> dict[str, Any]:
        """Whether vLLM's loop and what it calls are the wheel's own (``kvroute.untouched``)."""
        from kvroute.untouched import inspect_worker

        return inspect_worker().to_json()
