"""Finished launches of ``bytegate perf``, on disk: a kill keeps them, and the same command goes on.

``launch-1-stock.json`` to ``launch-4-stock.json`` hold what one server gave, each written whole
once all of it is there, with the question that it answers. A launch that was cut off has no file
and is measured again from its start. They are taken in their order alone, and those of another
question refuse the folder.
"""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from equiv import seal
from equiv.files import write_whole
from equiv.perf.kept import undigested
from equiv.perf.record import ServingRun
from ppl.errors import PplError, Stale
from ppl.facts import Arm, differences
from ppl.load import Load

SHOWN = 3
"""Differences that a refusal names; it counts the others."""
LOCK = ".lock"
COUNTED = ("chunks", "packs")
"""Counters that tell a launch's route."""


class Launch(BaseModel):
    """One launch: what its server was measured and seen to do.

    Attributes
    ----------
    asked : the question, as ``ppl.serving.question`` has it.
    place : in the order of launches, from 1; ``launch`` counts those of one arm.
    session : a word of the command's start that made it.
    started : in UTC; ``seconds`` until all was measured.
    counters : of the whole launch, warm-ups included, over all ranks.
    kinds, pynccl : what its ranks tell, as ``ppl.serving.kinds_of`` and ``ppl.observe.pynccl_of``
        read it.

    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True
    )

    schema_name: Literal["bytegate.perf.launch"] = Field(
        default="bytegate.perf.launch", alias="schema"
    )
    schema_version: Literal[1] = 1
    asked: dict[str, JsonValue]
    place: int = Field(ge=1)
    arm: Arm
    launch: int = Field(ge=1)
    session: str
    started: str
    seconds: float
    runs: list[ServingRun]
    counters: dict[str, int]
    kinds: list[str]
    pynccl: bool | None
    content_sha256: str = ""


class Kept:
    """The launches that a folder holds, of one question.

    Parameters
    ----------
    folder : needn't be there; nothing is written before ``put``.
    order : arms in the order of their launches.
    asked : the question, by flat names: values of JSON.

    """

    def __init__(
        self, folder: Path, order: Sequence[Arm], loads: Sequence[Load], asked: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self.order = tuple(order)
        self.asked = dict(asked)
        self.session = uuid.uuid4().hex
        self._runs = [(x.concurrency, n) for x in loads for n in range(1, x.repeats + 1)]

    def path(self, place: int) -> Path:
        """Return the file of a launch, by its place in the order, from 1."""
        return self.folder / f"launch-{place}-{self.order[place - 1]}.json"

    def count(self) -> int:
        """Return how many launches have a file."""
        return sum(self.path(place).exists() for place in range(1, len(self.order) + 1))

    def stored(self) -> list[Launch]:
        """Return the launches that are there, in their order.

        Raises
        ------
        PplError : one is damaged, or one is missing before another.
        Stale : they answer another question.

        """
        there = [self.path(n).exists() for n in range(1, len(self.order) + 1)]
        count = there.index(False) if False in there else len(there)
        if any(there[count:]):
            last = self.path(count + 1 + there[count:].index(True))
            raise PplError(
                f"{self.path(count + 1)} is missing, and {last.name} is there: launches go in "
                f"their order; delete {last.name} as well, or give --out another folder"
            )
        return [self._read(place) for place in range(1, count + 1)]

    def put(self, made: Launch) -> None:
        """Store a launch, durably and whole or not at all.

        Raises
        ------
        PplError : the folder can't be written.

        """
        try:
            text = seal.sealed(made.model_dump_json())
            write_whole(self.path(made.place), text.encode())
        except OSError as e:
            raise PplError(f"can't write to {self.folder}: {e.strerror}") from None

    def _read(self, place: int) -> Launch:
        path = self.path(place)
        try:
            data = path.read_bytes()
            made = Launch.model_validate_json(data)
            damage = undigested(seal.loads(data))
        except ValidationError as e:
            one = e.errors()[0]
            where = ".".join(str(x) for x in one["loc"])
            damage = f"{where}: {one['msg']}" if where else one["msg"]
        except ValueError as e:
            damage = str(e)
        except OSError as e:
            raise PplError(f"can't read {path}: {e.strerror}") from None
        if not damage:
            damage = self._unlike(made, place)
        if damage:
            raise PplError(
                f"{path} is damaged: {damage}; delete it with those after it, and they are "
                "measured again"
            )
        unlike = differences(made.asked, self.asked)
        if unlike:
            more = f" and {len(unlike) - SHOWN} more" if len(unlike) > SHOWN else ""
            raise Stale(
                f"{self.folder} holds launches of another question: "
                f"{'; '.join(unlike[:SHOWN])}{more}; give --out another folder"
            )
        return made

    def _unlike(self, made: Launch, place: int) -> str:
        """Say that a file holds another launch than its name says, or not all of its runs."""
        arm = self.order[place - 1]
        number = self.order[:place].count(arm)
        if (made.place, made.arm, made.launch) != (place, arm, number):
            return f"it holds launch {made.place} ({made.arm}); was it copied by hand?"
        if made.asked != self.asked:
            return ""  # of other runs, and refused for that
        if lacking := [name for name in COUNTED if name not in made.counters]:
            return f"it has no counter of {' and '.join(lacking)}"
        mine = [(arm, number, *run) for run in self._runs]
        if [(r.route, r.launch, r.concurrency, r.repeat) for r in made.runs] != mine:
            return f"it has {len(made.runs)} runs, which aren't the {len(mine)} asked for"
        return ""


def numbered(launches: Sequence[Launch]) -> list[int]:
    """Return for each launch which session made it, from 1, in the order of their first."""
    known = list(dict.fromkeys(made.session for made in launches))
    return [known.index(made.session) + 1 for made in launches]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a folder, and hold it alone.

    Raises
    ------
    PplError : it can't be written, or another command holds it.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        f = (folder / LOCK).open("a")
    except OSError as e:
        raise PplError(f"can't write to {folder}: {e.strerror}") from None
    with f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PplError(
                f"another run writes to {folder}: wait for it, or give another --out"
            ) from None
        except OSError as e:  # such as a file system that has no locks
            raise PplError(f"can't lock {folder}: {e.strerror}; give another --out") from None
        yield
