"""Origins by words."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_chat.desktop.markdown import whole_dropped, whole_words
from moa_chat.history.message import Dropped
from moa_runtime.events import Origin, TextSpan

D, S, O, K = Origin.DRAFTED, Origin.CORRECTED, Origin.OFFLINE, Origin.KEPT  # noqa: E741
SPANS = st.lists(
    st.builds(TextSpan, st.text("ab c'-色.", min_size=1, max_size=4), st.sampled_from([D, S, O, K]), st.booleans()),
    max_size=8,
)


def pieces(*cut: tuple[str, Origin] | tuple[str, Origin, bool]) -> list[TextSpan]:
    return [TextSpan(one[0], one[1], one[2] if len(one) == 3 else True) for one in cut]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([("The col", D), ("our", S), (" is", D)], [("The ", D), ("colour", S), (" is", D)]),
        ([("a col", S), ("o", O), ("ur", D), (".", D)], [("a ", S), ("colour", O), (".", D)]),
        ([("col", O), ("our", K)], [("colour", K)]),
        ([("col", O), ("our", D, False)], [("colour", D, False)]),
        ([("don", D), ("'t", S), (" go", D)], [("don't", S), (" go", D)]),
        ([("one", D), (" two", S)], [("one", D), (" two", S)]),
        ([("**bo", D), ("ld**", S)], [("**", D), ("bold", S), ("**", S)]),
        ([("颜色", D), ("是", S)], [("颜色", D), ("是", S)]),
        ([("x_", D), ("1+y", S), ("2", D)], [("x_1", S), ("+", S), ("y2", S)]),
        ([("ab", D), ("cd", S)] * 10_000, [("abcd" * 10_000, S)]),  # quadratic work would take minutes
        ([], []),
    ],
)
def test_a_word_has_the_weakest_origin_of_its_parts(tokens, words):
    assert whole_words(pieces(*tokens)) == pieces(*words)


@settings(max_examples=300)
@given(SPANS)
def test_no_text_is_lost_and_no_word_is_divided(spans):
    made = whole_words(spans)
    assert "".join(span.text for span in made) == "".join(span.text for span in spans)
    assert all(span.text for span in made)
    for left, right in pairwise(made):
        same = (left.origin, left.committed) == (right.origin, right.committed)
        assert same or not (left.text[-1] in "abc" and right.text[0] in "abc")
    assert whole_words(made) == made


@pytest.mark.parametrize(
    ("content", "dropped", "shown"),
    [
        ("a boat", Dropped(4, "ld"), Dropped(2, "bold")),
        ("bold", Dropped(4, "er"), Dropped(0, "bolder")),
        ("so it is", Dropped(5, "'s"), Dropped(3, "it's")),
        ("so it is", Dropped(5, "'"), Dropped(5, "'")),
        ("so it", Dropped(9, "self"), Dropped(3, "itself")),
        ("", Dropped(9, "self"), Dropped(0, "self")),
        ("a boat", Dropped(1, " ship"), Dropped(2, "ship")),
        ("a boat.", Dropped(6, " ship"), Dropped(6, " ship")),
        ("a boat", Dropped(2, "ship"), Dropped(2, "ship")),
        ("see that", Dropped(7, " the Earth"), Dropped(4, "tha the Earth")),
    ],
)
def test_a_dropped_text_is_shown_from_the_beginning_of_its_word(content, dropped, shown):
    assert whole_dropped([dropped], content) == [shown]
