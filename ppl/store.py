"""Stored results: one log-probability array for each (text, arm, launch, repeat).

The array is written first, under the name of its digest; the record that names it is written last
and whole. So a record that is there has its array, whenever the writer was killed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from equiv import seal
from equiv.files import write_whole
from ppl.errors import PplError, Stale

Floats = NDArray[np.float32]

SENTINEL = -9000.0
"""vLLM writes -9999.0 for a log-probability of minus infinity; no real one is so low."""
MOST = 1e-3
"""A log-probability isn't above 0 but for the rounding of a log-sum-exp."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Key(_Frozen):
    """What must be the same for a stored result to be used again."""

    text: str
    ids_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tokens: int = Field(gt=1)
    model: str
    arguments: tuple[str, ...]
    route: str
    versions: dict[str, str]


class Observed(_Frozen):
    """What a server was seen to do during a request; None where nobody looked.

    Attributes
    ----------
    route : the route that its counters show.
    scheduler_chunks : tokens of each engine step.
    requests : requests that the server finished meanwhile; 1 where it did nothing else.
    counters, planned : what each rank counted and had to count, in the order of ranks.

    """

    route: str | None = None
    scheduler_chunks: tuple[int, ...] | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    requests: int | None = None
    counters: dict[str, tuple[int, ...]] | None = None
    planned: dict[str, tuple[int, ...]] | None = None


class Record(_Frozen):
    """A result's facts, beside its array of ``rows`` float32 values, in nats."""

    schema_name: Literal["bytegate.ppl.score"] = "bytegate.ppl.score"
    schema_version: Literal[1] = 1
    key: Key
    arm: Literal["stock", "fused"]
    launch: int = Field(ge=1)
    repeat: int = Field(ge=1)
    exposed_from: int = Field(ge=0)
    budget: int = Field(gt=0)
    observed: Observed = Observed()
    request: dict[str, JsonValue] = {}
    response: dict[str, JsonValue] = {}
    rows: int = Field(gt=0)
    array_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    content_sha256: str = ""
    """Digest of the record itself (``equiv.seal``); empty in those of before there was one."""

    @property
    def run(self) -> tuple[str, int, int]:
        """Arm, launch, repeat."""
        return (self.arm, self.launch, self.repeat)


def check(values: NDArray[Any], tokens: int, what: str) -> Floats:
    """Return log-probabilities that may be averaged.

    Raises
    ------
    PplError : another type or number of rows, NaN, infinity, a sentinel, or a positive one.

    """
    if values.dtype != np.float32 or values.ndim != 1:
        raise PplError(f"{what}: {values.dtype} of {values.ndim} dimensions, expected 1 of float32")
    if len(values) != tokens - 1:
        raise PplError(f"{what}: {len(values):,} rows for {tokens:,} tokens, expected one fewer")
    for name, bad in (
        ("NaN or infinite", ~np.isfinite(values)),
        ("a sentinel (minus infinity on the server)", values <= SENTINEL),
        ("above 0", values > MOST),
    ):
        if bad.any():
            row = int(bad.argmax())
            raise PplError(
                f"{what}: {int(bad.sum()):,} rows are {name}, the first at row {row}: {values[row]}"
            )
    return values


class Store:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, text: str, arm: str, launch: int, repeat: int) -> Path:
        safe = re.sub(r"[^\w.-]", "_", text)[:60]
        # Different texts may look the same once they are made safe.
        tag = hashlib.sha256(text.encode()).hexdigest()[:8]
        return self.folder / "scores" / f"{safe}-{tag}" / f"{arm}-{launch}-{repeat}.json"

    def text_folder(self, text: str) -> Path:
        """Return the folder that holds a text's results, for files beside them."""
        return self._path(text, "", 0, 0).parent

    def put(self, values: NDArray[Any], **facts: Any) -> Record:
        """Check and store a result, durably and whole or not at all; facts as of ``Record``."""
        name = f"text {facts['key'].text}, {facts['arm']} launch {facts['launch']}"
        good = check(values, facts["key"].tokens, name)
        data = good.astype("<f4").tobytes()
        digest = hashlib.sha256(data).hexdigest()
        try:
            record = Record(rows=len(good), array_sha256=digest, **facts)
            text = seal.sealed(record.model_dump_json())
            record = Record.model_validate_json(text)
        except ValidationError as e:
            raise PplError(f"{name}: {_first(e)}") from None
        path = self._path(record.key.text, *record.run)
        try:
            write_whole(path.with_name(f"{digest[:32]}.f32"), data)
            write_whole(path, text.encode())
        except OSError as e:
            raise PplError(f"can't write to {self.folder}: {e.strerror}") from None
        return record

    def find(self, key: Key, arm: str, launch: int, repeat: int) -> Record | None:
        """Return the record of a result that may be used again, or None where there is none.

        Raises
        ------
        Stale : what is stored there is the result of something else; the message says of what.

        """
        path = self._path(key.text, arm, launch, repeat)
        if not path.exists():
            return None
        record = _read(path)
        differ = [n for n in Key.model_fields if getattr(record.key, n) != getattr(key, n)]
        if differ:
            n = differ[0]
            raise Stale(
                f"{path.parent.name}/{path.name} is stale: {', '.join(differ)} differ ({n}: stored "
                f"{_short(getattr(record.key, n))}, asked {_short(getattr(key, n))}); "
                "give --out another folder, or delete the file"
            )
        return record

    def values(self, record: Record) -> Floats:
        """Return the array of a record, checked against its digest.

        Raises
        ------
        PplError : missing or damaged.

        """
        path = self._path(record.key.text, *record.run)
        array = path.with_name(f"{record.array_sha256[:32]}.f32")
        try:
            data = array.read_bytes()
        except OSError as e:
            raise PplError(f"can't read {array}: {e.strerror}") from None
        if hashlib.sha256(data).hexdigest() != record.array_sha256:
            raise PplError(f"{array} is damaged: its SHA-256 isn't its record's; score it again")
        values = np.frombuffer(data, dtype="<f4")
        return check(values, record.key.tokens, f"text {record.key.text}, {path.stem}")

    def records(self) -> Iterator[Record]:
        """Yield all records, in the order of their names.

        Raises
        ------
        PplError : one is damaged.

        """
        for path in sorted((self.folder / "scores").glob("*/*-*-*.json")):
            record = _read(path)
            if path != self._path(record.key.text, *record.run):
                raise PplError(f"{path} holds the record of another run; was it copied by hand?")
            yield record


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - of a line


def _first(e: ValidationError) -> str:
    one = e.errors()[0]
    return f"{'.'.join(str(x) for x in one['loc'])}: {one['msg']}"


def _read(path: Path) -> Record:
    try:
        data = path.read_bytes()
        record = Record.model_validate_json(data)
        damage = seal.broken(seal.loads(data))
    except ValidationError as e:
        raise PplError(f"{path} is damaged: {_first(e)}") from None
    except ValueError as e:
        raise PplError(f"{path} is damaged: {e}") from None
    except OSError as e:
        raise PplError(f"can't read {path}: {e.strerror}") from None
    if damage:
        raise PplError(f"{path} is damaged: {damage}")
    return record


Stored = dict[tuple[str, tuple[str, int, int]], tuple[Store, Record]]
"""Results by text and run, each with the store that holds it."""
