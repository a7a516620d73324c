"""The screen while an answer is drawn."""

from __future__ import annotations

import io
import random

import pytest

from moa_chat.terminal.renderer import LiveView, PlainView, Span, clean, view_for, wrap
from support.chat.ansi_screen import AnsiScreen

STATUS = [Span("online", "32"), Span(" | tau 2.00", "2")]
TENTATIVE = "2;3"


def live(columns=21, height=8):
    """A view of ``columns - 1`` usable columns, and its screen."""
    screen = AnsiScreen(columns, height)
    return LiveView(screen, lambda: (screen.columns, screen.height)), screen


def tentative(text):
    return [Span(text, TENTATIVE)]


def test_tentative_text_is_replaced_in_place():
    view, screen = live()
    for committed, tail, rows in (
        ("\x1b[2JA", "\x1b[1A", ["␛[2JA␛[1A"]),  # escape sequences of the model are not obeyed
        ("The capital ", "of France", ["The capital of", "France"]),
        ("The capital ", "is", ["The capital is"]),
        ("The capital is Paris.", "", ["The capital is", "Paris."]),
    ):
        view.draw(committed, tentative(tail), STATUS)
        assert screen.text() == [*rows, "online | tau 2.00"] and screen.styled(TENTATIVE) == clean(tail)


def test_reasoning_has_a_style_of_its_own():
    view, screen = live()
    view.reasoning_style = "2"
    for committed in ("<think>Two and two", "<think>Two and two are four.</think> 4"):
        view.draw(committed, [], [])
    assert screen.styled("2") == "<think>Two and two are four.</think>" and screen.text()[-1].endswith(" 4")


def test_finish_leaves_the_committed_text_and_the_cursor_below():
    view, screen = live()
    view.draw("", tentative("wrong"), STATUS)
    view.finish("")
    assert screen.text() == [] and screen.row == 0, "an answer without text leaves nothing"
    view.draw("Paris", tentative(" and London and Rome and Berlin"), STATUS)
    assert not screen.cursor_shown
    view.finish("Paris")
    assert screen.text() == ["Paris"]
    assert (screen.row, screen.column) == (1, 0) and screen.cursor_shown and screen.wraps
    view.write(Span("bye", "2"))
    assert screen.text() == ["Paris", "bye"]


def test_a_tail_longer_than_the_screen_shows_its_end():
    view, screen = live(height=6)
    view.draw("Start: ", tentative("\n".join(f"line {number}" for number in range(20))), STATUS)
    assert screen.text() == ["... 16 rows", "line 16", "line 17", "line 18", "line 19", "online | tau 2.00"]
    view.draw("Start: ", tentative("end"), STATUS)
    assert screen.text() == ["Start: end", "online | tau 2.00"] and screen.top == 0


def test_an_unfinished_character_is_not_drawn_for_good():
    view, screen = live(columns=4)
    view.draw("abc\ufffd", [], [])
    assert screen.text() == ["abc", "\ufffd"]
    view.draw("abc\U0001f642", [], [])
    view.finish("abc\U0001f642")
    assert screen.text() == ["abc", "\U0001f642"]


def test_the_same_frame_is_not_written_twice():
    out = io.StringIO()
    view = LiveView(out, lambda: (20, 5))
    view.draw("a", tentative("b"), STATUS)
    length = len(out.getvalue())
    view.draw("a", tentative("b"), STATUS)
    assert len(out.getvalue()) == length


@pytest.mark.parametrize("seed", range(20))
def test_text_above_an_answer_and_its_committed_text_stay(seed):
    """Random growth and rollback on a small screen, other lines before and after."""
    rng = random.Random(seed)
    columns, height = rng.randint(4, 30), rng.randint(3, 9)
    view, screen = live(columns, height)
    expected = []
    for answer in range(2):
        view.write(Span("Q"))
        expected.append("Q")
        committed = ""
        for _ in range(40):
            committed += "".join(rng.choice("ab  c\n青é") for _ in range(rng.randint(0, 6)))
            tail = "".join(rng.choice("xy  z\n空") for _ in range(rng.choice([0, 3, 20, 200])))
            view.draw(committed, tentative(tail), STATUS)
            assert screen.text()[: len(expected)] == expected, answer
        view.finish(committed)
        expected += [committed[start:end].rstrip() for start, end in wrap(committed, columns - 1)]
        seen = screen.text()
        assert seen + [""] * (len(expected) - len(seen)) == expected


def test_a_narrower_window_loses_no_row():
    view, screen = live(columns=41, height=10)
    view.write(Span("before"))
    view.draw("", tentative("x" * 35), STATUS)
    # A terminal that breaks long rows when it gets narrower: 35 columns become two rows.
    screen.columns = 21
    screen.rows[1:3] = [screen.rows[1][:21], screen.rows[1][21:], screen.rows[2]]
    screen.row = 3
    view.draw("", tentative("x" * 35), STATUS)
    assert screen.text() == ["before", "x" * 20, "x" * 15, "online | tau 2.00"]


def test_a_pipe_or_a_terminal_without_cursor_movements_gets_committed_text_only(monkeypatch):
    out = io.StringIO()
    view = view_for(out)
    view.draw("The capital", tentative(" of"), STATUS)
    view.draw("The capital is é", [], STATUS)
    view.finish("The capital is é.")
    view.write(Span("bye", "2"))
    assert type(view) is PlainView and out.getvalue() == "The capital is é.\nbye\n"
    for terminal, kind in (("dumb", PlainView), ("xterm", LiveView)):
        monkeypatch.setenv("TERM", terminal)
        assert type(view_for(AnsiScreen(20, 5))) is kind
