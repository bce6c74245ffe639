"""The commands ``bytegate loop``, ``bytegate loop repro`` and ``bytegate loop faults``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from equiv.command import nothing_before
from equiv.loop.lanes import LANES
from equiv.profiles import PROFILES
from equiv.progress import Progress
from equiv.stopping import ENDING, Stop, ignore

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
def loop(  # noqa: PLR0913, PLR0917 - an option is an argument with a default
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
    share_gpu: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--share-gpu",
            help="Lane nccl: ranks share GPUs, connected by sockets, where there are too few.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for loop.json.")] = Path("out/loop"),
) -> None:
    """Run vLLM's own context-parallel prefill loop with and without a pack, on drawn batches."""
    if context.invoked_subcommand is not None:
        nothing_before(context)
        return
    from equiv.command import command_line, say_stopped
    from equiv.loop.api import LoopRequest, run_loop
    from equiv.loop.report import show_loop

    request = LoopRequest(
        pack=pack,
        patches=tuple(patch or ()),
        lanes=tuple(lane or ()),
        profile=profile,
        device=device,
        seed=seed,
        share_gpu=share_gpu,
        out=out,
        command=command_line(),
    )
    stop = Stop()
    with Progress() as progress:
        made = run_loop(request, progress, stop)
        if stop.signal:
            ignore(*ENDING)
    show_loop(made, out / "loop.json")
    if stop.signal:
        say_stopped(stop.signal, out / "loop.json")
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
        typer.Option(
            min=0, help="Cases drawn in each lane of the false-alarm run; 0 leaves that run out."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Faults, and the false-alarm run, side by side.")
    ] = 1,
) -> None:
    """Plant L01 to L14 in vLLM: each must be caught, and nothing clean or harmless flagged."""
    from equiv.command import command_line
    from equiv.loop.faults import LoopFaultsRequest, run_faults
    from equiv.loop.report import show_loop_faults

    request = LoopFaultsRequest(
        only=tuple(only or ()),
        profile=profile,
        device=device,
        seed=seed,
        out=out,
        clean_cases=clean_cases,
        jobs=jobs,
        command=command_line(),
    )
    with Progress() as progress:
        made = run_faults(request, progress)
    show_loop_faults(made, out / "faults.json")
    raise typer.Exit(made.exit_code)
