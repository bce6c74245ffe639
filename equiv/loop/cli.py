"""The commands ``bytegate loop``, ``bytegate loop repro`` and ``bytegate loop faults``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from equiv.evidence import FaultsEvidence, LoopEvidence
from equiv.loop.lanes import LANES
from equiv.profiles import PROFILES

loop_app = typer.Typer(
    rich_markup_mode=None,
    help="Run vLLM's own context-parallel prefill loop with and without a pack, on drawn batches.",
)

PatchOption = Annotated[
    list[str] | None,
    typer.Option("--patch", help="module:function, called once before the run to change vLLM."),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(PROFILES)}; dev by default, gate where CI is set."),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="0 by default; a nightly draws one.")]


@loop_app.callback(invoke_without_command=True)
def loop(
    context: typer.Context,
    pack: Annotated[str, typer.Option(help="fused, or your own as module:function.")] = "fused",
    patch: PatchOption = None,
    lane: Annotated[
        list[str] | None,
        typer.Option("--lane", help=f"One of {', '.join(LANES)}. Repeatable; all by default."),
    ] = None,
    profile: ProfileOption = None,
    device: DeviceOption = None,
    seed: SeedOption = None,
    out: Annotated[Path, typer.Option(help="Folder for loop.json.")] = Path("out/loop"),
) -> None:
    """Run vLLM's own context-parallel prefill loop with and without a pack, on drawn batches."""
    if context.invoked_subcommand is not None:
        return
    from equiv.cli import command_line
    from equiv.loop.api import LoopRequest, run_loop

    made = run_loop(
        LoopRequest(
            pack=pack,
            patches=tuple(patch or ()),
            lanes=tuple(lane or ()),
            profile=profile,
            device=device,
            seed=seed,
            out=out,
            command=command_line(),
        ),
        _progress,
    )
    _show(made, out / "loop.json")
    raise typer.Exit(made.exit_code)


@loop_app.command()
def repro(
    case: Annotated[str, typer.Argument(help="The line that a report printed.")],
    patch: PatchOption = None,
) -> None:
    """Run one case again and print everything about it."""
    from equiv.loop.api import repro as again

    done = again(case, tuple(patch or ()))
    for line in done.lines:
        sys.stdout.write(line + "\n")
    raise typer.Exit(done.exit_code)


@loop_app.command()
def faults(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Ids such as L07. Repeatable; all by default."),
    ] = None,
    profile: ProfileOption = None,
    device: DeviceOption = None,
    seed: SeedOption = None,
    out: Annotated[Path, typer.Option(help="Folder for faults.json.")] = Path("out/loop-faults"),
    clean_cases: Annotated[
        int | None,
        typer.Option(min=0, help="Cases drawn in each lane of the false-alarm run."),
    ] = None,
) -> None:
    """Plant L01 to L14 in vLLM: each must be caught, and nothing clean or harmless flagged."""
    from equiv.cli import command_line
    from equiv.loop.faults import LoopFaultsRequest, run_faults

    made = run_faults(
        LoopFaultsRequest(
            only=tuple(only or ()),
            profile=profile,
            device=device,
            seed=seed,
            out=out,
            clean_cases=clean_cases,
            command=command_line(),
        ),
        _progress,
    )
    _show_faults(made, out / "faults.json")
    raise typer.Exit(made.exit_code)


def _progress(name: str, lane: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{name} {lane} {done}/{total}")
        sys.stderr.flush()


def _clear() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")


def _show(made: LoopEvidence, path: Path) -> None:
    _clear()
    lines = [f"vLLM's loop with pack {made.pack} on {made.device}, profile {made.profile}", ""]
    lines.append(
        f"{'lane':8} {'state':12} {'cases':>7} {'refused':>8} {'bytes':>12} {'cases/s':>8}"
    )
    for lane in made.lanes:
        rate = lane.cases / lane.seconds if lane.seconds else 0
        lines.append(
            f"{lane.lane:8} {lane.state:12} {lane.cases:>7,} {lane.refused:>8,} "
            f"{lane.bytes_compared:>12,} {rate:>8.0f}",
        )
        for finding in lane.findings:
            lines += [
                f"  {finding.kind} ({finding.occurrences} cases): {finding.detail}",
                *([f"  raised in {finding.raised_in}"] if finding.raised_in else []),
                f"  {finding.repro}",
            ]
    whose = "the wheel's own" if made.untouched["untouched"] else "CHANGED"
    lines += [
        "",
        f"loop, reorg, metadata builder, manager and merge: {whose}",
        _whose(made.untouched),
        *(f"  {problem}" for problem in made.untouched["problems"]),
        f"largest share of a bound against the dense reference: {made.worst_share:.3f}",
        *(f"not covered: {line}" for line in made.not_covered),
        f"{made.verdict} in {made.seconds:.0f} s; evidence in {path}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _show_faults(made: FaultsEvidence, path: Path) -> None:
    _clear()
    lines = []
    for row in made.faults:
        lines += [
            f"{row.id} {row.outcome:7} {row.lane:8} after {row.cases:>5} cases  {row.title}",
            f"    {row.kind}: {row.detail}",
            f"    {row.smallest}",
        ]
        if row.twin != "clean":
            lines.append(f"    {row.twin}")
    alarms = made.false_alarms["alarms"]
    counts = made.false_alarms["candidates"]
    lines += [f"{name}: {count:,} cases" for name, count in counts.items()]
    lines += [f"FALSE ALARM {a['candidate']}: {a['kind']} on {a['case']}" for a in alarms]
    caught = sum(row.outcome == "caught" for row in made.faults)
    lines.append(
        f"{made.verdict}: {caught} of {len(made.faults)} caught, "
        f"{len(made.false_alarms['alarms'])} false alarms, {made.seconds:.0f} s; "
        f"evidence in {path}",
    )
    sys.stdout.write("\n".join(lines) + "\n")


def _whose(untouched: dict[str, Any]) -> str:
    return (
        f"  {len(untouched['subjects'])} functions of {untouched['distribution']} and "
        f"{untouched['globals']} names that they read"
    )
