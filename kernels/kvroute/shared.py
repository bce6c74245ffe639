"""Ranks that share GPUs: decode context parallelism on a host with fewer GPUs than ranks.

vLLM gives each rank of a node a GPU of its own, and NCCL refuses two ranks of one host on one
device. Here rank r takes GPU r modulo the number of them, and NCCL is told that each rank is a host
of its own, so that it connects them by sockets. Everything else is vLLM's and NCCL's own: the loop,
NCCL's collectives, the kernels. What it shows is bytes; its times are those of ranks that take
turns. Where there are enough GPUs, each rank has its own, as ever; a server started with
``ENVIRONMENT`` and ``ARGUMENTS`` goes without the collectives that they switch off even then.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from kvroute.errors import RouteError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

NAME = "share_gpu"
"""What a rank's tally calls it where ranks do share: ``{"ranks": 2, "gpus": 1}``."""

NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",  # between ranks of one host, its own network alone
}
"""What NCCL is told beside each rank's own host; the caller's own environment wins."""

HOST = "NCCL_HOSTID"
"""NCCL takes ranks with different values for ranks of different hosts."""

ENVIRONMENT = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_KIMI_K3_GEMM_AR": "0",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
}
"""vLLM's collectives that map peers' memory, which needs a device for each rank: off.

Whatever the caller's environment says: none of them can work."""

ARGUMENTS = {
    "--disable-custom-all-reduce": "",  # it maps peers' memory too
    "--distributed-executor-backend": "mp",  # by default vLLM counts GPUs first, and refuses
}
"""Arguments of such a server, unless the caller gives the same one."""


def as_a_host(rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell NCCL that this rank is alone on its host; call it before NCCL starts."""
    environ[HOST] = f"bytegate-rank-{rank}"
    for name, value in NCCL.items():
        environ.setdefault(name, value)


def install(config: Any = None, count: Any = None) -> list[str]:
    """Let vLLM's workers share GPUs.

    Parameters
    ----------
    config : vLLM's ``ParallelConfig``.
    count : returns the number of visible GPUs; by default vLLM's platform does.

    Returns
    -------
    list[str]
        What was done, for the tally.

    Raises
    ------
    RouteError
        In a vLLM that places its ranks in another way; once ranks would share, on several hosts,
        by another backend than ``mp``, or without a GPU.

    """
    from kvroute.tally import TALLY

    if config is None:
        from vllm.config import ParallelConfig

        config = ParallelConfig
    if count is None:
        from vllm.platforms import current_platform

        count = current_platform.device_count
    placed = getattr(config, "get_local_gpu_index", None)
    if placed is None:
        raise RouteError("ranks can't share a GPU: this vLLM has no get_local_gpu_index")
    if getattr(placed, "shares", False):
        return []

    @functools.wraps(placed)
    def shared(self: Any, local_rank: int, *more: Any, **named: Any) -> int:
        index = int(placed(self, local_rank, *more, **named))
        ranks = int(self.local_world_size) * max(1, int(self.data_parallel_size_local))
        gpus = int(count())
        if gpus < 1:
            raise RouteError("ranks can't share a GPU: there is none")
        if ranks <= gpus:
            return index
        if self.nnodes != 1 or self.distributed_executor_backend != "mp":
            how = f"{self.nnodes} nodes, backend {self.distributed_executor_backend}"
            raise RouteError(f"ranks can't share a GPU: {how}; expected one node, backend mp")
        as_a_host(index)
        TALLY.note(**{NAME: {"ranks": ranks, "gpus": gpus}})
        return index % gpus

    shared.shares = True  # type: ignore[attr-defined]
    config.get_local_gpu_index = shared
    return [NAME]
