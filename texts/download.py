"""One file from an address to the disk: resumed where it was cut off, checked, then renamed."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import stamina

from equiv.files import sha256
from texts.errors import DigestError, TextError
from texts.index import PipSettings, local_path, shown
from texts.manifest import Archive

Report = Callable[[str, int, int], None]
"""Told of progress: what, bytes had, bytes in all."""

TIMEOUT_S = 60.0
ATTEMPTS = 5
BLOCK = 1 << 16
_PARTIAL = 206
_RANGE = 416
_SERVER = 500
_BUSY = 429


class _Again(Exception):
    """Something that a second attempt may mend."""


@contextmanager
def client(settings: PipSettings) -> Iterator[httpx2.Client]:
    """Open a client with the certificates and the proxy that pip has."""
    try:
        verify = ssl.create_default_context(cafile=settings.certificate or None)
    except OSError as e:
        raise TextError(f"pip's certificate file can't be read: {e.strerror}") from None
    with httpx2.Client(
        verify=verify, proxy=settings.proxy or None, follow_redirects=True, timeout=TIMEOUT_S
    ) as c:
        yield c


def page(c: httpx2.Client, address: str, headers: dict[str, str]) -> tuple[str, str, bytes]:
    """Fetch a page: final address, content type, body.

    Raises
    ------
    TextError : it can't be had; the message doesn't repeat the address.

    """
    try:
        for attempt in stamina.retry_context(on=(httpx2.TransportError, _Again), attempts=ATTEMPTS):
            with attempt:
                answer = c.get(address, headers=headers)
                _raise(answer)
                return str(answer.url), answer.headers.get("content-type", ""), answer.content
    except (httpx2.HTTPError, httpx2.InvalidURL, _Again) as e:
        raise TextError(_reason(e)) from None
    raise AssertionError


def archive(c: httpx2.Client, address: str, wanted: Archive, path: Path, report: Report) -> None:
    """Fetch an archive to a path; what an interrupted fetch left is continued.

    Raises
    ------
    DigestError : it isn't the file of the manifest. It is deleted.
    TextError : it can't be had.

    """
    part = path.with_name(f"{path.name}.part")
    continued = part.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        here = local_path(address)
        if here is not None:
            shutil.copyfile(here, part)
        else:
            for attempt in stamina.retry_context(
                on=(httpx2.TransportError, _Again), attempts=ATTEMPTS
            ):
                with attempt:
                    _stream(c, address, part, wanted, report)
        found = sha256(part)
        if found != wanted.sha256:
            part.unlink()
            if continued and here is None:  # what was left may be of another file: once more, whole
                archive(c, address, wanted, path, report)
                return
            raise DigestError(
                f"archive {wanted.file} from {shown(address)}",
                expected=wanted.sha256,
                found=found,
                advice="it was deleted; the source is broken, or not what it says",
            )
        part.replace(path)
    except (httpx2.HTTPError, httpx2.InvalidURL, _Again) as e:
        raise TextError(_reason(e)) from None
    except OSError as e:
        raise TextError(f"can't write {path.name}: {e.strerror}") from None


def _stream(c: httpx2.Client, address: str, part: Path, wanted: Archive, report: Report) -> None:
    had = part.stat().st_size if part.exists() else 0
    if had >= wanted.size_bytes:
        had = 0
    # Encoded bodies would make the offsets of ranges mean something else.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={had}-"} if had else {})
    with c.stream("GET", address, headers=headers) as answer:
        if answer.status_code == _RANGE:
            part.unlink(missing_ok=True)
            raise _Again("the server refused to continue")
        _raise(answer)
        resumed = answer.status_code == _PARTIAL
        had = had if resumed else 0
        with part.open("ab" if resumed else "wb") as f:
            for block in answer.iter_raw(BLOCK):
                f.write(block)
                had += len(block)
                report(wanted.file, had, wanted.size_bytes)
                if had > wanted.size_bytes:
                    break  # another file, or a page: its digest will say so
    if had < wanted.size_bytes and "content-length" not in answer.headers:
        raise _Again(f"it ended after {had:,} of {wanted.size_bytes:,} bytes")


def _raise(answer: httpx2.Response) -> None:
    if answer.status_code >= _SERVER or answer.status_code == _BUSY:
        raise _Again(f"HTTP {answer.status_code}")
    if answer.status_code not in {200, _PARTIAL}:
        raise TextError(f"HTTP {answer.status_code}")


def _reason(e: Exception) -> str:
    return " ".join(shown(str(e)).split()) or type(e).__name__
