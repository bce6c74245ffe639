"""The documents: links, anchors, commands, case lines and tables hold, and the examples run.

Tables between ``<!-- table: NAME -->`` and ``<!-- end -->`` are made here, from the code. After
a change of plans or profiles ``python tests/test_docs.py`` writes them anew.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from equiv import cli, evidence, ledger, modes_cuda  # noqa: E402 - the paths come first
from equiv.arena import dense_pitches  # noqa: E402
from equiv.case import Case, parse  # noqa: E402
from equiv.domain import claim_of  # noqa: E402
from equiv.fills import KINDS, SWEEPS  # noqa: E402
from equiv.lanes import LANES, Lanes, Target, domain_points, outside_points  # noqa: E402
from equiv.modes import CPU_MODES, CUDA_MODES, MODES  # noqa: E402
from equiv.pairs import REQUIRED, OpPair, load_pair  # noqa: E402
from equiv.profiles import PROFILES, Profile  # noqa: E402
from equiv.result import FINDINGS  # noqa: E402
from kvpack.classes import CLASSES, class_table  # noqa: E402

PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CPU = Target("cpu")
H200 = Target("cuda:0", 132, 1, 150_109_880_320)


# -- tables ---------------------------------------------------------------------------


@cache
def kvpack() -> OpPair:
    return load_pair("kvpack")


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *[list(map(str, row)) for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def planned(target: Target, profile: Profile, lane: str) -> Any:
    return Lanes(kvpack(), target, profile, "inductor", 0).plan(lane)


def first_line(function: object) -> str:
    line = (function.__doc__ or "").strip().splitlines()[0]
    return line.removesuffix(".").replace("``", "`")


def outcomes_table() -> str:
    """Say what is claimed for each combination of axes, on and off the alignment, without heads."""
    pair = kvpack()
    points = {tuple(p.items()): p for p in (*domain_points(pair), *outside_points(pair))}
    rows = []
    for p in points.values():
        some, none = {**p, "T": 6, "H": 3}, {**p, "T": 6, "H": 0}
        claims = [pair.outcome(some, True), pair.outcome(some, False), pair.outcome(none, True)]
        rows.append([*p.values(), *claims])
    return markdown([*pair.axes, "aligned", "off the alignment", "T > 0, H = 0"], rows)


def alignment_table() -> str:
    """Say which base offsets and pitches of each operand are in the domain."""
    pair = kvpack()
    found: dict[tuple[str, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for case in planned(CPU, PROFILES["dev"], "alignment").explicit:
        if any(case[a] not in values for a, values in pair.domain_axes.items()):
            continue
        claim = claim_of(pair, case)
        for name, view in case.views:
            shape = next(o.shape for o in claim.operands if o.name == name)
            wider = [p - d for p, d in zip(view.pitches, dense_pitches(shape), strict=True)]
            inner = max((d for d, w in enumerate(wider) if w), default=None)
            what = "base, bytes" if inner is None else f"{('token', 'head')[inner]} pitch, elements"
            extra = view.offset_bytes if inner is None else wider[inner]
            found[name, what][claim.outcome].add(extra)
    rows = [
        [f"`{name}`", what, *[", ".join(map(str, sorted(by[o]))) for o in ("equal", "refused")]]
        for (name, what), by in found.items()
    ]
    return markdown(["operand", "off the dense layout by", "equal", "refused"], rows)


def lanes_table(target: Target) -> str:
    """Count each lane's enumerated cases by their claim, and its draws."""

    def cell(profile: Profile, lane: str) -> str:
        plan = planned(target, profile, lane)
        claims = Counter(claim_of(kvpack(), c).outcome for c in plan.explicit)
        words = " + ".join(f"{n:,} {claim}" for claim, n in sorted(claims.items()))
        draws = profile.draws.get(lane, 0) if plan.drawn is not None else 0
        return words + (f"; {draws:,} drawn" if draws else "")

    rows = [[lane, *[cell(p, lane) for p in PROFILES.values()]] for lane in LANES]
    return markdown(["lane", *PROFILES], rows)


def least_table() -> str:
    """List what each lane needs of each kind, in the gate profile on a GPU."""
    rows = []
    for lane in LANES:
        grouped: dict[tuple[str, int], list[str]] = {}
        for kind, n in planned(H200, PROFILES["gate"], lane).least.items():
            name, equals, _ = kind.partition("=")
            each = equals and name != "fill"
            grouped.setdefault((f"each {name}" if each else kind, n), []).append(kind)
        words = [f"{n} of {name}" for name, n in grouped]
        rows.append([lane, ", ".join(words)])
    return markdown(["lane", "at least"], rows)


def profiles_table() -> str:
    """Lay the profiles side by side."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{lane} {n:,}" for lane, n in value.items())
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:,g}" if isinstance(value, float) else f"{value:,}"

    names = [f.name for f in fields(Profile) if f.name != "name"]
    rows = [[f"`{n}`", *[text(getattr(p, n)) for p in PROFILES.values()]] for n in names]
    return markdown(["", *PROFILES], rows)


def modes_table() -> str:
    """Describe the ways in which a candidate is called."""
    rows = [[f"`{m}`", "", first_line(MODES[m])] for m in CPU_MODES]
    rows += [[f"`{m}`", "GPU", first_line(getattr(modes_cuda, m))] for m in CUDA_MODES]
    return markdown(["mode", "needs", "what it does"], rows)


def fills_table() -> str:
    """Describe the fills."""
    return markdown(["fill", "elements"], [[f"`{n}`", first_line(f)] for n, f in FILLS.items()])


FILLS = {**KINDS, **SWEEPS}


def classes_table() -> str:
    """Count the patterns of each element class."""
    rows = [
        [f"`{n}`", *[f"{int(class_table(n, d).sum()):,}" for d in ("bf16", "fp16")]]
        for n in CLASSES
    ]
    return markdown(["class", "bf16", "fp16"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "outcomes": outcomes_table,
    "alignment": alignment_table,
    "lanes_cpu": lambda: lanes_table(CPU),
    "lanes_gpu": lambda: lanes_table(H200),
    "least": least_table,
    "profiles": profiles_table,
    "modes": modes_table,
    "fills": fills_table,
    "classes": classes_table,
}


def renewed(text: str) -> str:
    """Return a page with its tables made anew."""
    return TABLE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[4]}", text)


# -- reading pages ----------------------------------------------------------------------


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: explicit ones, and those that GitHub makes of headings."""
    text = FENCE.sub("", read(page))
    found = set(re.findall(r'<a id="([^"]+)"></a>', text))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"<[^>]+>", "", title).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def commands() -> Iterator[tuple[Path, str]]:
    """Yield every command of bytegate's and nox's that a page shows, from code alone."""
    for page in PAGES:
        text = read(page)
        shell = [body for language, body in FENCE.findall(text) if language in {"", "sh"}]
        prose = FENCE.sub("", text)
        shell += ["\n".join(re.findall(r"^    (.+)$", prose, re.MULTILINE))]
        lines = "\n".join(shell).replace("\\\n", " ").splitlines()
        lines += re.findall(r"`([^`\n]+)`", prose)
        for line in lines:
            for part in re.split(r"&&|\|", line.partition("#")[0]) if "[" not in line else ():
                words = part.strip()
                start = re.search(r"\b(bytegate |python -m equiv\b|nox -s )", words)
                if start and re.match(r"([A-Z_]+=\S+ )*(nice )?$", words[: start.start()]):
                    yield page, words[start.start() :]


def blocks(page: Path) -> dict[str, str]:
    """Return the code blocks of a page whose first line names a file."""
    found = {}
    for _, body in FENCE.findall(read(page)):
        name = re.match(r"# ([\w/.]+\.(?:py|toml))\n", body)
        if name:
            found[name[1]] = body
    return found


def run_equiv(folder: Path, *words: str, extra: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``bytegate equiv`` of this checkout in a folder."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "kernels"), extra)))
    return subprocess.run(
        [sys.executable, "-m", "equiv", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


# -- tests --------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", read(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(other), f"{page.name} links to {target}"


def test_the_ledger_refers_to_anchors_that_are_there() -> None:
    entries = ledger.load()
    assert entries
    for entry in entries:
        path, _, anchor = entry.reference.partition("#")
        assert anchor in anchors(ROOT / path), f"{entry.id} refers to {entry.reference}"
        assert f"`{entry.id}`" in read(ROOT / path)


def test_commands_parse() -> None:
    found = list(commands())
    assert len(found) > 20
    sessions = {
        n.name
        for n in ast.parse(read(ROOT / "noxfile.py")).body
        if isinstance(n, ast.FunctionDef) and n.decorator_list
    }
    for page, command in found:
        words = shlex.split(command)
        if words[0] == "nox":
            assert words[2].rstrip(",") in sessions, f"{page.name}: {command}"
            if words[2] != "equiv":
                continue
            words = ["bytegate", "equiv", *words[4:]]
        if words[1:2] == ["serve"]:  # its options are argparse's and vLLM's
            continue
        if words[0] == "python":  # -m equiv, -m equiv.gate
            words = ["bytegate", words[2].removeprefix("equiv."), *words[3:]]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            # An unknown option or command is an error before --help is looked at.
            code = cli.run_app(cli.app, [*words[1:], "--help"], "bytegate")
        assert code == 0, f"{page.name}: {command}: {said.getvalue()}"


def test_case_lines_are_cases() -> None:
    found = {
        line
        for page in PAGES
        for line in re.findall(r"\bkvpack/\S+/\S+/\w+/T=\S+/\w+/[^\s`]+", read(page))
    }
    assert len(found) > 5
    for line in found:
        case: Case = parse(line)
        assert str(case) == line
        claim_of(kvpack(), case)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_are_those_of_the_code(page: Path) -> None:
    text = read(page)
    assert renewed(text) == text, "the tables are old: python tests/test_docs.py renews them"


def test_every_finding_and_field_is_described() -> None:
    text = read(ROOT / "docs" / "equiv.md")
    kinds = (evidence.EquivEvidence, evidence.Candidate, evidence.Lane, evidence.Finding)
    kinds = (*kinds, evidence.LedgerUse, evidence.FaultsEvidence, evidence.FaultRow)
    names = {f.name for kind in kinds for f in fields(kind)}
    missing = sorted(n for n in names | set(FINDINGS) if f"`{n}`" not in text)
    assert not missing
    pairs = read(ROOT / "docs" / "pairs.md")
    assert not [n for n in REQUIRED if not re.search(rf"`{n}[`(]", pairs)]
    entries = read(ROOT / "docs" / "ledger.md")
    assert not [f.name for f in fields(ledger.Entry) if f"`{f.name}`" not in entries]


def test_nothing_of_one_machine_stands_in_the_pages() -> None:
    for page in PAGES:
        for word in ("/work/", "/root/", "/home/", "/tmp/", "localhost"):  # noqa: S108 - looked for
            assert word not in read(page), f"{page.name} has {word}"


def test_the_worked_example_tells_what_happens(tmp_path: Path) -> None:
    source = blocks(ROOT / "docs" / "pairs.md")["my_pack.py"]
    (tmp_path / "my_pack.py").write_text(source, encoding="utf-8")
    shown = read(ROOT / "docs" / "pairs.md")
    (line,) = set(re.findall(r"bytegate equiv repro (\S*my_pack\.py\S*)", shown))
    done = run_equiv(tmp_path, "repro", line)
    assert done.returncode == 1, done.stdout + done.stderr
    for told in done.stdout.splitlines():
        if told.startswith(("case", "result", "detail", "oracle")):
            assert told in shown, f"docs/pairs.md lacks: {told}"


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="needs hatchling to build the example"
)
def test_the_example_pair_installs_and_runs(tmp_path: Path) -> None:
    files = blocks(ROOT / "docs" / "pairs.md")
    for name in ("pyproject.toml", "deinterleave/pair.py"):
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name], encoding="utf-8")
    (tmp_path / "package" / "deinterleave" / "__init__.py").touch()
    assert tomllib.loads(files["pyproject.toml"])["project"]["name"] == "deinterleave"
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(tmp_path / "package")], check=True)
    done = run_equiv(
        tmp_path, "--pair", "deinterleave", "--device", "cpu", "--out", "out", extra=str(site)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(read(tmp_path / "out" / "equiv.json"))
    assert [x["lane"] for x in made["candidates"][0]["lanes"]] == list(LANES)
    words = ["--pair", "deinterleave", "--device", "cpu", "--clean-cases", "200", "--out", "f"]
    done = run_equiv(tmp_path, "faults", *words, extra=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(read(tmp_path / "f" / "faults.json"))["faults"]
    assert row["outcome"] == "caught"


if __name__ == "__main__":
    for one in PAGES:
        one.write_text(renewed(read(one)), encoding="utf-8")
