"""What a comparison costs: ``python -m ppl.bench [TOKENS]`` stores results, then compares them.

TOKENS, 10,000,000 by default, is the sum over all runs and texts: ten texts, both arms launched
twice. Time and memory are of the comparison and of all that it leaves (ppl.json, tokens.parquet,
ppl.md, ppl.html), in a process of its own, imports included.

``python -m ppl.bench client`` measures the client of a run beside a real server instead.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ppl.simulate import RUNS, base
from ppl.store import Key, Observed, Store

TOKENS = 10_000_000
TEXTS = 10
MOST_S = 15.0
MOST_BYTES = 2_000_000_000
"""Of the comparison, on two cores."""


def fill(folder: Path, tokens: int) -> None:
    """Store results: launches differ by noise, so that nothing is settled by identity."""
    store = Store(folder)
    rows = tokens // (TEXTS * len(RUNS))
    rng = np.random.default_rng(0)
    for text in range(TEXTS):
        values = base(text, rows)
        for arm, launch, repeat in RUNS:
            noise = rng.standard_normal(rows, dtype=np.float32) * np.float32(1e-5)
            key = Key(
                text=f"text{text}",
                ids_sha256="0" * 64,
                tokens=rows + 1,
                model="simulated",
                arguments=(),
                route=arm,
                versions={},
            )
            store.put(
                np.minimum(values + noise, 0),
                key=key,
                arm=arm,
                launch=launch,
                repeat=repeat,
                exposed_from=rows // 2,
                budget=rows // 2,
                observed=Observed(route=arm),
            )


def timed(folder: Path, out: Path) -> tuple[float, int, str]:
    """Compare and report in this process: seconds, greatest resident bytes, verdict."""
    began = time.perf_counter()
    from ppl import judge, outputs

    made = judge.compare_stored([folder])
    outputs.leave(out, made, judge.gather([folder]))
    seconds = time.perf_counter() - began
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, made.verdict


def main(words: list[str]) -> int:
    """Store, compare in another process, print; 1 where it took too long or too much."""
    if words[:1] == ["client"]:
        from ppl import client_bench

        return client_bench.main(words[1:])
    if words[:1] == ["--compare"]:
        sys.stdout.write(" ".join(str(x) for x in timed(Path(words[1]), Path(words[2]))) + "\n")
        return 0
    if len(words) > 1 or not all(w.isdecimal() and int(w) for w in words):
        said = " ".join(words)
        sys.stderr.write(f"bytegate: ppl bench: {said!r}: expected a number of tokens, or client\n")
        return 2
    tokens = int(words[0]) if words else TOKENS
    with tempfile.TemporaryDirectory() as folder:
        stored, out = Path(folder, "stored"), Path(folder, "out")
        fill(stored, tokens)
        command = [sys.executable, "-m", "ppl.bench", "--compare", str(stored), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - ours
        sizes = {f.name: f.stat().st_size for f in sorted(out.iterdir())}
    took, most, word = done.stdout.split()
    seconds, held = float(took), int(most)
    sys.stdout.write(
        f"{tokens:,} stored tokens compared, tested and reported in {seconds:.2f} s (at "
        f"most {MOST_S:.0f}), {held / 1e9:.2f} GB (at most {MOST_BYTES / 1e9:.0f}): {word}\n"
    )
    left = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
    sys.stdout.write(f"left: {left}\n")
    return int(seconds > MOST_S or held > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
