"""The command line ``bytegate``; ``python -m equiv`` is its ``equiv`` command.

Exit codes: 0 pass; 1 a divergence or a missed fault; 2 bad usage or input; 3 inconclusive;
4 invalid, or something required was not covered.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equiv.command import WORDS, command_line, nothing_before, run_app, say_stopped
from equiv.errors import ExitCode, worst
from equiv.gate.cli import gate_app, verify
from equiv.lanes import LANES
from equiv.loop.cli import loop_app
from equiv.profiles import PROFILES
from equiv.stopping import ENDING, Stop, ignore
from ppl.cli import ppl_app
from ppl.perf_cli import perf
from texts.cli import texts_app

if TYPE_CHECKING:
    from equiv.loop.api import LoopRequest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Decides, with evidence, whether a fused kernel may replace the ops it claims to equal.",
)
equiv_app = typer.Typer(
    rich_markup_mode=None,
    help="Compare a pair's candidates with its reference, byte for byte, on every lane.",
)
app.add_typer(equiv_app, name="equiv")
app.add_typer(loop_app, name="loop")
app.add_typer(gate_app, name="gate")
app.command()(verify)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(perf)
app.add_typer(texts_app, name="texts")
app.add_typer(ppl_app, name="ppl")

DEFAULT_PAIR = "kvpack"

PairOption = Annotated[str, typer.Option(help="Registered op pair.")]
CandidateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        help="A candidate of the pair, or your own kernel as module:function or file.py:function. "
        "Repeatable; all that run here by default.",
    ),
]
LaneOption = Annotated[
    list[str] | None,
    typer.Option("--lane", help=f"One of {', '.join(LANES)}. Repeatable; all by default."),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(PROFILES)}; dev by default, gate where CI is set."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU by default where there is one.")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="0 by default; a nightly draws a new one every time.")
]
LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", help="Declared divergences; the suite's own by default.")
]
LibraryOption = Annotated[
    str | None,
    typer.Option(
        help="A library with vLLM's op (_C_stable_libtorch.abi3.so), instead of an installed vLLM."
    ),
]
LoopOption = Annotated[
    bool | None,
    typer.Option(
        "--loop/--no-loop",
        help="Whether vLLM's own prefill loop is run as well, as bytegate loop does; by default "
        "where no candidate, lane or pair is named and vLLM is installed.",
    ),
]


@equiv_app.callback(invoke_without_command=True)
def equiv(
    context: typer.Context,
    pair: PairOption = DEFAULT_PAIR,
    candidate: CandidateOption = None,
    lane: LaneOption = None,
    profile: ProfileOption = None,
    device: DeviceOption = None,
    seed: SeedOption = None,
    out: Annotated[Path, typer.Option(help="Folder for equiv.json and equiv.xml.")] = Path(
        "out/equiv"
    ),
    ledger: LedgerOption = None,
    library: LibraryOption = None,
    loop: LoopOption = None,
) -> None:
    """Compare a pair's candidates with its reference, byte for byte, on every lane."""
    if context.invoked_subcommand is not None:
        nothing_before(context)
        return
    from equiv import report
    from equiv.run import Request, run

    narrow = bool(candidate or lane) or pair != DEFAULT_PAIR
    alone = loop is False or (loop is None and narrow)
    both = not alone and (loop or importlib.util.find_spec("vllm") is not None)
    request = Request(
        pair=pair,
        candidates=tuple(candidate or ()),
        lanes=tuple(lane or ()),
        profile=profile,
        device=device,
        seed=seed,
        out=out,
        ledger=ledger,
        library=library,
        command=command_line(),
        replaces=("loop.json", "loop.xml") if both else (),
    )
    stop = Stop()
    with report.Progress() as progress:
        made = run(request, progress, stop)
        if stop.signal:
            ignore(*ENDING)  # what is left is to say so
    report.show_equiv(made, out / "equiv.json")
    if stop.signal:
        say_stopped(stop.signal, out / "equiv.json")
    if alone:
        sys.stdout.write("The loop layer wasn't asked for: --loop, or bytegate loop\n")
        raise typer.Exit(made.exit_code)
    sys.stdout.write("\n")
    if stop.signal:
        sys.stdout.write(f"NOT COVERED  the loop layer wasn't begun: stopped by {stop.signal}\n")
        raise typer.Exit(worst(made.exit_code, ExitCode.INVALID))
    from equiv.loop.api import LoopRequest

    second = LoopRequest(profile=profile, device=device, seed=seed, out=out, command=command_line())
    raise typer.Exit(_loop_as_well(second, made.exit_code, required=loop is True))


def _loop_as_well(request: LoopRequest, code: int, *, required: bool) -> int:
    """Run the loop layer after the kernel layer; return the exit code of both."""
    from equiv.loop.api import LoopUnavailable, run_loop
    from equiv.loop.report import show_loop
    from equiv.report import Progress

    stop = Stop()
    try:
        with Progress() as progress:
            made = run_loop(request, progress, stop)
            if stop.signal:
                ignore(*ENDING)
    except LoopUnavailable as e:
        sys.stdout.write(f"NOT COVERED  {e}\n")
        return worst(code, int(e.exit_code) if required else 0)
    show_loop(made, request.out / "loop.json")
    if stop.signal:
        say_stopped(stop.signal, request.out / "loop.json")
    both = worst(code, made.exit_code)
    words = {0: "PASS", 1: "FAIL"}
    parts = f"the pair {words.get(code, 'NOT COVERED')}, vLLM's loop {made.verdict}"
    sys.stdout.write(f"\n{words.get(both, 'NOT COVERED')}  {parts}; exit code {both}\n")
    return both


@equiv_app.command()
def repro(
    case: Annotated[str, typer.Argument(help="The line that a report printed.")],
    ledger: LedgerOption = None,
    library: LibraryOption = None,
) -> None:
    """Run one case again and print everything about it."""
    from equiv.repro import repro as again

    done = again(case, library=library, ledger_path=ledger)
    for line in done.lines:
        sys.stdout.write(line + "\n")
    raise typer.Exit(done.exit_code)


@equiv_app.command()
def faults(
    pair: PairOption = DEFAULT_PAIR,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Ids such as K07. Repeatable; all by default."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PROFILES)}; gate by default.")
    ] = None,
    device: DeviceOption = None,
    seed: SeedOption = None,
    out: Annotated[Path, typer.Option(help="Folder for faults.json and faults.xml.")] = Path(
        "out/faults"
    ),
    clean_cases: Annotated[
        int | None,
        typer.Option(
            min=0, help="Cases of the false-alarm run; by default 10,000 in gate, 1,000 in dev."
        ),
    ] = None,
) -> None:
    """Run the planted faults as candidates: each must be caught, and no clean kernel flagged."""
    from equiv import report
    from equiv.faults import FaultsRequest, run_faults

    request = FaultsRequest(
        pair=pair,
        only=tuple(only or ()),
        profile=profile,
        device=device,
        seed=seed,
        out=out,
        clean_cases=clean_cases,
        command=command_line(),
    )
    stop = Stop()
    with report.Progress() as progress:
        made = run_faults(request, progress, stop)
        if stop.signal:
            ignore(*ENDING)
    report.show_faults(made, out / "faults.json")
    if stop.signal:
        say_stopped(stop.signal, out / "faults.json")
    raise typer.Exit(made.exit_code)


@equiv_app.command()
def sanitize(
    pair: PairOption = DEFAULT_PAIR,
    candidate: CandidateOption = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(help="memcheck, initcheck or racecheck. Repeatable; all by default."),
    ] = None,
    device: DeviceOption = None,
    library: LibraryOption = None,
    cases: Annotated[int, typer.Option(min=1, help="Calls under each tool, about.")] = 24,
    *,
    planted: Annotated[
        bool, typer.Option("--faults", help="Run the planted faults that these tools alone see.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for sanitize.json.")] = Path("out/sanitize"),
) -> None:
    """Call candidates under compute-sanitizer: stray reads, unwritten memory, races."""
    from equiv import document, sanitize
    from equiv.sanitize_report import blocks

    asked = sanitize.Asked(
        pair=pair,
        candidates=tuple(candidate or ()),
        tools=tuple(tool or ()),
        device=device,
        library=library,
        cases=cases,
        faults=planted,
        out=out,
        command=command_line(),
    )

    def progress(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    made = sanitize.run(asked, progress)
    document.show(blocks(made), sys.stdout)
    raise typer.Exit(made.exit_code)


@equiv_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="An equiv.json, loop.json or faults.json.")],
    markdown: Annotated[bool, typer.Option(help="Print Markdown instead.")] = False,
) -> None:
    """Print the report of an evidence file, such as one that a GPU host left."""
    from equiv import evidence, report

    made = evidence.read_any(file)
    if isinstance(made, evidence.LoopEvidence):
        from equiv.loop import report as loop_report

        if markdown:
            sys.stdout.write(loop_report.markdown(made))
        else:
            loop_report.show_loop(made, file)
    elif markdown:
        sys.stdout.write(report.markdown(made))
    elif isinstance(made, evidence.FaultsEvidence):
        report.show_faults(made, file)
    else:
        report.show_equiv(made, file)


@equiv_app.command()
def schema() -> None:
    """Print the JSON Schema of equiv.json."""
    from equiv import evidence

    sys.stdout.write(json.dumps(evidence.json_schema(), indent=2) + "\n")


@app.command()
def doctor(
    *,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    pair: PairOption = "kvpack",
    library: LibraryOption = None,
) -> None:
    """Say what this machine can and can't cover, by layer, why, and what to do about it."""
    from equiv import doctor as examination
    from equiv import document
    from equiv.pairs import add_checkout_paths, load_pair
    from equiv.run import check_library

    add_checkout_paths()
    load_pair(pair)
    check_library(library)
    machine, checks = examination.diagnose(pair, library)
    if json_:
        sys.stdout.write(json.dumps(examination.as_json(machine, checks), indent=1) + "\n")
    else:
        document.show(examination.blocks(machine, checks), sys.stdout)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(context: typer.Context) -> None:
    """Start a real vLLM server on a chosen route; arguments that aren't ours are vLLM's."""
    from equiv.pairs import add_checkout_paths

    add_checkout_paths()
    from kvroute.serve import main as serve_main

    raise typer.Exit(serve_main(context.args))


def main(words: list[str] | None = None) -> None:
    """Run the command line; every error is one line on standard error."""
    arguments = list(sys.argv[1:] if words is None else words)
    WORDS[:] = arguments
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # as python -m does, so that module:function can lie here
    sys.exit(run_app(app, arguments, "bytegate"))
