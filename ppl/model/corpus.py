"""What the small model is trained on: fetched by digest, prepared, held against what is scored.

``python -m ppl.model.corpus --out FOLDER`` leaves a folder that ``ppl.model.train`` takes, also on
a machine that has neither a network nor the packages that fetching needs::

    SOURCE.bin     a source's documents as UTF-8, a byte 255 after each
    corpus.json    the sources in order, with their bytes, digests and weights
    eval/TEXT.bin  the texts that are scored, as far as evaluation reads; no training reads them
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from equiv.errors import UsageError
from equiv.files import write_whole
from ppl.errors import PplError
from ppl.model.overlap import Passage, shared
from texts import cache, clean, fetch, manifest
from texts.errors import DigestError, TextError

TRAINING = Path(__file__).with_name("training.toml")
SEPARATOR = b"\xff"
"""Follows each document: a byte that UTF-8 never has."""
EVAL_BYTES = 104_000
"""Bytes of a scored text that evaluation may read."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Frozen):
    """Members of one archive, each a document; see ``training.toml``.

    Attributes
    ----------
    include, exclude : patterns of paths inside the archive, as ``PurePath.match`` reads them.
    form : ``"text"``; ``"scripture"``, JSON of books, chapters and verses; ``"strings"``, JSON of
        headings with HTML below them; or ``"play"``, a play to be set in another layout, with tabs.
    skip : chapters of scripture that are left out.
    weight : how often a byte of it is drawn in training, against the others.
    size_bytes, sha256 : of the source prepared.

    """

    id: manifest.Name
    title: str
    genre: str
    language: str
    rights: str
    archive: manifest.Name
    include: tuple[str, ...] = Field(min_length=1)
    exclude: tuple[str, ...] = ()
    form: Literal["text", "scripture", "strings", "play"] = "text"
    skip: tuple[str, ...] = ()
    weight: float = Field(default=1.0, gt=0)
    size_bytes: int = Field(alias="bytes", ge=0)
    sha256: manifest.Digest


class Training(_Frozen):
    """All sources and the archives that hold them."""

    version: Literal[1]
    archive: tuple[manifest.Archive, ...]
    source: tuple[Source, ...]

    @model_validator(mode="after")
    def _whole(self) -> Training:
        known = {a.id for a in self.archive}
        unknown = [s.id for s in self.source if s.archive not in known]
        if unknown:
            raise ValueError(f"source {unknown[0]}: no such archive")
        return self


def read(path: Path = TRAINING) -> Training:
    """Read and check the training manifest.

    Raises
    ------
    PplError : it can't be read, or something in it can't be right.

    """
    try:
        return Training.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise PplError(f"{path.name}: {where}: {first['msg']}") from None
    except (OSError, ValueError) as e:
        raise PplError(f"can't read {path.name}: {e}") from None


# -- from an archive to documents ----------------------------------------------------


def prepare(source: Source, archive: Path) -> bytes:
    """Return a source's documents, each followed by ``SEPARATOR``.

    Raises
    ------
    TextError : the archive has no such members, or they aren't of that form.

    """
    documents = []
    for name, data in _members(source, archive):
        what = f"{source.id}, {name}"
        text = clean.strip_gutenberg(clean.decode(data, what))
        try:
            if source.form == "scripture":
                text = _scripture(json.loads(text), source.skip)
            elif source.form == "strings":
                text = _strings(json.loads(text))
            elif source.form == "play":
                text = _play(text)
        except (ValueError, KeyError, TypeError) as e:
            raise TextError(f"{what}: not of the form {source.form!r}: {e!r}") from None
        documents.append(text.encode() + SEPARATOR)
    if not documents:
        raise TextError(f"source {source.id}: {archive.name} has no such files")
    return b"".join(documents)


def _members(source: Source, archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the chosen members, in the order of their names."""

    def chosen(name: str) -> bool:
        path = PurePosixPath(name)
        return any(map(path.match, source.include)) and not any(map(path.match, source.exclude))

    if archive.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(archive) as z:
            for name in sorted(filter(chosen, z.namelist())):
                yield name, z.read(name)
        return
    with tarfile.open(archive) as t:
        files = {m.name: m for m in t.getmembers() if m.isfile() and chosen(m.name)}
        for name in sorted(files):
            member = t.extractfile(files[name])
            if member is not None:
                yield name, member.read()


def _scripture(found: Any, skip: Sequence[str]) -> str:
    """Return chapters as the scored texts have them: a heading, then numbered verses."""
    chapters = [c for book in found["books"] for c in book["chapters"]]
    return "\n".join(
        f"{c['reference']}\n" + "".join(f"{v['verse']} {v['text']}\n" for v in c["verses"])
        for c in chapters
        if c["reference"] not in skip
    )


def _strings(found: Any, heading: str = "") -> str:
    """Return headings and what stands below them, without markup."""
    if isinstance(found, dict):
        return "".join(_strings(v, "" if k == "text" else k) for k, v in found.items())
    if not isinstance(found, str):
        return ""
    text = re.sub(r"<br\s*/?>|</p>", "\n", found)
    text = re.sub(r"[ \t]*\n\s*", "\n", html.unescape(re.sub(r"<[^>]*>", "", text))).strip()
    return f"{heading}: {text}\n" if heading else f"{text}\n"


def _play(text: str) -> str:
    """Set a play as older electronic editions do: the speaker in capitals, a tab before each line.

    A speech is a paragraph whose first line is a name alone; a person of the list in front is a
    line ``Name, who that is``. Both become ``NAME<tab>...``.
    """
    begins = re.search(r"^(ACT I\b|INDUCTION|PROLOGUE)", text, re.MULTILINE)
    front, rest = (text[: begins.start()], text[begins.start() :]) if begins else ("", text)
    front = re.sub(
        r"^([A-Z][\w' -]{0,30}), +(?=\w)", lambda m: f"{m[1].upper()}\t", front, flags=re.MULTILINE
    )
    set_anew = []
    for paragraph in re.split(r"\n{2,}", rest):
        first, _, lines = paragraph.partition("\n")
        scene = re.fullmatch(r"(SCENE [IVX\d]+)\.? *(.*)", paragraph, re.DOTALL | re.IGNORECASE)
        if scene:
            set_anew.append(f"{scene[1].upper()}\t{scene[2]}".replace("\n", "\n\t"))
        elif lines and re.fullmatch(r"[A-Z0-9][\w '&-]{0,30}\.?", first):
            speech = lines.replace("\n", "\n\t")
            set_anew.append(f"{first.rstrip('.').upper()}\t{speech}")
        elif re.fullmatch(r"ACT [IVX]+\.?", paragraph):
            set_anew.append(f"\n{paragraph.rstrip('.')}\n")
        else:
            set_anew.append("\t" + paragraph.replace("\n", "\n\t"))
    return front + "\n\n".join(set_anew)


# -- the folder ----------------------------------------------------------------------


def default_folder() -> Path:
    """Where the corpus is kept: beside the texts, in the cache."""
    return cache.folder().with_name("training")


def build(out: Path, training: Training, report: Any, *, check: bool = True) -> dict[str, bytes]:
    """Write the corpus to ``out`` and return its sources.

    Raises
    ------
    TextError : a source can't be had.
    DigestError : it isn't the one that was trained on.

    """
    found: dict[str, bytes] = {}
    with cache.lock():
        for archive in training.archive:
            path = fetch.obtain(archive, report)
            for source in training.source:
                if source.archive != archive.id:
                    continue
                data = prepare(source, path)
                digest = cache.sha256(data)
                if check and digest != source.sha256:
                    raise DigestError(
                        f"training source {source.id}, prepared",
                        expected=source.sha256,
                        found=digest,
                        advice="training.toml and ppl.model.corpus disagree",
                    )
                found[source.id] = data
                report(source.id, len(data), len(data))
            path.unlink(missing_ok=True)
    listed = []
    for source in training.source:
        data = found[source.id]
        write_whole(out / f"{source.id}.bin", data)
        listed.append(
            {
                "id": source.id,
                "bytes": len(data),
                "documents": data.count(SEPARATOR),
                "sha256": cache.sha256(data),
                "weight": source.weight,
            }
        )
    write_whole(out / "corpus.json", (json.dumps({"sources": listed}, indent=1) + "\n").encode())
    return found


def scored() -> dict[str, bytes]:
    """Return the cached built-in texts, whole, by id."""
    known = manifest.builtin()
    found = {}
    for text in known.text:
        try:
            found[text.id] = fetch.load(known, text).encode()
        except DigestError:
            raise
        except TextError:
            continue  # not cached: what is missing is said by whoever needs it
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m ppl.model.corpus``."""
    parser = argparse.ArgumentParser(prog="python -m ppl.model.corpus", allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="folder; default: in the cache")
    parser.add_argument("--no-check", action="store_true", help="print digests, don't check them")
    options = parser.parse_args(arguments)
    out = options.out or default_folder()
    try:
        return _main(out, check=not options.no_check)
    except UsageError as e:
        sys.stderr.write(f"bytegate: {e}\n")
        return 2
    except OSError as e:
        sys.stderr.write(f"bytegate: can't write to {out}: {e.strerror}\n")
        return 2


def _main(out: Path, *, check: bool) -> int:
    def report(what: str, had: int, whole: int) -> None:
        if had >= whole:
            sys.stderr.write(f"{what}: {whole / 1e6:.1f} MB\n")

    training = read()
    found = build(out, training, report, check=check)
    for source in training.source:
        data = found[source.id]
        sys.stdout.write(f"{source.id}: {len(data)} bytes, SHA-256 {cache.sha256(data)}\n")
    texts = scored()
    passages: list[Passage] = []
    for name, text in texts.items():
        write_whole(out / "eval" / f"{name}.bin", text[:EVAL_BYTES])
        passages += shared(found, name, text)
    sys.stdout.write(f"{sum(map(len, found.values())):,} bytes in {out}\n")
    for p in passages:
        sys.stdout.write(f"shared with {p.text}: {p.source}, {p.size} bytes: {p.begins!r}\n")
    sys.stdout.write(f"{len(passages)} passages shared with {len(texts)} scored texts\n")
    return 1 if passages else 0


if __name__ == "__main__":
    sys.exit(main())
