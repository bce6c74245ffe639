"""The catalogue's faults, each put in where it belongs, up to the gate's verdict.

A row makes the evidence of one fault by the public door (``bytegate equiv --candidate``,
``bytegate loop --patch``, ``bytegate ppl run``), judges it with ``bytegate gate --from`` under a
policy that asks for that layer and lane alone, and holds the gate's first reason against what has
to be said. Servers are the fakes of ``tests/ppl``, with the fault in a proxy before them.

    python tests/gate/catalogue.py [ID ...]      # run them and print the table
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for _folder in (ROOT, ROOT / "kernels", HERE, HERE.parent / "ppl"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from evidence_tree import Ran, bytegate  # noqa: E402

from equiv.pairs import load_pair  # noqa: E402

PAIR = load_pair("kvpack")
LOOP_TIMEOUT_S = 900.0
"""On a machine that is busy with other things; on an idle one a row takes half a minute."""
QUICKLY = """
import sys
from equiv.cli import main
from equiv.loop import campaign
campaign.MAX_SIGNATURES = 1
campaign.shrink.smallest = lambda case, *_, **__: case
main(["loop", *sys.argv[1:]])
"""
"""``bytegate loop``, ended at its first finding, which stays as large as it was found."""
TEXTS = 4


@dataclass(frozen=True)
class Row:
    """One change, and what the gate has to say of it.

    Attributes
    ----------
    id, title : of the catalogue.
    make : leaves evidence below a folder, and returns the tables of the policy to judge it by.
    code : the gate's exit code.
    says : what must stand in its reasons, the layer with its state first; empty for a pass.

    """

    id: str
    title: str
    make: Callable[[Path], dict[str, str]]
    code: int
    says: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """What came of a row; ``problem`` is empty where it is what has to be."""

    code: int
    reasons: tuple[str, ...]
    problem: str
    seconds: float


def policy(folder: Path, **tables: str) -> Path:
    """Write a policy that requires one layer."""
    text = {
        "kernel": 'required = "no"',
        "loop": 'required = "no"',
        "servers": 'required = "no"',
        "faults": 'kernel = "no"\nloop = "no"',
        **tables,
    }
    path = folder / "policy.toml"
    path.write_text("".join(f"[{k}]\n{v}\n" for k, v in text.items()), encoding="utf-8")
    return path


def judged(folder: Path, **tables: str) -> Ran:
    """Judge what lies below a folder under a policy of these tables."""
    words = ("--policy", str(policy(folder, **tables)), "--out", str(folder / "gate"))
    return bytegate("gate", "--from", str(folder), *words)


def run(row: Row, folder: Path) -> Done:
    """Make a row's evidence, judge it, and compare."""
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    ran = judged(folder, **row.make(folder))
    made = json.loads((folder / "gate" / "gate.json").read_text(encoding="utf-8"))
    reasons = tuple(made["reasons"])
    problem = ""
    if ran.code != row.code:
        problem = f"exit code {ran.code}, expected {row.code}"
    elif row.says and not all(words in reasons[0] for words in row.says):
        problem = f"it says {reasons[0]!r}, expected {' ... '.join(row.says)}"
    elif not row.code and reasons:
        problem = f"a pass with reasons: {reasons[0]}"
    return Done(ran.code, reasons, problem, time.monotonic() - start)


# -- the kernel layer ----------------------------------------------------------------------


def kernel(candidate: str, lane: str) -> Callable[[Path], dict[str, str]]:
    """Return what runs one lane for a candidate."""

    def make(folder: Path) -> dict[str, str]:
        words = ("--candidate", candidate, "--lane", lane, "--profile", "dev", "--device", "cpu")
        bytegate("equiv", *words, "--out", str(folder / "equiv"))
        return {"kernel": f'candidates = ["{candidate}"]\nlanes = ["{lane}"]'}

    return make


UNWRITTEN = ("K02", "K03", "K05", "K07", "K08", "K16")
KINDS = {"K04": "crash", "K15": "out_of_bounds", **dict.fromkeys(UNWRITTEN, "unwritten")}
"""What a kernel's fault is found as first, where that isn't a divergence."""


def kernel_rows() -> Iterator[Row]:
    """Yield the faults that a CPU shows, their clean twins, and the harmless changes."""
    for f in PAIR.faults:
        if f.needs:
            continue
        kind = KINDS.get(f.id, "divergence")
        says = (f"kernel on cpu: failed: {f.faulty}, lane {f.lane}: {kind}: ",)
        yield Row(f.id, f.title, kernel(f.faulty, f.lane), 1, says)
        yield Row(f"{f.id}-clean", f"the clean twin of {f.id}", kernel(f.clean, f.lane), 0, ())
    for f in PAIR.harmless:
        yield Row(f.id, f.title, kernel(f.faulty, f.lane), 0, ())


# -- the loop ------------------------------------------------------------------------------


def loop(lane: str, *words: str, pack: str = "fused") -> Callable[[Path], dict[str, str]]:
    """Return what runs one lane of the loop, in a process of its own: a patch stays."""

    def make(folder: Path) -> dict[str, str]:
        options = ("--lane", lane, "--profile", "dev", "--device", "cpu", "--pack", pack, *words)
        paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-c", QUICKLY, *options, "--out", str(folder / "loop")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            check=False,
            timeout=LOOP_TIMEOUT_S,
        )
        assert (folder / "loop" / "loop.json").is_file(), done.stderr
        return {"loop": f'lanes = ["{lane}"]\ncpu_lanes = []\npack = "{pack}"'}

    return make


FOUND = {
    "L01": ("edges", "raised"),
    "L02": ("edges", "raised"),
    "L03": ("edges", "ranks"),
    "L04": ("edges", "raised"),
    "L05": ("edges", "reference"),
    "L06": ("fp8", "reference"),
    "L07": ("edges", "plan"),
    "L08": ("fp8", "raised"),
    "L09": ("edges", "reference"),
    "L10": ("edges", "reference"),
    "L11": ("edges", "reference"),
    "L12": ("edges", "raised"),
    "L13": ("edges", "reference"),
    "L14": ("strides", "not_refused"),
}
"""The lane of the loop in which a fault shows, and what is found first."""
PATCHED = ("vLLM's loop on cpu: invalid: vLLM was changed by --patch",)
"""What the gate says of a clean twin: the patch that plants it changes vLLM too."""


def loop_rows() -> Iterator[Row]:
    """Yield L01 to L14, their clean twins, and packs that change nothing."""
    from kvroute.faults import LOOP_TITLES, clean_of, patch_of

    for number, title in LOOP_TITLES.items():
        lane, kind = FOUND[number]
        says = (f"vLLM's loop on cpu: failed: lane {lane}: {kind}: ",)
        yield Row(number, title, loop(lane, "--patch", patch_of(number) or ""), 1, says)
        clean = loop(lane, "--patch", clean_of(number))
        yield Row(f"{number}-clean", f"the clean twin of {number}", clean, 4, PATCHED)
    for f in PAIR.harmless[:3]:
        row = loop("edges", pack=f.faulty)
        yield Row(f"{f.id}-loop", f"{f.title}, as the loop's pack", row, 0, ())


# -- servers -------------------------------------------------------------------------------

SERVERS = f"texts = {TEXTS}\nexposed_tokens = 1000\nmargin_nats = 1e-4"
WORDS = "It was a bright cold day in April, and the clocks were striking thirteen. "


@contextlib.contextmanager
def fakes(**arms: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Start a fake server for each arm, with a proxy that plants ``fault``; yield their URLs."""
    import fake_vllm
    from fault_proxy import Proxy

    from ppl import scoring, transport

    before = transport.FIRST_WAIT_S, transport.MOST_WAIT_S, scoring.SETTLE_S
    transport.FIRST_WAIT_S, transport.MOST_WAIT_S, scoring.SETTLE_S = 0.01, 0.05, 0.5
    urls = {}
    with contextlib.ExitStack() as ending:
        for arm, given in arms.items():
            facts = {"route": arm, **given}
            fault = facts.pop("fault", "none")
            server, _ = fake_vllm.serve(fake_vllm.Options(**facts))
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            ending.callback(server.server_close)
            ending.callback(server.shutdown)
            proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}", fault)
            ending.callback(proxy.close)
            urls[arm] = proxy.url
        try:
            yield urls
        finally:
            transport.FIRST_WAIT_S, transport.MOST_WAIT_S, scoring.SETTLE_S = before


def texts(folder: Path) -> Path:
    """Write texts that a server takes in several scheduler chunks."""
    where = folder.parent / f"{folder.name}-texts"
    where.mkdir(exist_ok=True)
    for i in range(TEXTS):
        (where / f"text{i}.txt").write_text(f"{i}: " + WORDS * (27 + i), encoding="utf-8")
    return where


def compare(urls: dict[str, str], folder: Path, out: Path, *words: str) -> Ran:
    """Run ``bytegate ppl run`` against two URLs."""
    asked = ("--stock", urls["stock"], "--fused", urls["fused"], "--texts", str(texts(folder)))
    more = ("--workspace", "1024", "--margin", "1e-4", "--out", str(out))
    return bytegate("ppl", "run", *asked, *more, *words)


def servers(
    *words: str, stock: dict[str, Any] | None = None, fused: dict[str, Any] | None = None
) -> Callable[[Path], dict[str, str]]:
    """Return what compares two fake servers."""

    def make(folder: Path) -> dict[str, str]:
        with fakes(stock=stock or {}, fused=fused or {}) as urls:
            compare(urls, folder, folder / "ppl", *words)
        return {"servers": SERVERS}

    return make


def stale(folder: Path) -> dict[str, str]:
    """Put a text's results of an earlier run into the store, and run again."""
    with fakes(stock={"seed": 1}, fused={"seed": 1}) as urls:
        compare(urls, folder, folder.parent / f"{folder.name}-earlier")
    with fakes(stock={}, fused={}) as urls:
        compare(urls, folder, folder / "ppl")
        (earlier,) = (folder.parent / f"{folder.name}-earlier" / "scores").glob("text1*")
        shutil.copytree(earlier, folder / "ppl" / "scores" / earlier.name, dirs_exist_ok=True)
        assert compare(urls, folder, folder / "ppl").code != 0
    return {"servers": SERVERS}


def dies(folder: Path) -> dict[str, str]:
    """Kill a server in the middle of a text, once; the run starts it again and goes on."""
    import signal

    from ppl import facts
    from ppl.errors import PplError

    command = [sys.executable, str(ROOT / "tests" / "ppl" / "launch_fakes.py"), "run"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environ = {**os.environ, "PYTHONPATH": paths, "FAKE": json.dumps({"delay_s": 0.1})}
    with subprocess.Popen(
        [*command, "--texts", str(texts(folder)), "--out", str(folder / "ppl"), "--margin", "1e-4"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while process.poll() is None:
            time.sleep(0.05)
            with contextlib.suppress(PplError, ProcessLookupError):
                known = facts.read(folder / "ppl")
                alive = [i for i in known.instances if not i.stopped and i.pid] if known else []
                if alive:
                    time.sleep(0.3)
                    os.kill(int(alive[-1].pid or 0), signal.SIGKILL)
                    break
        said, _ = process.communicate(timeout=120)
    assert "-9" in said, said
    return {"servers": SERVERS}


NOT_THE_PATH = "servers on any device: not covered: there is no evidence of servers"
INVALID = "servers on unstated: invalid: INVALID: "


def server_rows() -> Iterator[Row]:
    """Yield S01 to S12, the clean twin of all, and what must not be flagged."""
    planted = {"stock": {}, "fused": {}}
    yield Row("S-clean", "two servers of equal bits", servers(**planted), 0, ())
    says = ("servers on unstated: failed: DIFFERENT: ",)
    title = "3 margins from the first exposed token on"
    yield Row("S01", title, servers(fused={"fault": "bias"}), 1, says)
    says = (INVALID, "both servers run the same route, fused")
    title = "both servers run the same route"
    yield Row("S02", title, servers(stock={"route": "fused"}), 4, says)
    swapped = servers(stock={"route": "fused"}, fused={"route": "stock"})
    yield Row("S03", "arms swapped", swapped, 4, (INVALID, "the arms are swapped"))
    title = "texts shorter than one scheduler chunk"
    yield Row("S04", title, servers("--tokens", "400:500"), 4, (NOT_THE_PATH,))
    for number, title, fault, words in (
        ("S05", "rows shifted by one token", "shift rows", "shifted by one token"),
        ("S05b", "log-probs shifted by one token", "shift values", "is shifted by one token"),
        ("S06", "-9999.0 inside a response", "-9999.0", "a sentinel"),
        ("S06b", "NaN inside a response", "NaN", "NaN or infinite"),
        ("S06c", "null inside a response", "null", "null in row 60"),
        ("S07", "some requests fail", "one in 5 fails", "refused with HTTP 500"),
        ("S08", "other token ids in one arm", "other ids", "answered for other token ids"),
        ("S09", "prefix cache on in one arm", "prefix cache", "prefix caching is on"),
        ("S11b", "every answer is the first one's", "stale", "answered for other token ids"),
    ):
        yield Row(number, title, servers(fused={"fault": fault}), 4, (INVALID, words))
    again = {"restart_at": 5, "restart_seed": 1}
    title = "restarted half-way with another configuration"
    yield Row("S10", title, servers(fused=again), 4, (INVALID, title))
    title = "restarted half-way with the same configuration"
    yield Row("S10-clean", title, servers(fused={"restart_at": 5}), 0, ())
    title = "one text's arm from an earlier run"
    yield Row("S11", title, stale, 4, ("wasn't made from the arrays beside it",))
    yield Row("S12", "a server dies in the middle of a text, and is started again", dies, 0, ())


LEFT_OUT = {
    "K04-full": "a nightly's memory: k alone has 2^31 elements",
    "K17": "a GPU",
    "K18": "a GPU",
}
"""Faults of the catalogue that no row has, and what they need."""


def rows() -> list[Row]:
    """Return all rows."""
    return [*kernel_rows(), *loop_rows(), *server_rows()]


def main(only: list[str]) -> int:
    """Run rows, all or those named, and print a table of what the gate said."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)  # hypothesis keeps its examples in the working folder
        sys.stdout.write("| id | change | exit | the gate's first reason | s | |\n")
        sys.stdout.write("|---|---|---:|---|---:|---|\n")
        for row in rows():
            if only and row.id not in only:
                continue
            done = run(row, Path(name, row.id))
            wrong += bool(done.problem)
            reason = (done.reasons or ("passes",))[0].replace("|", "/")[:220]
            sys.stdout.write(
                f"| {row.id} | {row.title} | {done.code} | {reason} | {done.seconds:.0f} | "
                f"{done.problem or 'as expected'} |\n"
            )
            sys.stdout.flush()
    for number, why in LEFT_OUT.items():
        sys.stdout.write(f"\n{number} is not covered here: it needs {why}\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
