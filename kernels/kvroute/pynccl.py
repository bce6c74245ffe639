"""Whether the collective behind a sharded decode step runs at all: PyNccl of the DCP group."""

from __future__ import annotations

import sys
from typing import Any


def pynccl(state: Any = None) -> bool | None:
    """Whether this worker's decode context parallel group has a PyNccl that works.

    vLLM combines a decode step's attention outputs by the group's reduce-scatter, which on a GPU
    goes through PyNccl alone. Where that is off, vLLM 0.33 returns what it allocated: memory that
    nobody wrote.

    Parameters
    ----------
    state : ``vllm.distributed.parallel_state``, by default as this process imported it.

    Returns
    -------
    bool | None
        ``False`` on a CUDA device where the group shards and PyNccl isn't there or is disabled.
        ``None`` where nothing is known: one rank, no group, a communicator without it (CPU),
        another version of vLLM. It never raises.

    """
    state = state if state is not None else sys.modules.get("vllm.distributed.parallel_state")
    try:
        group = state.get_dcp_group()
        communicator = group.device_communicator
        if int(group.world_size) < 2 or not hasattr(communicator, "pynccl_comm"):  # noqa: PLR2004 - one shares with nobody
            return None
        mine = communicator.pynccl_comm
        works = mine is not None and not mine.disabled
        known = works or communicator.device.type == "cuda"
    except Exception:  # noqa: BLE001 - another vLLM; asserts where there is no group
        return None
    return works if known else None
