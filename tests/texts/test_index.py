"""Finding a file where pip looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from texts import index
from texts.errors import TextError

FILE = "thing-1.0.tar.gz"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CERT", "PROXY"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)


def no_pages(_address: str, _headers: dict[str, str]) -> tuple[str, str, bytes]:
    raise TextError("HTTP 404")


def test_pip_without_configuration_asks_pypi() -> None:
    assert index._pip_settings("") == index.PipSettings()
    assert index.PipSettings().indexes == (index.PYPI,)


def test_pip_configuration_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (
        "global.index-url='https://mirror.example/simple'\n"
        "global.extra-index-url='https://a.example/s file:///srv/s'\n"
        "download.cert='/etc/cert.pem'\n"
        "global.find-links='/srv/wheels'\n"
    )
    made = index._pip_settings(listed)
    assert made.indexes == ("https://mirror.example/simple", "https://a.example/s", "file:///srv/s")
    assert made.find_links == ("/srv/wheels",)
    assert made.certificate == "/etc/cert.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "https://b.example/simple/")
    assert index._pip_settings(listed).indexes[0] == "https://b.example/simple/"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert index._pip_settings(listed).indexes == ()
    assert index._pip_settings(":env:.index-url='https://c.example'\n").indexes == ()


def test_json_and_html_indexes() -> None:
    body = json.dumps({"files": [{"filename": FILE, "url": "../../f/Thing-1.0.tar.gz"}]})
    asked = []

    def get(address: str, headers: dict[str, str]) -> tuple[str, str, bytes]:
        asked.append(address)
        assert headers["Accept"].startswith(index.JSON_FORM)
        if "json" in address:
            return address, index.JSON_FORM, body.encode()
        page = f'<a href="/p/{FILE}#sha256=00">x</a><a>no</a>'
        return address, "text/html; charset=utf-8", page.encode()

    settings = index.PipSettings(("https://json.example/simple", "https://html.example/simple/"))
    found = list(index.find("Th_ing", FILE, settings, get, index.Tried()))
    assert asked == ["https://json.example/simple/th-ing/", "https://html.example/simple/th-ing/"]
    assert found == ["https://json.example/f/Thing-1.0.tar.gz", f"https://html.example/p/{FILE}"]


def test_local_indexes_and_folders(tmp_path: Path) -> None:
    (tmp_path / "simple" / "thing").mkdir(parents=True)
    (tmp_path / FILE).write_bytes(b"")
    page = tmp_path / "simple" / "thing" / "index.html"
    page.write_text(f'<a href="../../{FILE}">x</a>', encoding="utf-8")
    settings = index.PipSettings(((tmp_path / "simple").as_uri(),), (str(tmp_path),))
    tried = index.Tried()
    found = list(index.find("thing", FILE, settings, no_pages, tried))
    assert found == [(tmp_path / FILE).as_uri()] * 2


def test_a_miss_names_the_places_without_passwords() -> None:
    settings = index.PipSettings(("https://user:secret@mirror.example/simple",), ("/nowhere",))
    tried = index.Tried()
    assert list(index.find("thing", FILE, settings, no_pages, tried)) == []
    assert str(tried) == (
        f"/nowhere (no {FILE} there); https://mirror.example/simple/thing/ (HTTP 404)"
    )


def test_npm_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "https://npm.example/")
    assert index.npm_address("@a/b", "b-1.tgz") == "https://npm.example/@a/b/-/b-1.tgz"
