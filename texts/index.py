"""Where the package registries are that pip and npm are configured for, and a file's address there.

pip: its environment, then its configuration (a ``[download]`` section before ``[global]``), then
pypi.org. The index is read in its JSON form (PEP 691) or, where it has none, as HTML (PEP 503); a
``file:`` index and ``find-links`` work as they do for pip.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

from texts.errors import TextError

PYPI = "https://pypi.org/simple"
NPM = "https://registry.npmjs.org"
JSON_FORM = "application/vnd.pypi.simple.v1+json"
ACCEPT = f"{JSON_FORM}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
PROBE_S = 30

Get = Callable[[str, dict[str, str]], tuple[str, str, bytes]]
"""Fetch an address with headers: final address, content type, body."""


@dataclass(frozen=True)
class PipSettings:
    """What pip is configured with.

    Attributes
    ----------
    indexes : the index and the extra ones, in pip's order; empty under ``no-index``.
    find_links : folders and pages with files.
    certificate : a file of certificates to trust, or empty.
    proxy : or empty; ``HTTPS_PROXY`` and its kin count without it.

    """

    indexes: tuple[str, ...] = (PYPI,)
    find_links: tuple[str, ...] = ()
    certificate: str = ""
    proxy: str = ""


def pip_settings() -> PipSettings:
    """Ask pip for its configuration; where there is no pip, read its environment."""
    return _pip_settings(_pip_config())


def _pip_config() -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            command, capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _pip_settings(listed: str) -> PipSettings:
    values: dict[tuple[str, str], str] = {}
    for line in listed.splitlines():
        found = re.match(r"(\S+?)\.\.?([\w-]+)=(.*)\Z", line)
        if not found:
            continue
        try:
            value = str(ast.literal_eval(found.group(3)))
        except (ValueError, SyntaxError):
            value = found.group(3)
        values[found.group(1), found.group(2)] = value

    def option(name: str) -> str:
        variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
        if variable is not None:
            return variable
        for section in (":env:", "download", "install", "global"):
            if (section, name) in values:
                return values[section, name]
        return ""

    first = option("index-url") or PYPI
    indexes = (first, *option("extra-index-url").split())
    if option("no-index").lower() in {"1", "true", "yes", "on"}:
        indexes = ()
    return PipSettings(
        indexes, tuple(option("find-links").split()), option("cert"), option("proxy")
    )


def npm_registry() -> str:
    """Return the registry that npm is configured with."""
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(name):
            return os.environ[name].rstrip("/")
    npm = shutil.which("npm")
    if npm:
        try:
            done = subprocess.run(  # noqa: S603 - fixed words
                [npm, "config", "get", "registry"],
                capture_output=True,
                text=True,
                timeout=PROBE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return NPM
        if done.returncode == 0 and done.stdout.startswith(("http://", "https://")):
            return done.stdout.strip().rstrip("/")
    return NPM


def npm_address(project: str, file: str) -> str:
    """Return the address of a package's archive at npm's registry."""
    return f"{npm_registry()}/{project}/-/{file}"


class Tried:
    """Places where a file was looked for, and why it wasn't had there."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def add(self, place: str, why: str) -> None:
        """Note a place; what stands in it before an ``@`` is a password and is left out."""
        self.places.append(f"{shown(place)} ({why})")

    def __str__(self) -> str:
        return "; ".join(self.places) or "nowhere: pip is configured with no index"


def shown(address: str) -> str:
    """Return an address without user name and password."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", address)


def find(project: str, file: str, settings: PipSettings, get: Get, tried: Tried) -> Iterable[str]:
    """Yield addresses of a file, in the order in which pip would look."""
    for place in settings.find_links:
        yield from _in(place, file, get, tried)
    name = re.sub(r"[-_.]+", "-", project).lower()
    for index in settings.indexes:
        yield from _in(f"{index.rstrip('/')}/{name}/", file, get, tried)


def _in(place: str, file: str, get: Get, tried: Tried) -> Iterable[str]:
    path = local_path(place)
    if path is not None:
        page = path if path.is_file() else path / "index.html"
        if page.is_file() and page.suffix in {".html", ".htm"}:
            links = _links(page.as_uri(), "text/html", page.read_bytes())
        else:
            links = {p.name: p.as_uri() for p in path.glob("*")} if path.is_dir() else {}
    else:
        try:
            links = _links(*get(place, {"Accept": ACCEPT}))
        except TextError as e:
            tried.add(place, str(e))
            return
    match = [links[x] for x in links if x.lower() == file.lower()]
    if match:
        yield match[0]
    else:
        tried.add(place, f"no {file} there")


def local_path(place: str) -> Path | None:
    """Return the path of a ``file:`` address or plain path; None for other addresses."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return None if parts.scheme in {"http", "https"} else Path(place).expanduser()


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.found.append(href)
        elif tag == "base" and href:
            self.base = href


def _links(address: str, kind: str, body: bytes) -> dict[str, str]:
    """Return the files that an index page names, and their addresses."""
    if "json" in kind:
        import json

        try:
            files = json.loads(body)["files"]
            return {f["filename"]: urljoin(address, f["url"]) for f in files}
        except (ValueError, KeyError, TypeError) as e:
            raise TextError(f"its JSON isn't an index's: {e!r}") from None
    parser = _Anchors()
    parser.feed(body.decode("utf-8", "replace"))
    base = urljoin(address, parser.base)
    whole = [urljoin(base, x).partition("#")[0] for x in parser.found]
    return {unquote(urlsplit(x).path.rsplit("/", 1)[-1]): x for x in whole}
