"""What stands on the screen while an answer is drawn."""

from __future__ import annotations

import io
import random

import pytest

from moa_chat.terminal.renderer import LiveView, PlainView, Span, view_for, wrap
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
    view.draw("The capital ", tentative("of France"), STATUS)
    assert screen.text() == ["The capital of", "France", "online | tau 2.00"]
    assert screen.styled(TENTATIVE) == "of France"
    view.draw("The capital ", tentative("is"), STATUS)
    assert screen.text() == ["The capital is", "online | tau 2.00"]
    assert screen.styled(TENTATIVE) == "is"
    view.draw("The capital is Paris.", [], STATUS)
    assert screen.text() == ["The capital is", "Paris.", "online | tau 2.00"]
    assert screen.styled(TENTATIVE) == ""


def test_finish_leaves_the_committed_text_and_the_cursor_below():
    view, screen = live()
    view.draw("Paris", tentative(" and London and Rome and Berlin"), STATUS)
    assert not screen.cursor_shown
    view.finish("Paris")
    assert screen.text() == ["Paris"]
    assert (screen.row, screen.column) == (1, 0) and screen.cursor_shown and screen.wraps
    view.write(Span("bye", "2"))
    assert screen.text() == ["Paris", "bye"]


def test_an_answer_without_text_leaves_nothing():
    view, screen = live()
    view.draw("", tentative("wrong"), STATUS)
    view.finish("")
    assert screen.text() == [] and screen.row == 0


def test_a_committed_word_moves_with_its_tentative_rest_and_back():
    view, screen = live(columns=11)
    view.draw("one two thr", tentative("eeeee"), [])
    assert screen.text() == ["one two", "threeeee"]
    view.draw("one two thr", [], [])
    assert screen.text() == ["one two", "thr"]
    view.draw("one tw", tentative("wwww"), [])  # does not happen to committed text, but must not break
    view.finish("one two thr")
    assert screen.text()[-1].endswith("thr")


def test_a_tail_longer_than_the_screen_shows_its_end():
    view, screen = live(height=6)
    tail = "\n".join(f"line {number}" for number in range(20))
    view.draw("Start: ", tentative(tail), STATUS)
    assert screen.text() == ["... 16 rows", "line 16", "line 17", "line 18", "line 19", "online | tau 2.00"]
    view.draw("Start: ", tentative("end"), STATUS)
    assert screen.text() == ["Start: end", "online | tau 2.00"]
    assert screen.top == 0


def test_wide_and_combining_characters():
    view, screen = live(columns=10)
    view.draw("青い空と海と", tentative("山e\u0301"), STATUS)
    assert screen.text() == ["青い空と", "海と山e\u0301", "online |"]
    view.finish("青い空と海と")
    assert screen.text() == ["青い空と", "海と"]


def test_an_unfinished_character_is_not_drawn_for_good():
    view, screen = live(columns=4)
    view.draw("abc\ufffd", [], [])
    assert screen.text() == ["abc", "\ufffd"]
    view.draw("abc\U0001f642", [], [])
    view.finish("abc\U0001f642")
    assert screen.text() == ["abc", "\U0001f642"]


def test_escape_sequences_of_the_model_are_shown_not_obeyed():
    view, screen = live(columns=40)
    view.draw("\x1b[2J\x07red", tentative("\x1b[1A"), [])
    assert screen.text() == ["␛[2J␇red␛[1A"]


def test_the_same_frame_is_not_written_twice():
    out = io.StringIO()
    view = LiveView(out, lambda: (20, 5))
    view.draw("a", tentative("b"), STATUS)
    length = len(out.getvalue())
    view.draw("a", tentative("b"), STATUS)
    assert len(out.getvalue()) == length


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_above_the_committed_text_stays(seed):
    """Random growth and rollback on a small screen, other lines before and after."""
    rng = random.Random(seed)
    columns, height = rng.randint(4, 30), rng.randint(3, 9)
    view, screen = live(columns, height)
    usable = columns - 1
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
        expected += [committed[start:end].rstrip() for start, end in wrap(committed, usable)]
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


def test_a_pipe_gets_committed_text_only():
    out = io.StringIO()
    view = view_for(out)
    assert type(view) is PlainView
    view.draw("The capital", tentative(" of"), STATUS)
    view.draw("The capital is é", [], STATUS)
    view.finish("The capital is é.")
    view.write(Span("bye", "2"))
    assert out.getvalue() == "The capital is é.\nbye\n"


def test_a_terminal_without_cursor_movements_gets_plain_text(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert type(view_for(AnsiScreen(20, 5))) is PlainView
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(view_for(AnsiScreen(20, 5)), LiveView)
