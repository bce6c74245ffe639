"""The command ``bytegate ppl run``, which is also ``bytegate ppl`` alone."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from equiv import document
from equiv.command import needing
from equiv.errors import Interrupted
from equiv.stopping import as_interrupt
from ppl.errors import PplError

ShareGpu = Annotated[
    bool,
    typer.Option(
        "--share-gpu",
        help="Ranks share GPUs where there are fewer of these, NCCL between them by sockets. "
        "Evidence for bytes on a host with one GPU, not for time.",
    ),
]


class RunByDefault(TyperGroup):
    """A group whose command is ``run`` where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``run`` first unless a command or help is asked for."""
        if not args or (args[0] not in self.commands and args[0] not in {"--help", "-h"}):
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


def module(name: str) -> ModuleType:
    """Import a module of this room that needs more than a GPU host has."""
    return needing(f"ppl.{name}", "ppl")


def run(  # noqa: PLR0913, PLR0917 - an option is an argument with a default
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: vLLM's own arguments, for both servers; of servers that are there, "
            "what they were started with and don't tell themselves.",
        ),
    ] = None,
    stock: Annotated[str, typer.Option(help="Address of a server on the route stock.")] = "",
    fused: Annotated[str, typer.Option(help="Address of a server on the route under test.")] = "",
    model: Annotated[
        str | None, typer.Option(help="Launch both servers with this model; default: a small one.")
    ] = None,
    route: Annotated[
        str, typer.Option(help="Route of the fused arm: fused, module:function or fault:ID.")
    ] = "fused",
    tp: Annotated[int, typer.Option(help="Tensor parallel size of launched servers.")] = 2,
    dcp: Annotated[int, typer.Option(help="Decode context parallel size.")] = 2,
    workspace: Annotated[
        int | None, typer.Option(min=1, help="Rows of the chunked-prefill workspace.")
    ] = None,
    emulate_fp8_prefill: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--emulate-fp8-prefill",
            help="Both servers: fp8 cache and prefill, attention by a backend that upcasts. "
            "Evidence for the fp8 pack's bytes, not for an fp8 attention kernel.",
        ),
    ] = False,
    share_gpu: ShareGpu = False,  # noqa: FBT002
    one_at_a_time: Annotated[  # noqa: FBT002
        bool, typer.Option("--one-at-a-time", help="Launch one server after the other, ABBA.")
    ] = False,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            help="A built-in text's id, a file, a folder, or hf://NAME. Repeatable; default: ten."
        ),
    ] = None,
    without_broken: Annotated[  # noqa: FBT002
        bool, typer.Option("--without-broken", help="Go on without a text that can't be had.")
    ] = False,
    full: Annotated[  # noqa: FBT002
        bool, typer.Option("--full", help="30,000 to 36,000 tokens a text, and a long one.")
    ] = False,
    tokens: Annotated[
        str, typer.Option(metavar="LEAST-MOST", help="Tokens of a text; default: four chunks.")
    ] = "",
    repeats: Annotated[int, typer.Option(help="Of each text within the first launch.")] = 2,
    launches: Annotated[int, typer.Option(help="Of each server.")] = 2,
    burst: Annotated[  # noqa: FBT002
        bool, typer.Option("--burst", help="Also score all texts at once, as an arm of its own.")
    ] = False,
    bursts: Annotated[
        int | None, typer.Option(help="Bursts of each launch, with --burst; default: 3.")
    ] = None,
    top1: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--top1",
            help="Also compare each row's most probable token and its margin; three times the "
            "answer's size, and --max-logprobs must be 2 or more.",
        ),
    ] = False,
    claim: Annotated[str, typer.Option(help="identical or equivalent.")] = "identical",
    margin: Annotated[
        float | None,
        typer.Option(help="Nats; by default max(1e-4, 3 standard errors between launches)."),
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the API key.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one answer.")] = 1800.0,
    no_pages: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--no-pages",
            help="Leave ppl.json and the scores alone; bytegate ppl compare OUT makes the pages "
            "and tokens.parquet on a machine that has what they need.",
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of results and reports; a run goes on there.")
    ] = Path("out/ppl"),
) -> None:
    """Score texts on two servers that differ in the route alone; compare them token by token."""
    options: Any = module("options")
    # Now: what it needs must not be missed after an hour.
    outputs = module("evidence" if no_pages else "outputs")
    made = options.Options(
        stock=stock,
        fused=fused,
        model=model,
        arguments=tuple(arguments or ()),
        route=route,
        tp=tp,
        dcp=dcp,
        workspace=workspace,
        emulate_fp8=emulate_fp8_prefill,
        share_gpu=share_gpu,
        one_at_a_time=one_at_a_time,
        texts=tuple(texts or ()),
        without_broken=without_broken,
        full=full,
        tokens=token_range(tokens),
        repeats=repeats,
        launches=launches,
        burst=burst or bursts is not None,
        bursts=options.Options.bursts if bursts is None else bursts,
        top1=top1,
        claim=claim,
        margin=margin,
        key_variable=api_key_env,
        timeout_s=timeout,
        out=out,
        command=again(),
    )
    try:
        with as_interrupt(signal.SIGTERM):
            with module("pace").Pace() as pace:
                found = module("runner").run(made, pace)
            if no_pages:
                outputs.write(out / "ppl.json", found)
            else:
                outputs.leave(out, found, module("judge").stored([out]), command=again())
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped: what was scored is stored, and the same command goes on from there"
        ) from None
    document.show(module("report").blocks(found), sys.stdout)
    raise typer.Exit(found.exit_code)


def again() -> str:
    """Return this command as a person would type it again, without passwords in addresses."""
    words = [re.sub(r"://[^@/\s]+@", "://", word) for word in sys.argv[1:]]
    return shlex.join(["bytegate", *([] if words[:1] == ["ppl"] else ["ppl"]), *words])


def token_range(words: str) -> tuple[int, int] | None:
    """Read ``LEAST-MOST``; None of nothing."""
    if not words:
        return None
    least, _, most = words.partition("-")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise PplError(f"--tokens {words}: expected LEAST-MOST, as in 30000-36000")
    return int(least), int(most or least)
