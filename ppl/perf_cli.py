"""The command ``bytegate perf``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equiv.errors import Interrupted, NotCovered, UsageError

if TYPE_CHECKING:
    from equiv.perf.run import Progress
    from ppl.kept import Kept

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
    serving: Callable[[Progress], Any] | None = None
    kept: Kept | None = None
    if not part or "serving" in part:
        loads = {
            "gpu": gpu,
            "repeats": repeats,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "requests": requests,
            "session": tuple(given.values()),
        }
        servers = {
            "route": route,
            "model": model,
            "tp": tp,
            "dcp": dcp,
            "arguments": context.args,
        }
        serving, kept = _serving(out / "serving", rising, loads, servers)
        if gpu and pair == "kvpack" and kept:  # the pack's share takes times of packs of every size
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
    try:
        with as_interrupt(signal.SIGTERM):  # so that its servers end with it
            made = run.run(asked, progress)
    except KeyboardInterrupt:
        if kept is None:
            raise
        raise Interrupted(
            f"interrupted: {kept.count()} of {len(kept.order)} launches are stored in "
            f"{kept.folder}, and the same command goes on from there"
        ) from None
    document.show(report.blocks(made), sys.stdout)
    sys.stdout.write(f"in {out / 'perf.json'} and {out / 'perf.md'}\n")
    raise typer.Exit(made.exit_code)


def _serving(
    folder: Path, rising: list[int], loads: dict[str, Any], servers: dict[str, Any]
) -> tuple[Callable[[Progress], Any], Kept | None]:
    """Return what measures serving, and what it keeps; loads and servers are options by name."""
    try:
        from ppl import perf_serving
    except ModuleNotFoundError as e:
        lacking = e.name

        def serving(_: Progress) -> Any:
            raise NotCovered(f"this needs {lacking}: pip install 'bytegate[ppl]'")

        return serving, None
    made = perf_serving.loads_of(rising, **loads)
    return perf_serving.prepare(made, folder, **servers)


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
