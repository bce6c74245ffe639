"""The command ``bytegate ppl dcp``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from equiv import document
from equiv.errors import INTERRUPTED, UsageError
from equiv.stopping import as_interrupt
from ppl.run_cli import ShareGpu, again, module, token_range


def dcp(  # noqa: PLR0913, PLR0917 - an option is an argument with a default
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: vLLM's own arguments, for both servers.")
    ] = None,
    alone: Annotated[
        str, typer.Option(help="Address of a server of tensor parallelism alone.")
    ] = "",
    sharded: Annotated[
        str, typer.Option(help="Address of a server with decode context parallelism.")
    ] = "",
    model: Annotated[
        str | None, typer.Option(help="Folder or name of the model; default: a small one.")
    ] = None,
    route: Annotated[
        str, typer.Option(help="Route of the sharded server: stock, fused, fault:ID ...")
    ] = "stock",
    tp: Annotated[int, typer.Option(help="Tensor parallel size of both.")] = 2,
    dcp: Annotated[int, typer.Option(help="Decode context parallel size of the sharded one.")] = 2,
    workspace: Annotated[
        int | None, typer.Option(min=1, help="Rows of the chunked-prefill workspace.")
    ] = None,
    share_gpu: ShareGpu = False,  # noqa: FBT002
    texts: Annotated[
        list[str] | None,
        typer.Option(help="As of bytegate ppl run. Repeatable; default: ten."),
    ] = None,
    full: Annotated[  # noqa: FBT002
        bool, typer.Option("--full", help="30,000 to 36,000 tokens a text, and a long one.")
    ] = False,
    tokens: Annotated[
        str, typer.Option(metavar="LEAST-MOST", help="Tokens of a text; default: four chunks.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one answer.")] = 1800.0,
    out: Annotated[Path, typer.Option(help="Folder for dcp.json, dcp.md and logs.")] = Path(
        "out/dcp"
    ),
) -> None:
    """Compare decode context parallelism with tensor parallelism alone, token by token."""
    if bool(alone) != bool(sharded):
        raise UsageError("--alone and --sharded belong together: give both addresses, or neither")
    if alone and share_gpu:
        raise UsageError("--share-gpu launches servers, and --alone and --sharded name some")
    options: Any = module("options")
    evidence: Any = module("dcp_evidence")
    made = options.Options(
        stock=alone,
        fused=sharded,
        model=None if alone else model,
        arguments=tuple(arguments or ()),
        route=route,
        tp=tp,
        dcp=dcp,
        workspace=workspace,
        share_gpu=share_gpu,
        texts=tuple(texts or ()),
        full=full,
        tokens=token_range(tokens),
        timeout_s=timeout,
        out=out,
    )
    try:
        with as_interrupt(signal.SIGTERM):
            with module("pace").Pace() as pace:
                found = module("dcp").run(made, pace, stands_for=model)
            evidence.write(out, found, again())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    document.show(evidence.blocks(found), sys.stdout)
    raise typer.Exit(found.exit_code)
