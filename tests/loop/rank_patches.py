"""Changes by which one rank of several is lost in a collective."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any


def dies() -> None:
    _last(lambda: os.kill(os.getpid(), signal.SIGKILL))


def sleeps() -> None:
    _last(lambda: time.sleep(1000))


def raises() -> None:
    def act() -> None:
        raise RuntimeError("the wire is cut")

    _last(act)


def stays() -> None:
    _last(lambda: None)


def _last(act: Callable[[], Any]) -> None:
    import torch.distributed as dist

    real = dist.all_gather_into_tensor

    def gather(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            act()
        return real(*args, **kwargs)

    dist.all_gather_into_tensor = gather
