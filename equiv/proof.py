"""Proof that the named kernel ran, and for the reference that no fused one did.

One call is profiled with ``torch.profiler``; on a GPU the kernels that CUPTI saw are listed, on a
CPU the operators. Candidates that count their own runs (compiled code, an interpreter) are checked
in every case as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from equiv.case import Case
    from equiv.execute import Executor


def profiled(call: Callable[[], Any], *, cuda: bool) -> list[str]:
    """Return the distinct names of kernels (on a GPU) or operators (on a CPU) that a call ran."""
    from torch.profiler import ProfilerActivity, profile

    call()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as p:
        call()
        if cuda:
            torch.cuda.synchronize()
    events = p.events() or []
    kinds: Any = torch.autograd
    wanted = kinds.DeviceType.CUDA if cuda else kinds.DeviceType.CPU
    names = {e.name for e in events if e.device_type == wanted}
    operators = {e.name for e in events if "::" in e.name}
    return sorted(names | operators)


def prove(executor: Executor, case: Case, forbidden: Sequence[str]) -> dict[str, Any]:
    """Profile one call of the candidate and one of the reference on a case's operands.

    Parameters
    ----------
    forbidden : parts of names of fused kernels, which the reference must not show.

    Returns
    -------
    ``{"candidate": names, "candidate_ok": bool or None, "reference": names, "reference_ok": bool,
    "executions": runs in this process or None}``; None where there is nothing to look for. Of a
    candidate whose call raised, ``"error"`` says what.

    """
    from equiv.blame import raised_by_call
    from equiv.domain import claim_of
    from equiv.execute import CaseRun

    run = CaseRun(executor, case, claim_of(executor.pair, case))
    run.arena.place(run.claim.operands, dict(case.views))
    run.load(run.elements(case.fill.seed))
    loaded, pair = executor.loaded, executor.pair
    cuda = executor.device.startswith("cuda")
    try:
        with executor.watched():
            candidate = profiled(
                lambda: pair.call(loaded.kernel, run.arena.tensors(), run.point, None), cuda=cuda
            )
    except Exception as e:
        if cuda:  # the device may be lost, which the worker looks into
            raise
        said, where = raised_by_call(e, pair, loaded)
        return {"case": str(case), "error": f"its call raised {said}, in {where}"}
    run.load(run.storage)
    reference = profiled(lambda: pair.reference(run.arena.tensors(), run.point), cuda=cuda)
    count = loaded.executions() if loaded.executions else None
    found = [n for n in candidate if any(e in n for e in loaded.evidence)]
    ok: bool | None = None
    if loaded.evidence and (cuda or count is None):
        ok = bool(found)
    elif count is not None:
        ok = count > 0
    return {
        "case": str(case),
        "candidate": candidate[:24],
        "candidate_ok": ok,
        "executions": count,
        "reference": reference[:24],
        "reference_ok": not any(f in n for f in forbidden for n in reference),
        "guard": executor.loaded.guard,
    }
