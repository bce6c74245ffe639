"""A mode that changes the operands is judged by the operands of each comparison."""

from __future__ import annotations

import pytest

from equiv.case import parse
from equiv.repro import repro


@pytest.mark.parametrize("mode", ["held", "repeat", "inference"])
def test_declared_differences_are_looked_up_in_the_operands_of_the_call(mode: str) -> None:
    pytest.importorskip("triton")
    line = f"kvpack/triton/cpu/modes/T=2,H=3,dtype=bf16,fp8=1,pe=same,rope=64/-/near.1/{mode}/-"
    assert str(parse(line)) == line
    done = repro(line)
    assert done.result is not None
    assert done.result.status == "declared"
    assert {h.entry for h in done.result.ledger} == {"T1"}
