"""The command line of the texts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "texts", *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_list(tmp_path: Path) -> None:
    done = run("list", BYTEGATE_CACHE=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.count("not cached") == 14


def test_an_unknown_text_is_one_line_and_exit_2() -> None:
    done = run("fetch", "nope")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_without_an_index(tmp_path: Path) -> None:
    offline = {"BYTEGATE_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = run("fetch", "alice", **offline)
    assert done.returncode == 2
    assert done.stderr.startswith("bytegate: text alice: brotli-1.2.1.tar.gz could not be fetched")
    assert done.stderr.count("\n") == 1
    done = run("fetch", "alice", "--without-broken", **offline)
    assert done.returncode == 0
    assert "alice: LEFT OUT" in done.stdout
    assert "WITHOUT alice" in done.stdout
