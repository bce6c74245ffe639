"""What ``bytegate perf`` does about serving before anything is measured or started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from equiv.errors import NotCovered
from equiv.perf.record import Serving
from equiv.perf.run import Progress
from kvroute import serve
from kvroute.errors import RouteError
from ppl.errors import PplError
from ppl.kept import LOCK, Kept, alone
from ppl.load import Load, Sessions, levels
from ppl.serving import compare, kept_of, options_of

Measure = Callable[[Progress], Serving]


def loads_of(
    rising: Sequence[int],
    *,
    gpu: bool,
    repeats: int,
    input_tokens: int | None,
    output_tokens: int | None,
    requests: int | None,
    session: Sequence[int | None],
) -> list[Load]:
    """Return the loads that the options ask for, with what a GPU, or none, has by default.

    Parameters
    ----------
    session : sessions, shared tokens, turns and turn tokens; all None where none were asked for.

    Raises
    ------
    PplError : loads that can't be sent.

    """
    count, shared, turns, turn = session
    asked = any(value is not None for value in session)
    return levels(
        rising,
        repeats=repeats,
        output_tokens=output_tokens or (128 if gpu and not asked else 8),
        input_tokens=input_tokens or (32_000 if gpu else 1_500),
        requests=requests or (64 if gpu else 8),
        sessions=Sessions(
            shared_tokens=_or(shared, 32_768 if gpu else 1_536),
            turns=_or(turns, 4),
            turn_tokens=_or(turn, 1_024 if gpu else 64),
            sessions=count,
        )
        if asked
        else None,
    )


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def prepare(
    loads: Sequence[Load],
    folder: Path,
    *,
    route: str,
    model: str | None,
    tp: int,
    dcp: int,
    arguments: Sequence[str],
) -> tuple[Measure, Kept | None]:
    """Refuse what can't work, and what is stored of another question; start nothing.

    Returns
    -------
    What measures serving, and the launches that it keeps: none where there is no vLLM, which
    measuring then says.

    Raises
    ------
    PplError : a route, size or argument that can't work; launches in the folder that are damaged,
        or of another question; a folder that another command holds.

    """
    try:
        serve.check_route(route)
    except RouteError as e:
        raise PplError(str(e)) from None
    try:
        options = options_of(model, tp, dcp, arguments)
    except NotCovered as e:
        return lacking(e), None
    # Now, and not after minutes of the tail beside the other's servers.
    if (folder / LOCK).exists():
        with alone(folder):
            pass
    kept = kept_of(options, loads, folder, fused=route)
    return partial(compare, options, loads, folder, fused=route, kept=kept), kept


def lacking(why: NotCovered) -> Measure:
    """Return what stands for serving where it can't be measured."""

    def serving(_: Progress) -> Serving:
        raise why

    return serving
