"""Widths, rows, and text that a terminal must not obey."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_chat.strings import excerpt
from moa_chat.terminal.renderer import Span, char_width, clean, clip, cut_spans, text_width, wrap


def rows(text: str, columns: int) -> list[str]:
    return [text[start:end] for start, end in wrap(text, columns)]


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("", 5, [""]),
        ("the quick fox", 9, ["the quick", "fox"]),
        ("the quick fox", 12, ["the quick ", "fox"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("ab abcdefgh", 4, ["ab ", "abcd", "efgh"]),
        ("one\n\ntwo\n", 9, ["one", "", "two", ""]),
        ("青い空と海", 4, ["青い", "空と", "海"]),
        ("a青い", 4, ["a青", "い"]),
        ("e\u0301e\u0301e\u0301", 2, ["e\u0301e\u0301", "e\u0301"]),
        ("b a青", 2, ["b ", "a", "青"]),
        ("    indented", 8, ["    inde", "nted"]),
    ],
)
def test_rows(text, columns, expected):
    assert rows(text, columns) == expected


_TEXTS = st.text(st.sampled_from("ab \n青\u0301"), max_size=40)


@given(_TEXTS, st.integers(2, 9))
def test_rows_fit_and_hold_everything(text, columns):
    spans = wrap(text, columns)
    assert all(text_width(text[start:end]) <= columns for start, end in spans)
    left_out = [text[a_end:b_start] for (_, a_end), (b_start, _) in pairwise(spans)]
    assert spans[0][0] == 0 and spans[-1][1] == len(text)
    assert set(left_out) <= {"", " ", "\n"}


@given(_TEXTS, _TEXTS, st.integers(2, 9))
def test_more_text_only_changes_the_last_row(text, more, columns):
    before, after = wrap(text, columns), wrap(text + more, columns)
    assert after[: len(before) - 1] == before[:-1]
    assert after[len(before) - 1][0] == before[-1][0]


def test_widths():
    assert [char_width(char) for char in "a青\u0301\u200d🙂"] == [1, 2, 0, 0, 2]


def test_control_characters_become_visible():
    assert clean("a\tb\r\n\x1b[31m\x07\x9b\u202e") == "a    b\n␛[31m␇\ufffd\ufffd"


def test_spans_are_cut_where_the_text_is():
    spans = [Span("abc"), Span("def", "2")]
    assert cut_spans(spans, 2, 5) == [Span("c"), Span("de", "2")]
    assert clip([Span("青い"), Span("空", "2")], 5) == [Span("青い")]


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("one two\nthree", 13, "one two three"),
        ("one two\nthree", 12, "one two…"),
        ("one two\nthree", 7, "one two…"),
        ("one two\nthree", 6, "one…"),
        ("unbreakable", 4, "unbr…"),
    ],
)
def test_an_excerpt_ends_with_a_whole_word(text, most, expected):
    assert excerpt(text, most) == expected
