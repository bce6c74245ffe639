"""Where a text may come from besides the manifest: files, folders, Hugging Face data sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from texts import cache, clean, fetch
from texts.errors import TextError
from texts.manifest import Manifest, builtin

SCHEME = "hf://"
SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")
"""Files that are read of a folder; a file that is named is read whatever it is called."""
OPTIONS = ("config", "split", "column", "revision", "data_files", "take", "skip", "characters")

TELLING = ("config", "column", "revision", "data_files", "characters")
"""Options that choose other rows under the same split and number: a digest of them ends the id."""


@dataclass(frozen=True)
class Document:
    """A text and where it is from; ``sha256`` is of the text as UTF-8."""

    id: str
    title: str
    source: str
    text: str
    sha256: str
    long: bool = False


def documents(specs: Iterable[str], manifest: Manifest | None = None) -> Iterator[Document]:
    """Yield the texts that specifications name.

    Parameters
    ----------
    specs : each an id of the manifest, a file, a folder, or
        ``hf://NAME?split=test&column=text&take=3``; further options are ``config``, ``revision``,
        ``data_files``, ``skip``, and ``characters``, the least a document must have.

    Raises
    ------
    TextError : one can't be read, or two have the same id.

    """
    known = manifest or builtin()
    seen: dict[str, str] = {}
    for spec in specs:
        for document in _documents(spec, known):
            if document.id in seen:
                what = "leave one of them out" if spec == seen[document.id] else "rename one"
                raise TextError(
                    f"two texts are called {document.id!r}, of {seen[document.id]} and of {spec}: "
                    f"{what}"
                )
            seen[document.id] = spec
            yield document


def _documents(spec: str, manifest: Manifest) -> Iterator[Document]:
    if spec.startswith(SCHEME):
        yield from _data_set(spec)
        return
    for text in manifest.text:
        if text.id == spec:
            whole = fetch.load(manifest, text)
            yield Document(spec, text.title, "manifest", whole, text.text_sha256, text.long)
            return
    path = Path(spec).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise TextError(f"folder {spec} has no file of {', '.join(SUFFIXES)}")
        for file in files:
            yield _file(file, file.relative_to(path).as_posix())
    elif path.is_file():
        yield _file(path, path.name)
    else:
        raise TextError(f"{spec!r}: expected a text's id, a file, a folder or {SCHEME}NAME")


def _file(path: Path, name: str) -> Document:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise TextError(f"can't read {path}: {e.strerror}") from None
    text = clean.strip_gutenberg(clean.decode(data, name))
    return Document(name, name, "file", text, cache.sha256(text.encode()))


def _data_set(spec: str) -> Iterator[Document]:
    name, _, query = spec.removeprefix(SCHEME).partition("?")
    given = {k: v[-1] for k, v in parse_qs(query, keep_blank_values=True).items()}
    unknown = sorted(set(given) - set(OPTIONS))
    if not name:
        raise TextError(f"{spec}: no data set is named; expected {SCHEME}NAME?split=test&take=3")
    if unknown:
        raise TextError(f"{spec}: unknown option {unknown}; expected {', '.join(OPTIONS)}")
    take, skip, characters = (
        _number(spec, given, key, default)
        for key, default in (("take", 1), ("skip", 0), ("characters", 1))
    )
    column = given.get("column", "text")
    rows = (
        r for r in _stream(spec, unquote(name), given) if len(_cell(spec, r, column)) >= characters
    )
    found = 0
    try:
        for i, row in enumerate(itertools.islice(rows, skip, skip + take)):
            found += 1
            text = _cell(spec, row, column)
            place = f"{name}-{given.get('split', 'train')}-{skip + i}{_tag(given)}"
            yield Document(place, place, spec, text, cache.sha256(text.encode()))
    except TextError:
        raise
    except Exception as e:  # noqa: BLE001 - a builder is anyone's code
        words = " ".join(str(e).split())[:200]
        raise TextError(f"{spec}: {type(e).__name__}: {words}") from None
    if found < take:
        raise TextError(f"{spec}: {found} documents of {characters:,} characters, expected {take}")


def _tag(given: dict[str, str]) -> str:
    """Return what tells rows apart that a name, split and number don't; empty where they do."""
    told = [f"{k}={given[k]}" for k in TELLING if k in given]
    return f"-{cache.sha256(chr(0).join(told).encode())[:8]}" if told else ""


def _number(spec: str, given: dict[str, str], key: str, default: int) -> int:
    value = given.get(key, str(default))
    if not value.isdecimal():
        raise TextError(f"{spec}: {key}={value!r}: expected a number")
    return int(value)


def _cell(spec: str, row: dict[str, Any], column: str) -> str:
    if column in row and row[column] is None:
        return ""  # a null, as data sets have them: a document of no characters
    if not isinstance(row.get(column), str):
        raise TextError(f"{spec}: no text in column {column!r}; columns are {', '.join(row)}")
    return str(row[column])


def _stream(spec: str, name: str, given: dict[str, str]) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise TextError(f"{spec} needs datasets: pip install 'bytegate[datasets]'") from None
    try:
        made: Iterable[dict[str, Any]] = datasets.load_dataset(
            name,
            given.get("config"),
            split=given.get("split", "train"),
            revision=given.get("revision"),
            data_files=given.get("data_files"),
            streaming=True,
        )
    except Exception as e:  # noqa: BLE001 - a builder is anyone's code
        words = " ".join(str(e).split())[:200]
        raise TextError(f"{spec}: {type(e).__name__}: {words}") from None
    return made
