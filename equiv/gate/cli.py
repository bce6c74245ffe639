"""The commands ``bytegate gate`` and ``bytegate verify``.

What they need beside a GPU host's packages, pydantic above all, is imported when they run.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from equiv import document
from equiv.command import needing, nothing_before
from equiv.errors import UsageError

gate_app = typer.Typer(
    rich_markup_mode=None,
    help="Run what a policy asks for, or judge evidence that is there, and give one verdict.",
)
REQUIRES = ("gpu",)
COMMIT = re.compile("[0-9a-fA-F]{7,64}")


def _module(name: str) -> ModuleType:
    """Import a module of this room that needs more than a GPU host has."""
    return needing(f"equiv.gate.{name}", "report,ppl")


PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", help="What a merge needs; the packaged one by default."),
]


@gate_app.callback(invoke_without_command=True)
def gate(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="Judge the evidence below this folder, and run nothing. Repeatable."
        ),
    ] = None,
    policy: PolicyOption = None,
    require: Annotated[
        list[str] | None,
        typer.Option(help="gpu: a missing GPU is exit code 4, whatever the policy says."),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="The commit that the evidence has to be of.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for gate.json, gate.md, gate.html and gate.xml.")
    ] = Path("out/gate"),
) -> None:
    """Run what a policy asks for, or judge evidence that is there, and give one verdict."""
    if context.invoked_subcommand is not None:
        nothing_before(context)
        return
    unknown = [x for x in require or () if x not in REQUIRES]
    if unknown:
        raise UsageError(f"--require {unknown[0]}: expected {', '.join(REQUIRES)}")
    if commit is not None and not COMMIT.fullmatch(commit):
        raise UsageError(
            f"--commit {commit or repr(commit)}: expected 7 or more hexadecimal digits"
        )
    run, policies = _module("run"), _module("policy")
    from equiv.command import command_line

    chosen = policies.load(policy)
    if require:
        chosen = chosen.needing_gpu()
    request = run.Request(
        policy=chosen,
        folders=tuple(folders or ()),
        out=out,
        commit=commit and commit.lower(),
        command=command_line(),
    )
    done = run.gate(request, _announce)
    _module("outputs").write(done, out)
    document.show(run.show(done.made, out), sys.stdout)
    raise typer.Exit(done.made.exit_code)


def verify(
    file: Annotated[
        Path, typer.Argument(help="A gate.json, equiv.json, loop.json, faults.json or ppl.json.")
    ],
    cases: Annotated[int, typer.Option(min=0, help="Recorded cases to run again, a file.")] = 12,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Picks the cases; a new one every time.")
    ] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Where evidence or arrays lie, if they were moved."),
    ] = None,
    library: Annotated[str | None, typer.Option(help="A library with vLLM's op.")] = None,
) -> None:
    """Check an evidence file: that it is whole, that it agrees with itself, and comes out again."""
    verifying = _module("verify")
    options = verifying.Options(
        cases=cases,
        seed=secrets.randbits(32) if seed is None else seed,
        folders=tuple(folders or ()),
        library=library,
    )
    done = verifying.verify(file, options)
    document.show(verifying.blocks(file, options, done), sys.stdout)
    raise typer.Exit(int(done.exit_code))


def _announce(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


@gate_app.command("policy")
def print_policy() -> None:
    """Print the default policy, to start one's own from."""
    sys.stdout.write(str(_module("policy").packaged()))


@gate_app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of gate.json."""
    found: Any = _module("record").json_schema()
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
