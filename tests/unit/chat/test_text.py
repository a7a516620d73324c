"""Text in a terminal and in a file: widths, rows, excerpts, and characters that a terminal must not obey."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_chat.strings import excerpt, model_words
from moa_chat.terminal.renderer import Span, char_width, clean, clip, cut_spans, text_width, wrap
from moa_chat.transcript import as_json, as_markdown


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
def test_text_is_cut_into_rows(text, columns, expected):
    assert [text[start:end] for start, end in wrap(text, columns)] == expected


_TEXTS = st.text(st.sampled_from("ab \n青\u0301"), max_size=40)


@given(_TEXTS, _TEXTS, st.integers(2, 9))
def test_rows_fit_hold_everything_and_stay_when_text_is_added(text, more, columns):
    rows, after = wrap(text, columns), wrap(text + more, columns)
    assert all(text_width(text[start:end]) <= columns for start, end in rows)
    left_out = [text[a_end:b_start] for (_, a_end), (b_start, _) in pairwise(rows)]
    assert rows[0][0] == 0 and rows[-1][1] == len(text) and set(left_out) <= {"", " ", "\n"}
    assert after[: len(rows) - 1] == rows[:-1] and after[len(rows) - 1][0] == rows[-1][0]


def test_characters_have_a_width_and_none_moves_the_cursor():
    assert [char_width(char) for char in "a青\u0301\u200d🙂"] == [1, 2, 0, 0, 2]
    assert clean("a\tb\r\n\x1b[31m\x07\x9b\u202e") == "a    b\n␛[31m␇\ufffd\ufffd"


def test_spans_are_cut_with_their_text():
    spans = [Span("abc"), Span("def", "2")]
    assert cut_spans(spans, 2, 5) == [Span("c"), Span("de", "2")]
    assert clip([Span("青い"), Span("空", "2")], 5) == [Span("青い"), Span("…")]
    assert clip([Span("青い")], 4) == [Span("青い")]


@pytest.mark.parametrize(
    ("most", "expected"), [(13, "one two three"), (12, "one two…"), (7, "one two…"), (6, "one…"), (2, "on…")]
)
def test_an_excerpt_ends_with_a_whole_word(most, expected):
    assert excerpt("one two\nthree", most) == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [(0, "a"), (134_515_008, "a (135M parameters)"), (1_711_376_384, "a (1.7B parameters)")],
)
def test_a_model_has_its_size_beside_its_name(parameters, expected):
    assert model_words("a", parameters) == expected


def test_a_saved_conversation_keeps_its_content():
    code = "**Ocker**, häufig 🎨:\n\n```python\nx = 1\n```"
    turns = [{"role": "user", "content": "A colour?\n"}, {"role": "tool", "content": code, "origin": "drafted"}]
    assert (
        as_markdown("Colours\nand more", turns) == f"# Colours and more\n\n## You\n\nA colour?\n\n## Tool\n\n{code}\n"
    )
    text = as_json("Colours", turns)
    assert json.loads(text) == {"title": "Colours", "messages": [turns[0], {"role": "tool", "content": code}]}
    assert "häufig 🎨" in text
