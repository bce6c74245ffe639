"""The server of one launch: started, noted, and stopped whatever comes between.

``server.json`` beside its log names the process while it runs. A command that is killed outright
takes the server with it (Linux), and the next one ends what is left by that note.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from equiv import seal
from equiv.files import write_whole
from equiv.perf.kept import undigested
from equiv.stopping import held_back
from kvroute import serve
from ppl.errors import PplError
from ppl.facts import Arm, Instance
from ppl.servers import end_leftovers, tether

NAME = "server.json"
SCHEMA = "bytegate.perf.server"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def running(options: serve.ServeOptions, folder: Path, arm: Arm, launch: int) -> Iterator[Any]:
    """Start a server, and stop it with all its processes when the block ends.

    Signals that come while it starts or stops are held back until somebody can, or did, stop it.

    Raises
    ------
    RouteError : it can't be started.
    PplError : the folder can't be written.

    """
    server = None
    try:
        with held_back(*SIGNALS):
            server = serve.start(options, log=folder / f"{arm}-{launch}.log", before=tether())
            _note(folder, arm, launch, server.pid)
        yield server
    finally:
        with held_back(*SIGNALS):
            if server is not None:
                server.stop()
            (folder / NAME).unlink(missing_ok=True)


def _note(folder: Path, arm: Arm, launch: int, pid: int) -> None:
    try:
        created = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return  # it ended at once, and whoever waits for it says so
    made = Instance(arm=arm, launch=launch, number=1, why="planned", pid=pid, created_s=created)
    text = json.dumps({"schema": SCHEMA, **made.model_dump(mode="json")})
    try:
        write_whole(folder / NAME, seal.sealed(text).encode())
    except OSError as e:
        raise PplError(f"can't write to {folder}: {e.strerror}") from None


def end_left(folder: Path, progress: Callable[[str], None]) -> None:
    """End the server that a killed command left, by its note.

    Raises
    ------
    PplError : the note is damaged.

    """
    path = folder / NAME
    try:
        raw = seal.loads(path.read_bytes())
        damage = undigested(raw)
        own = {"schema", seal.FIELD}
        left = Instance.model_validate({k: v for k, v in raw.items() if k not in own})
    except FileNotFoundError:
        return
    except (ValidationError, ValueError, AttributeError) as e:
        damage = " ".join(str(e).split())[:120]
    except OSError as e:
        raise PplError(f"can't read {path}: {e.strerror}") from None
    if damage:
        raise PplError(f"{path} is damaged: {damage}; end the server that it named, and delete it")
    gone = end_leftovers([left])
    if gone:
        progress(f"ended {gone} processes of a server that a killed command had left")
    path.unlink(missing_ok=True)
