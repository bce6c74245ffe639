"""The command ``bytegate perf``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equiv.errors import NotCovered, UsageError

if TYPE_CHECKING:
    from equiv.perf.run import Progress

PARTS = ("tail", "serving")
SESSION = ("--sessions", "--shared-tokens", "--turns", "--turn-tokens")
LEAST_ROWS = 1000
"""Sizes of the tail below it aren't those of a chunk, which a share of serving needs."""


def perf(
    context: typer.Context,
    *,
    part: Annotated[
        list[str] | None, typer.Option(help="tail or serving. Repeatable; both by default.")
    ] = None,
    pair: Annotated[str, typer.Option(help="Registered op pair.")] = "kvpack",
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="A candidate of the pair. Repeatable; all that run here by default."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="Sizes of the tail, such as T=16384,65536. Repeatable."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU by default where there is one.")
    ] = None,
    library: Annotated[
        str | None, typer.Option(help="A library with vLLM's op, instead of an installed vLLM.")
    ] = None,
    route: Annotated[str, typer.Option(help="Route of the second servers.")] = "fused",
    model: Annotated[
        str | None, typer.Option(help="Folder or name; a small random one by default.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 2,
    dcp: Annotated[int, typer.Option(min=1, help="Decode context parallel size.")] = 2,
    input_tokens: Annotated[
        int | None, typer.Option(min=2, help="Of a request; 32,000 on a GPU, 1,500 elsewhere.")
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of a request; 128 on a GPU, 8 elsewhere and of a turn."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of a run; 64 on a GPU, 8 elsewhere.")
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(help="Requests at a time: 1,8,70. Repeatable; every launch measures each."),
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions with a shared prefix; by default as many as at a time."),
    ] = None,
    shared_tokens: Annotated[
        int | None, typer.Option(help="Of that prefix; 32,768 on a GPU, 1,536 elsewhere.")
    ] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Of a session; 4.")] = None,
    turn_tokens: Annotated[
        int | None, typer.Option(help="That a turn adds; 1,024 on a GPU, 64 elsewhere.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of a level in a launch.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for perf.json and perf.md.")] = Path("out/perf"),
) -> None:
    """Measure the tail on a GPU, and serving by route; arguments that aren't ours are vLLM's.

    Any of --sessions, --shared-tokens, --turns and --turn-tokens asks for sessions, whose requests
    share a prefix and find it in the server's prefix cache.
    """
    unknown = set(part or ()) - set(PARTS)
    if unknown:
        raise UsageError(f"part {min(unknown)!r}: expected {' or '.join(PARTS)}")
    given = dict(zip(SESSION, (sessions, shared_tokens, turns, turn_tokens), strict=True))
    in_sessions = any(value is not None for value in given.values())
    if in_sessions and (input_tokens is not None or requests is not None):
        named = next(name for name, value in given.items() if value is not None)
        raise UsageError(f"{named}: sessions say themselves what --input-tokens and --requests say")
    rising = levels_of(concurrency or ["2"])
    from equiv import document
    from equiv.command import command_line
    from equiv.pairs import add_checkout_paths, load_pair
    from equiv.perf import report, run, tail
    from equiv.run import find_device
    from equiv.stopping import as_interrupt

    add_checkout_paths()
    where = find_device(device)
    gpu = where.startswith("cuda")
    only = dict(map(tail.sizes, size or ()))
    serving: Any = None
    if not part or "serving" in part:
        try:
            from ppl.load import Sessions, levels
            from ppl.serving import compare, options_of
        except ModuleNotFoundError as e:
            lacking = e.name

            def serving(_: Progress) -> Any:
                raise NotCovered(f"this needs {lacking}: pip install 'bytegate[ppl]'")
        else:
            loads = levels(
                rising,
                repeats=repeats,
                output_tokens=output_tokens or (128 if gpu and not in_sessions else 8),
                input_tokens=input_tokens or (32_000 if gpu else 1_500),
                requests=requests or (64 if gpu else 8),
                sessions=Sessions(
                    shared_tokens=_or(shared_tokens, 32_768 if gpu else 1_536),
                    turns=_or(turns, 4),
                    turn_tokens=_or(turn_tokens, 1_024 if gpu else 64),
                    sessions=sessions,
                )
                if in_sessions
                else None,
            )

            def serving(said: Progress) -> Any:
                asked = options_of(model, tp, dcp, context.args)
                return compare(asked, loads, out / "serving", fused=route, progress=said)

            if gpu and pair == "kvpack":  # the pack's share takes times of packs of every size
                known = load_pair(pair).dims["T"].production
                only.setdefault("T", [n for n in known if n >= LEAST_ROWS])

    def progress(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    asked = run.Asked(
        pair=pair,
        candidates=tuple(candidate or ()),
        device=where,
        library=library,
        out=out,
        command=command_line(),
        tail=not part or "tail" in part,
        only=only,
        serving=serving,
    )
    with as_interrupt(signal.SIGTERM):  # so that its servers end with it
        made = run.run(asked, progress)
    document.show(report.blocks(made), sys.stdout)
    sys.stdout.write(f"in {out / 'perf.json'} and {out / 'perf.md'}\n")
    raise typer.Exit(made.exit_code)


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def levels_of(words: list[str]) -> list[int]:
    """Read ``1,8`` and ``70`` as levels of concurrency.

    Raises
    ------
    UsageError : one isn't a positive number.

    """
    try:
        found = [int(word) for words_ in words for word in words_.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        said = " ".join(words)
        raise UsageError(f"--concurrency {said!r}: expected positive numbers, such as 1,8,70")
    return found
