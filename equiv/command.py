"""Running a command line: every error is one line on standard error, and an exit code."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from equiv.errors import INTERRUPTED, BytegateError, ExitCode, UsageError

CLICK_ERROR: type[Any] = typer.BadParameter.__mro__[2]
"""``ClickException``, the root of bad usage: of click, or of the copy that newer typer carries."""

WORDS: list[str] = []
"""What ``bytegate`` was called with, but for its name."""


def command_line() -> str:
    """Return the command as a person would type it again."""
    return shlex.join(["bytegate", *WORDS])


def needing(name: str, extra: str) -> ModuleType:
    """Import a module of ours that needs packages which a GPU host seldom has.

    Raises
    ------
    UsageError : one is missing; ``extra`` is what of bytegate's brings it.

    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] == name.partition(".")[0]:
            raise  # one of ours: nothing that an installation mends
        raise UsageError(f"this needs {e.name}: pip install 'bytegate[{extra}]'") from None


def nothing_before(context: typer.Context) -> None:
    """Refuse options that stand before a subcommand, which wouldn't see them.

    Raises
    ------
    UsageError : naming the first of them, and where it belongs.

    """
    given = [
        p
        for p in context.command.params
        if getattr(context.get_parameter_source(p.name or ""), "name", "") == "COMMANDLINE"
    ]
    if given:
        sub = context.invoked_subcommand
        raise UsageError(
            f"{given[0].opts[0]} stands before {sub}, which would not see it: "
            f"{context.command_path} {sub} takes its options after its name, and --help says which"
        )


def run_app(  # noqa: PLR0911 - an exit code each
    application: typer.Typer, arguments: list[str], name: str
) -> int:
    """Run a command line and return its exit code; every error is one line on standard error."""
    try:
        code = application(args=arguments, prog_name=name, standalone_mode=False)
    except BytegateError as e:
        return _say(str(e), e.exit_code)
    except typer.Exit as e:
        return int(e.exit_code)
    except CLICK_ERROR as e:
        return _say(e.format_message(), ExitCode.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as e:  # of a module, pack or patch that was loaded: not a verdict
        return _say(
            f"something that was loaded ended the process with SystemExit({e}), so nothing was "
            "judged; remove that, or guard it with if __name__ == '__main__'",
            ExitCode.USAGE,
        )
    except Exception as e:
        if os.environ.get("BYTEGATE_TRACEBACK"):
            raise
        text = " ".join(str(e).split())[:300]
        return _say(
            f"internal error: {type(e).__name__}: {text}; set BYTEGATE_TRACEBACK=1 to see where, "
            "and report it",
            ExitCode.INVALID,
        )
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code and no words
        return _say("interrupted; no report was written", INTERRUPTED)
    return int(code) if isinstance(code, int) else 0


def say_stopped(name: str, path: Path) -> None:
    """Say on standard error that a signal ended a run, and where its evidence lies."""
    sys.stderr.write(f"bytegate: stopped by {name}; what ran until then is in {path}\n")


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"bytegate: {' '.join(text.split())}\n")
    return int(code)
