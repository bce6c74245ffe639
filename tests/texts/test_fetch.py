"""Fetching: checked, resumed, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import stamina

from texts import cache, download, fetch, index
from texts.errors import DigestError, TextError
from texts.manifest import Archive, Manifest, Part, Text

BODY = b"All the world's a stage.\n" * 4000


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packed(name: str, data: bytes, kind: str) -> bytes:
    made = io.BytesIO()
    if kind == "whl":
        with zipfile.ZipFile(made, "w") as z:
            z.writestr(name, data)
    else:
        with tarfile.open(fileobj=made, mode="w:gz") as t:
            facts = tarfile.TarInfo(name)
            facts.size = len(data)
            t.addfile(facts, io.BytesIO(data))
    return made.getvalue()


def manifest_of(archive: bytes, file: str, part_sha: str = "", text_sha: str = "") -> Manifest:
    part = Part(path="a/b.txt", sha256=part_sha or sha(BODY))
    facts = dict.fromkeys(("title", "author", "language", "genre", "rights"), "x")
    text = Text(
        id="t", year=1, archive="a", text_sha256=text_sha or sha(BODY), part=(part,), **facts
    )
    made = Archive(
        id="a",
        registry="pypi",
        project="p",
        version="1",
        file=file,
        size_bytes=len(archive),
        sha256=sha(archive),
    )
    return Manifest(version=1, archive=(made,), text=(text,))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have pip look in one folder, and the cache lie in another."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("BYTEGATE_CACHE", str(tmp_path / "cache"))
    settings = index.PipSettings((), (str(links),))
    monkeypatch.setattr(index, "pip_settings", lambda: settings)
    return links


@pytest.mark.parametrize("file", ["p-1.tar.gz", "p-1.whl"])
def test_a_text_is_fetched_checked_and_cached(place: Path, file: str) -> None:
    data = packed("a/b.txt", BODY, file[-3:])
    (place / file).write_bytes(data)
    made = manifest_of(data, file)
    with pytest.raises(TextError, match="text t is not in the cache; fetch it"):
        fetch.load(made, made.text[0])
    assert fetch.fetch(made, made.text).there == ("t",)
    assert fetch.load(made, made.text[0]) == BODY.decode()
    assert not cache.archive_path(made.archive[0]).exists()
    (place / file).unlink()
    assert fetch.fetch(made, made.text).there == ("t",)


def test_a_wrong_archive_names_both_digests_and_is_deleted(place: Path, tmp_path: Path) -> None:
    data = packed("a/b.txt", BODY, "tgz")
    made = manifest_of(data, "p.tgz")
    (place / "p.tgz").write_bytes(b"other")
    with pytest.raises(DigestError) as e:
        fetch.fetch(made, made.text)
    message = str(e.value)
    assert sha(data) in message
    assert sha(b"other") in message
    assert message.startswith("text t: ")
    assert "--without-broken" in message
    assert "\n" not in message
    assert [p.name for p in (tmp_path / "cache").rglob("p.tgz*")] == []


def test_a_wrong_file_in_a_right_archive(place: Path) -> None:
    data = packed("a/b.txt", BODY, "tgz")
    (place / "p.tgz").write_bytes(data)
    made = manifest_of(data, "p.tgz", part_sha="1" * 64)
    with pytest.raises(DigestError, match=f"expected SHA-256 {'1' * 64}, found {sha(BODY)}"):
        fetch.fetch(made, made.text)


def test_a_cached_file_that_changed_is_named_and_then_mended(place: Path) -> None:
    data = packed("a/b.txt", BODY, "tgz")
    (place / "p.tgz").write_bytes(data)
    made = manifest_of(data, "p.tgz")
    fetch.fetch(made, made.text)
    path = cache.part_path(made.archive[0], made.text[0].part[0])
    path.write_bytes(BODY + b"x")
    with pytest.raises(DigestError, match="delete it and fetch again"):
        fetch.load(made, made.text[0])
    fetch.fetch(made, made.text)
    assert fetch.load(made, made.text[0]) == BODY.decode()


def test_going_on_without_a_broken_text_is_asked_for_and_said() -> None:
    made = manifest_of(b"data", "p.tgz")
    with pytest.raises(TextError, match=r"text t: p\.tgz could not be fetched from"):
        fetch.fetch(made, made.text)
    done = fetch.fetch(made, made.text, without_broken=True)
    assert done.there == ()
    assert done.left_out[0][0] == "t"
    assert "could not be fetched" in done.left_out[0][1]


def test_an_archive_put_there_by_hand() -> None:
    data = packed("a/b.txt", BODY, "tgz")
    made = manifest_of(data, "p.tgz")
    path = cache.archive_path(made.archive[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert fetch.fetch(made, made.text).there == ("t",)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("BYTEGATE_CACHE", str(tmp_path / "file"))
    made = manifest_of(b"data", "p.tgz")
    with pytest.raises(TextError, match="set BYTEGATE_CACHE to a folder"):
        fetch.fetch(made, made.text)


class Server:
    """A server that breaks off, once, and can continue."""

    def __init__(self, data: bytes, *, ranges: bool, fails: int = 1) -> None:
        self.data, self.ranges, self.fails = data, ranges, fails
        self.served: list[str] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        wanted = request.headers.get("range", "")
        self.served.append(wanted)
        start = int(wanted[6:-1]) if wanted and self.ranges else 0
        body = self.data[start:]
        if self.fails:
            self.fails -= 1
            return httpx2.Response(
                206 if start else 200, stream=Stream(body[: len(body) // 2], breaks=True)
            )
        return httpx2.Response(206 if start else 200, stream=Stream(body))


class Stream(httpx2.SyncByteStream):
    def __init__(self, data: bytes, *, breaks: bool = False) -> None:
        self.data, self.breaks = data, breaks

    def __iter__(self) -> Iterator[bytes]:
        yield self.data
        if self.breaks:
            raise httpx2.ReadError("connection lost")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_fetch_that_breaks_off_goes_on(tmp_path: Path, ranges: bool) -> None:  # noqa: FBT001
    data = bytes(range(256)) * 2000
    wanted = manifest_of(data, "p.tgz").archive[0]
    server = Server(data, ranges=ranges)
    heard: list[int] = []
    transport = httpx2.MockTransport(server)
    with stamina.set_testing(True, attempts=3), httpx2.Client(transport=transport) as c:
        download.archive(
            c, "https://x.example/p", wanted, tmp_path / "p.tgz", lambda *x: heard.append(x[1])
        )
    assert (tmp_path / "p.tgz").read_bytes() == data
    assert server.served == ["", f"bytes={len(data) // 2 // download.BLOCK * download.BLOCK}-"]
    assert heard[-1] == len(data)


@pytest.mark.parametrize("status", [404, 503])
def test_a_refusal_names_its_status(tmp_path: Path, status: int) -> None:
    wanted = manifest_of(b"data", "p.tgz").archive[0]
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status))
    with (
        stamina.set_testing(True, attempts=2),
        httpx2.Client(transport=transport) as c,
        pytest.raises(TextError, match=f"HTTP {status}"),
    ):
        download.archive(c, "https://x.example/p", wanted, tmp_path / "p", lambda *_: None)


def test_rubble_of_another_file_is_fetched_over(tmp_path: Path) -> None:
    data = bytes(range(256)) * 2000
    wanted = manifest_of(data, "p.tgz").archive[0]
    (tmp_path / "p.tgz.part").write_bytes(b"rubble")
    server = Server(data, ranges=True, fails=0)
    with httpx2.Client(transport=httpx2.MockTransport(server)) as c:
        download.archive(c, "https://x.example/p", wanted, tmp_path / "p.tgz", lambda *_: None)
    assert (tmp_path / "p.tgz").read_bytes() == data
    assert server.served == ["bytes=6-", ""]
