"""From the runtime's events to a message and its figures."""

from __future__ import annotations

import dataclasses

import pytest

from moa_chat.desktop.stats_panel import figures, generation_speed, new_round, summary
from moa_chat.desktop.streaming_answer import StreamingAnswer
from moa_chat.history.message import Dropped, Message
from moa_chat.strings import link_words
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Statistics,
    TextSpan,
)
from moa_runtime.session.events import Sampling

DRAFTED, OFFLINE, CORRECTED = Origin.DRAFTED, Origin.OFFLINE, Origin.CORRECTED
SAMPLING = Sampling(0.7, 0.9, 5)


def update(*spans: tuple[str, Origin, bool], dropped: str = "", statistics: Statistics | None = None) -> AnswerUpdate:
    cut = tuple(TextSpan(*span) for span in spans)
    committed = "".join(span.text for span in cut if span.committed)
    tentative = "".join(span.text for span in cut if not span.committed)
    return AnswerUpdate(committed, tentative, (), statistics or Statistics(), cut, dropped)


def test_what_was_taken_back_is_kept_with_its_place():
    answering = StreamingAnswer(1, 1, "Question", SAMPLING)
    answering.update(update(("Red and ", CORRECTED, True), ("yellow", OFFLINE, False)))
    answering.update(update(("Red and ", CORRECTED, True), ("blue", CORRECTED, True), dropped="yellow"))
    assert answering.message.dropped == (Dropped(8, "yellow"),)
    assert not answering.message.finished
    # The user keeps the device's version after all.
    answering.update(update(("Red and ", CORRECTED, True), ("yellow", Origin.KEPT, False)))
    assert answering.message.dropped == ()


def test_what_begins_like_what_came_instead_stood_before_it():
    answering = StreamingAnswer(1, 1, "Question", SAMPLING)
    answering.update(update(("However,", CORRECTED, True), (" in", DRAFTED, False)))
    answering.update(update(("However, it's", CORRECTED, True), dropped=" in"))
    assert answering.message.dropped == (Dropped(8, " in"),)
    answering.update(update(("However, it", CORRECTED, True), dropped="never shown"))
    assert answering.message.dropped[-1] == Dropped(11, "never shown")


def test_marks_go_with_the_text_before_them():
    answering = StreamingAnswer(1, 1, "Question", SAMPLING)
    answering.update(update(("Red and ", CORRECTED, True), ("yellow, then blue", OFFLINE, False)))
    answering.update(
        update(("Red and ", CORRECTED, True), ("pink, then ", DRAFTED, False), dropped="yellow, then blue")
    )
    answering.update(update(("Red and pink, then ", CORRECTED, True), ("white", CORRECTED, True), dropped="green"))
    assert [one.offset for one in answering.message.dropped] == [8, 19]
    # The user takes the server's version back: its words were none of this device's.
    taken_back = "pink, then white"
    answering.update(update(("Red and ", CORRECTED, True), ("yellow, th", Origin.KEPT, True), dropped=taken_back))
    assert answering.message.dropped == ()


@pytest.mark.parametrize(
    ("kept", "offline", "says"),
    [
        (0, 4, "partly written offline · corrected by the server"),
        (8, 8, "as this device wrote it, not confirmed"),
        (4, 4, "partly as this device wrote it, not confirmed"),
        (4, 6, "partly as this device wrote it, not confirmed · partly written offline"),
    ],
)
def test_what_was_kept_was_not_corrected(kept, offline, says):
    statistics = Statistics(tokens=8, kept=kept, offline=offline, rolled_back=3)
    assert summary(statistics, FinishReason.STOP) == says


def test_stopping_leaves_what_is_confirmed():
    answering = StreamingAnswer(1, 1, "Question", SAMPLING)
    answering.update(update(("Red ", DRAFTED, True), ("and", CORRECTED, True), (" yellow", DRAFTED, False)))
    answering.stop()
    assert answering.message.content == "Red and"
    assert [span.text for span in answering.message.spans] == ["Red ", "and"]
    assert answering.message.finished and answering.message.figures.startswith("stopped")


def test_the_end_brings_text_and_figures():
    answering = StreamingAnswer(1, 1, "Question", SAMPLING)
    spans = (TextSpan("Red", DRAFTED, True),)
    statistics = Statistics(rounds=4, tokens=10, offline=3, rolled_back=2, seconds=3.0, first_token_seconds=1.0)
    answering.finish(AnswerFinished("Red", (), FinishReason.LENGTH, statistics, spans))
    assert answering.message.content == "Red" and answering.message.spans == spans
    said = "cut off at the length limit · partly written offline · corrected by the server"
    assert answering.message.figures == said
    assert answering.message.cut_off == answering.message.sampling == SAMPLING and answering.message.can_go_on
    answering.finish(AnswerFinished("Red", (), FinishReason.STOP, Statistics(rounds=4, rolled_back=698), spans))
    assert answering.message.figures == "", "what is figures is told behind the plot button alone"
    assert not answering.message.can_go_on


def test_a_continued_answer_keeps_what_is_known_of_its_beginning():
    """The runtime may have forgotten where the stored part came from."""
    stored = Message("assistant", "Red and", (TextSpan("Red", DRAFTED, True), TextSpan(" and", OFFLINE, True)))
    stored = dataclasses.replace(stored, dropped=(Dropped(3, "!"),), figures="cut off", cut_off=SAMPLING)
    answering = StreamingAnswer(1, 1, "Question", SAMPLING, before=stored)
    assert answering.message.content == "Red and" and not answering.message.finished
    answering.update(update(("Red and blue", CORRECTED, True), (" or", DRAFTED, False)))
    assert answering.message.spans == (
        *stored.spans,
        TextSpan(" blue", CORRECTED, True),
        TextSpan(" or", DRAFTED, False),
    )
    assert answering.message.dropped == stored.dropped
    answering.stop()
    assert answering.message.content == "Red and blue" and answering.message.spans[:2] == stored.spans
    assert answering.message.cut_off == SAMPLING
    unchanged = StreamingAnswer(1, 1, "Question", SAMPLING, before=stored)
    unchanged.stop()
    assert unchanged.message == stored


def test_rounds_are_what_lies_between_two_updates():
    before, after = Statistics(rounds=1, tokens=2, round_trips=[0.1]), Statistics(rounds=3, tokens=8)
    after.round_trips = [0.1, 0.2, 0.3]
    seen = new_round(before, after)
    assert seen is not None and (seen.round_trip_s, seen.committed) == (0.3, 3.0)
    assert new_round(after, after) is None


def test_figures_of_nothing_and_of_an_answer():
    assert generation_speed(Statistics()) == 0.0 and summary(Statistics(), None).startswith("stopped")
    statistics = Statistics(rounds=10, tokens=30, kept=5, bytes_up=950, bytes_down=1_234_567, round_trips=[0.07])
    shown = [figure.text for figure in figures(statistics, 0.75)]
    assert "0.0 words a second" in shown and "an answer from the server after 70 ms" in shown
    assert "950 B sent, 1.2 MB received" in shown and "25 pieces of words in 10 passes of the model" in shown
    statistics = Statistics(tokens=9, seconds=3.0, first_token_seconds=1.0, drafted=12, accepted=7)
    shown = [figure.text for figure in figures(statistics, 0.75)]
    assert shown[0] == "3.0 words a second" and "first word after 1.00 s" in shown
    assert "7 of 12 pieces of words drafted by this device were right" in shown


@pytest.mark.parametrize(
    ("link", "retry", "wanted", "slow", "words"),
    [
        (LinkChanged(LinkStatus.ONLINE), None, False, False, "online"),
        (LinkChanged(LinkStatus.ONLINE), None, False, True, "slow"),
        (LinkChanged(LinkStatus.ONLINE, "the verdict is late"), None, False, False, "slow"),
        (LinkChanged(LinkStatus.RECONNECTING), None, False, False, "reconnecting"),
        (LinkChanged(LinkStatus.OFFLINE), 4.6, False, False, "offline, reconnecting in 5 s"),
        (LinkChanged(LinkStatus.OFFLINE), None, False, False, "offline"),
        (LinkChanged(LinkStatus.OFFLINE), None, True, False, "working offline"),
    ],
)
def test_the_link_in_words(link, retry, wanted, slow, words):
    assert link_words(link, retry, wanted_offline=wanted, slow=slow) == words
