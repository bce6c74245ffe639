"""Cutting by tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from texts.cut import cut, ids_sha256, utf8_bytes, wanted_tokens
from texts.errors import TextError


def words(text: str) -> Sequence[int]:
    return [len(w) for w in re.findall(r"\S+|\s+", text)]


@given(st.text(min_size=1), st.integers(1, 500), st.integers(0, 500))
def test_the_length_is_in_bounds_and_repeats(name: str, least: int, more: int) -> None:
    made = wanted_tokens(name, least, least + more)
    assert least <= made <= least + more
    assert made == wanted_tokens(name, least, least + more)


def test_a_cut_is_a_beginning_of_the_whole() -> None:
    text = "a longish sentence of words, that goes on \u00e9t\u00e9. " * 3000
    for tokenizer in (utf8_bytes, words):
        whole = list(tokenizer(text))
        made = cut("x", text, tokenizer, least=2000, most=9000)
        assert list(made.ids) == whole[: len(made.ids)]
        assert 2000 <= len(made.ids) <= 9000


def test_long_tokens_are_read_until_they_suffice() -> None:
    text = ("x" * 99 + " ") * 4000
    assert len(cut("x", text, words, least=5000, most=5000).ids) == 5000


def test_a_text_between_the_bounds_is_taken_whole() -> None:
    name = next(n for n in "abcdefgh" if wanted_tokens(n, 10, 1000) > 500)
    assert len(cut(name, "y" * 500, least=10, most=1000).ids) == 500


def test_a_short_text_says_what_to_do() -> None:
    with pytest.raises(TextError, match=r"text x has 9 tokens, expected at least 30,000; join"):
        cut("x", "y" * 9)
    with pytest.raises(TextError, match="0 < least <= most"):
        cut("x", "y", least=5, most=4)


def test_the_digest_of_ids_is_of_int64() -> None:
    assert ids_sha256([1, 2]) != ids_sha256([2, 1])
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert ids_sha256([]) == empty
