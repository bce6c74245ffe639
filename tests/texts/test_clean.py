"""Cleaning: what isn't the text goes, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from texts.clean import clean, decode, strip_gutenberg
from texts.errors import TextError
from texts.manifest import Part

BODY = "It was a dark night.\n" * 200


def part(**facts: Any) -> Part:
    return Part(path="x.txt", sha256="0" * 64, **facts)


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (
            "Title: X\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n",
            "*** END OF THE PROJECT GUTENBERG EBOOK X ***\nlicence\n" * 2,
        ),
        (
            "\n\nThe Project Gutenberg Etext of X\n\n",
            "*End of The Project Gutenberg Etext of X\n",
        ),
        ("legal\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04*END*\n", ""),
        ("", "End of the Project Gutenberg EBook of X\n"),
        ("", ""),
    ],
)
def test_gutenberg_is_stripped(head: str, tail: str) -> None:
    assert strip_gutenberg(head + BODY + tail) == BODY


def test_a_mention_in_the_middle_stays() -> None:
    text = BODY + "*** END OF a chapter\n" + BODY * 4
    assert strip_gutenberg(text) == text


@given(st.text(alphabet="ab \n\r", max_size=50))
def test_line_ends_are_newlines(text: str) -> None:
    made = decode(text.encode(), "x")
    assert "\r" not in made
    assert made.split() == text.split()


def test_marks_of_other_systems_go() -> None:
    assert decode(b"\xef\xbb\xbfone\r\ntwo\r\n\x1a", "x") == "one\ntwo\n"


def test_not_utf8_names_the_byte() -> None:
    with pytest.raises(TextError, match="byte 3 is not UTF-8"):
        decode(b"caf\xe9", "x")


def test_start_end_and_drop() -> None:
    data = b"intro\nBook I\n# page 1\nArms\nBook II\nmore\n"
    assert clean(data, part(start="Book I", end="Book II", drop="#"), "x") == "Book I\nArms\n"
    with pytest.raises(TextError, match="no line begins with 'Book V'"):
        clean(data, part(start="Book V"), "x")


def test_verses_and_chapters() -> None:
    verses = [
        {"book": "Ruth", "chapter": 1, "verse": 1, "text": "Now it came"},
        {"book": "Ruth", "chapter": 2, "verse": 1, "text": "And Naomi"},
    ]
    data = "\n".join(json.dumps(v) for v in verses).encode()
    assert clean(data, part(form="verses"), "x") == (
        "Ruth 1\n\n1 Now it came\n\nRuth 2\n\n1 And Naomi\n"
    )
    data = json.dumps([{"chapter": "I", "paragraphs": ["a", "b"]}]).encode()
    assert clean(data, part(form="chapters"), "x") == "I\na\nb\n"
    with pytest.raises(TextError, match="not of the form 'verses'"):
        clean(b"{}", part(form="verses"), "x")
