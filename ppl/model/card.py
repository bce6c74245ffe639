"""Write the tables of the model's card anew: ``python -m ppl.model.card``.

Between the marks ``<!-- NAME -->`` and ``<!-- /NAME -->`` of ``README.md`` stands what
``figures.json``, ``training.toml`` and the weights say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from equiv.files import write_whole
from ppl.model import folder, sha256
from ppl.model.corpus import read
from ppl.model.evaluate import MOST_BITS, MOST_RATIO
from texts import manifest


def figures(found: Mapping[str, Any]) -> str:
    """Return the table of what each text costs."""
    texts = {t.id: t for t in manifest.builtin().text}
    ten = {t.id for t in manifest.builtin().default() if not t.long}
    rows = [
        "| text | language | bits a byte | worst window / median | at any start | shuffled, nats |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(found["texts"], key=lambda n: (n not in ten, n)):
        row = found["texts"][name]
        rows.append(
            f"| {name} | {texts[name].language} | {row['bits_per_byte']:.3f} "
            f"| {row['worst_ratio']:.3f} | {row['worst_ratio_any_start']:.3f} "
            f"| {row['shuffled_nats']:.3f} |"
        )
    return "\n".join(rows)


def misses(found: Mapping[str, Any]) -> str:
    """Return what isn't as it was asked for, text by text, with the same windows scored afresh."""
    lines = []
    for text in manifest.builtin().text:
        row = found["texts"].get(text.id)
        if row is None:
            continue
        if text.language.startswith("en") and row["bits_per_byte"] >= MOST_BITS:
            bits = f"{row['bits_per_byte']:.3f} bits a byte"
            lines.append(f"- **{text.id}** costs {bits}, not below {MOST_BITS}.")
        if row["worst_ratio"] > MOST_RATIO:
            worst = int(np.argmax(row["windows"]))
            alone = f"; with nothing before it: {row['afresh'][worst]:.3f}"
            ratio = f"{row['worst_ratio']:.3f} times the median"
            lines.append(
                f"- **{text.id}**: the window at byte {worst * 4096:,} costs "
                f"{row['windows'][worst]:.3f} bits a byte, {ratio}"
                f"{alone if 'afresh' in row else ''}."
            )
    return "\n".join(lines) or "Nothing."


def sources() -> str:
    """Return the table of what it was trained on."""
    rows = ["| source | what | rights | bytes | SHA-256 |", "|---|---|---|---|---|"]
    training = read()
    archives = {a.id: f"{a.project} {a.version}" for a in training.archive}
    rows += [
        f"| {s.id} | {s.title}; {archives[s.archive]} | {s.rights} | {s.size_bytes:,} "
        f"| {s.sha256[:16]} |"
        for s in training.source
    ]
    return "\n".join(rows)


def main() -> int:
    """Write the card."""
    path = folder() / "README.md"
    found = json.loads((folder() / "figures.json").read_text(encoding="utf-8"))
    text = path.read_text(encoding="utf-8")
    parts = {
        "figures": figures(found),
        "misses": misses(found),
        "sources": sources(),
        "weights": f"SHA-256 of `model.safetensors`: `{sha256()}`",
    }
    for name, part in parts.items():
        mark = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = mark.sub(lambda m, p=part: f"{m[1]}{p}\n{m[2]}", text)  # type: ignore[misc]
    write_whole(Path(path), text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
