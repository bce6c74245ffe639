"""K17 and K18, which only a GPU can show: as far as a compiler and an interpreter go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT / "kernels"), str(ROOT)))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": paths, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )


def test_importing_the_catalogue_imports_no_kernel() -> None:
    code = "import sys, kvpack.faults.catalogue; print('torch' in sys.modules)"
    assert python(code).stdout.strip() == "False"


INTERPRETED = """
import torch
from kvpack import stock
from kvpack.faults import k17_no_wait, k18_forced_vectors
for dtype in (torch.bfloat16, torch.float16):
    kv = torch.arange(7 * 3 * 300).view(7, 3, 300).short()[..., 40:296].view(dtype)
    pe = torch.arange(7 * 90).view(7, 1, 90).short()[..., 20:84].view(dtype)
    for module in (k17_no_wait, k18_forced_vectors):
        for fp8 in (False, True):
            for pack in (module.kv_pack, module.kv_pack_clean):
                pairs = zip(pack(kv, pe, fp8), stock.kv_pack(kv, pe, fp8))
                for mine, other in pairs:
                    mine, other = (x.contiguous().view(torch.uint8) for x in (mine, other))
                    assert torch.equal(mine, other), (module, fp8)
"""

COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvpack.faults.triton_kernel import faulty_pack_rows as kernel

def loads(wait, promise):
    types = ["*i16", "*i16", "*u8", "*i16", "*i16", "i32", "i32", "i64", "i64", "i64"]
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * 5))
    constants = {(10,): False, (11,): False, (12,): 4, (13,): wait, (14,): promise}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (3, 4, 7, 8, 9)}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": 1, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    found = re.findall(r"griddepcontrol.wait|ld.global\\\\S*", ptx)
    print(*dict.fromkeys(found))

loads(True, False)
loads(False, False)
loads(False, True)
"""


def test_k17_and_k18_pack_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    python(INTERPRETED, TRITON_INTERPRET="1")


def test_k17_and_k18_differ_in_one_instruction(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED.replace("\\\\", "\\"), encoding="utf-8")
    code = f"import runpy; runpy.run_path({str(script)!r})"
    waiting, plain, promised = python(code, TRITON_CACHE_DIR=str(tmp_path)).stdout.splitlines()
    assert waiting == f"griddepcontrol.wait {plain}"
    assert plain == "ld.global.b16"
    assert promised == "ld.global.v4.b32"
