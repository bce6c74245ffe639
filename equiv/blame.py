"""Who raised an exception: the candidate, or the call that it doesn't take."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equiv.execute import Loaded
    from equiv.pairs import OpPair


def origin(error: BaseException, module: str) -> str:
    """Return ``module:function`` of the innermost frame in the candidate's module, or at all."""
    frames = [
        (f.f_globals.get("__name__", "?"), f.f_code.co_name)
        for f, _ in traceback.walk_tb(error.__traceback__)
    ]
    own = [f for f in frames if f[0] == module]
    name, function = (own or frames or [("?", "?")])[-1]
    return f"{name}:{function}"


def raised_by_call(error: BaseException, pair: OpPair, loaded: Loaded) -> tuple[str, str]:
    """Say in one line what a candidate's call raised, and in which function.

    A call that Python itself refused, before the candidate's first line, is told as what it is: the
    candidate takes other arguments than its pair hands it.
    """
    said = f"{type(error).__name__}: {line_of(error)}"
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not isinstance(error, TypeError) or frame.f_code is not getattr(pair.call, "__code__", None):
        module = getattr(loaded.kernel, "__module__", "") or ""
        return said, origin(error, module)
    takes = ""
    with contextlib.suppress(TypeError, ValueError):  # a function that says nothing of itself
        takes = f"; it takes {inspect.signature(loaded.kernel)}"
    words = f"the candidate can't be called as pair {pair.name} calls it{takes}"
    return f"{said}: {words}", loaded.name


def line_of(error: BaseException) -> str:
    """Return the first line of what an exception says."""
    text = str(error).strip().splitlines()
    return text[0][:300] if text else "no message"
