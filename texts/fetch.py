"""Fetching built-in texts: archives are fetched, checked, opened, and not kept."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from equiv.files import sha256
from texts import cache, clean, download, index
from texts.errors import DigestError, TextError
from texts.manifest import Archive, Manifest, Text


@dataclass(frozen=True)
class Fetched:
    """What a fetch did: ids that are in the cache now, and ids left out, each with the reason."""

    there: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


def fetch(
    manifest: Manifest,
    chosen: Iterable[Text],
    *,
    without_broken: bool = False,
    report: download.Report = lambda _what, _had, _all: None,
) -> Fetched:
    """Bring texts into the cache.

    Parameters
    ----------
    manifest, chosen : the manifest, and the texts of it that are wanted.
    without_broken : go on without a text that can't be had; otherwise the first one ends it.
    report : told of progress.

    Raises
    ------
    TextError : a text can't be had; the message names it, and what to do.

    """
    wanted = list(chosen)
    reasons: dict[str, str] = {}
    with cache.lock():
        for archive in manifest.archive:
            texts = [t for t in wanted if t.archive == archive.id]
            if not texts or all(_cached(archive, t) for t in texts):
                continue
            try:
                _fetch_archive(manifest, archive, report)
            except TextError as e:
                names = ", ".join(t.id for t in texts)
                place = cache.archive_path(archive)
                message = (
                    f"text {names}: {e}; put {archive.file} at {place} by hand, "
                    "or go on without it: --without-broken"
                )
                if not without_broken:
                    e.args = (message,)
                    raise
                reasons |= {t.id: str(e) for t in texts if not _cached(archive, t)}
    return Fetched(
        tuple(t.id for t in wanted if t.id not in reasons), tuple(sorted(reasons.items()))
    )


def _cached(archive: Archive, text: Text) -> bool:
    """Whether all parts are there and sound; a damaged one is removed, so that it comes anew."""
    whole = True
    for part in text.part:
        try:
            whole = cache.read_part(archive, part) is not None and whole
        except DigestError:
            cache.part_path(archive, part).unlink(missing_ok=True)
            whole = False
    return whole


def obtain(archive: Archive, report: download.Report) -> Path:
    """Return an archive's path in the cache, checked, after fetching it where it isn't there.

    Raises
    ------
    TextError : it can't be had.
    DigestError : it isn't the one that the manifest names.

    """
    path = cache.archive_path(archive)
    if path.exists():
        found = sha256(path)
        if found != archive.sha256:
            raise DigestError(
                f"archive {path}", expected=archive.sha256, found=found, advice="delete it"
            )
    else:
        _download(archive, path, report)
    return path


def _fetch_archive(manifest: Manifest, archive: Archive, report: download.Report) -> None:
    path = obtain(archive, report)
    for text in manifest.text:
        if text.archive == archive.id:
            _extract(archive, text, path)
    path.unlink(missing_ok=True)


def _download(archive: Archive, path: Path, report: download.Report) -> None:
    settings = index.pip_settings()
    tried = index.Tried()
    with download.client(settings) as c:
        if archive.registry == "npm":
            addresses: Iterable[str] = [index.npm_address(archive.project, archive.file)]
        else:
            get = partial(download.page, c)
            addresses = index.find(archive.project, archive.file, settings, get, tried)
        wrong: DigestError | None = None
        for address in addresses:
            try:
                download.archive(c, address, archive, path, report)
            except DigestError as e:
                wrong = wrong or e
            except TextError as e:
                tried.add(address, str(e))
            else:
                return
    if wrong is not None:
        raise wrong
    raise TextError(f"{archive.file} could not be fetched from {tried}")


def _extract(archive: Archive, text: Text, path: Path) -> None:
    for part in text.part:
        try:
            data = _member(path, part.path)
        except (OSError, KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as e:
            raise TextError(f"{archive.file} holds no readable {part.path}: {e}") from None
        found = cache.sha256(data)
        if found != part.sha256:
            raise DigestError(
                f"{part.path} in {archive.file}",
                expected=part.sha256,
                found=found,
                advice="the manifest or the archive is wrong",
            )
        cache.write(cache.part_path(archive, part), data)


def _member(path: Path, name: str) -> bytes:
    if path.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(path) as z:
            return z.read(name)
    with tarfile.open(path) as t:
        f = t.extractfile(name)
        if f is None:
            raise KeyError(name)
        return f.read()


def load(manifest: Manifest, text: Text) -> str:
    """Return a cached text, cleaned, its parts joined by an empty line.

    Raises
    ------
    TextError : it isn't in the cache.
    DigestError : a file, or the cleaned text, isn't the one that the manifest names.

    """
    archive = manifest.archive_of(text)
    parts = []
    for part in text.part:
        data = cache.read_part(archive, part)
        if data is None:
            raise TextError(f"text {text.id} is not in the cache; fetch it: bytegate texts fetch")
        parts.append(clean.clean(data, part, f"text {text.id}, {part.path}"))
    whole = "\n".join(parts)
    found = cache.sha256(whole.encode())
    if found != text.text_sha256:
        raise DigestError(
            f"text {text.id}, cleaned",
            expected=text.text_sha256,
            found=found,
            advice="texts.clean and the manifest disagree",
        )
    return whole
