"""A slow producer that lets its dependents start early (programmatic dependent launch, sm_90+).

It triggers ``griddepcontrol.launch_dependents`` first, waits, and only then copies. A dependent
kernel that was launched with programmatic stream serialization and doesn't wait reads old bytes.
Source: CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def slow_producer(source, target, size, delay_ns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, D103, N803
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < delay_ns:
        now = tl.extra.cuda.globaltimer()
    step = tl.num_programs(0) * BLOCK
    at = tl.program_id(0).to(tl.int64) * BLOCK
    while at < size:
        i = at + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < size), mask=i < size)
        at += step


def launch(source: torch.Tensor, target: torch.Tensor, *, delay_ns: int) -> None:
    """Copy ``source`` (uint8) to ``target`` after a delay, on the current stream.

    One program an SM, so that all are resident and have triggered before any has written.
    """
    programs = torch.cuda.get_device_properties(source.device).multi_processor_count
    kernel: Any = slow_producer
    with torch.cuda.device(source.device):
        kernel[(programs,)](source, target, source.numel(), delay_ns, BLOCK=BLOCK, num_warps=4)
