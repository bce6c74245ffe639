"""The manifest says what texts there are, and can't contradict itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from texts import fetch, manifest
from texts.cut import LEAST, LONG_LEAST, LONG_MOST, MOST, cut
from texts.errors import TextError


def test_ten_texts_and_a_long_one_need_pip_alone() -> None:
    default = manifest.builtin().default()
    assert sum(not t.long for t in default) == 10
    assert sum(t.long for t in default) == 1


def test_more_texts_bring_another_language() -> None:
    made = manifest.builtin()
    assert {"lzh", "en"} <= {t.language for t in made.text}
    assert len({t.genre for t in made.text}) >= 10


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("version = 1", "version = 2", "version"),
        ('archive = "brotli"', 'archive = "brotly"', "no archive brotly"),
        ('id = "hamlet"', 'id = "alice"', "alice appears twice"),
        ('sha256 = "02b2', 'sha256 = "X2b2', "sha256"),
        ("genre =", "gnere =", "genre"),
        ("[[archive]]", "[[archive", "can't read"),
    ],
)
def test_a_wrong_manifest_is_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = manifest.MANIFEST.read_text(encoding="utf-8")
    path = tmp_path / "manifest.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(TextError, match=says) as e:
        manifest.read(path)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 2


def test_an_unknown_text_names_the_known() -> None:
    with pytest.raises(TextError, match=r"no text 'nope'; expected one of workshop"):
        manifest.builtin().choose(("hamlet", "nope"))


def test_real_texts_reach_their_length_where_they_are_cached() -> None:
    made = manifest.builtin()
    checked = 0
    for text in made.text:
        try:
            whole = fetch.load(made, text)
        except TextError as e:
            assert "bytegate texts fetch" in str(e)  # noqa: PT017 - the only way out
            continue
        least, most = (LONG_LEAST, LONG_MOST) if text.long else (LEAST, MOST)
        assert least <= len(cut(text.id, whole, least=least, most=most).ids) <= most
        assert "Gutenberg" not in whole
        checked += 1
    if not checked:
        pytest.skip("no text is cached here: bytegate texts fetch")
