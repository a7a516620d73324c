"""From the runtime's events to a message and its figures."""

from __future__ import annotations

import dataclasses

import pytest

from moa_chat import strings
from moa_chat.desktop.stats_panel import Round, figures, new_round, summary
from moa_chat.desktop.streaming_answer import StreamingAnswer
from moa_chat.history.message import Dropped, Message
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Statistics,
    TextSpan,
    WholeAnswer,
)
from moa_runtime.session.events import Sampling

DRAFTED, OFFLINE, CORRECTED, KEPT = Origin.DRAFTED, Origin.OFFLINE, Origin.CORRECTED, Origin.KEPT
SAMPLING = Sampling(0.7, 0.9, 5)


@pytest.fixture
def answering() -> StreamingAnswer:
    return StreamingAnswer(1, 1, "Question", SAMPLING)


def update(*spans: tuple[str, Origin, bool], dropped: str = "") -> AnswerUpdate:
    cut = tuple(TextSpan(*span) for span in spans)
    return AnswerUpdate.of(WholeAnswer(spans=cut), dropped)


BEGUN = ("Red and ", CORRECTED, True)


@pytest.mark.parametrize(
    ("updates", "marks"),
    [
        ([update(BEGUN, ("blue", CORRECTED, True), dropped="yellow")], [Dropped(8, "yellow")]),
        # The user keeps the device's version after all.
        ([update(BEGUN, ("blue", CORRECTED, True), dropped="yellow"), update(BEGUN, ("yellow", KEPT, False))], []),
        # Marks go with the text before them; text of the server that the user replaces is no text of the device.
        (
            [
                update(BEGUN, ("pink, then ", DRAFTED, False), dropped="yellow"),
                update(("Red and pink, then ", CORRECTED, True), ("white", CORRECTED, True), dropped="green"),
            ],
            [Dropped(8, "yellow"), Dropped(19, "green")],
        ),
        (
            [
                update(BEGUN, ("pink, then ", DRAFTED, False), dropped="yellow"),
                update(BEGUN, ("yellow, th", KEPT, True), dropped="pink, then white"),
            ],
            [],
        ),
        # What begins like the text that came instead stood before it.
        ([update(("Red and yells", CORRECTED, True), dropped="yellow")], [Dropped(8, "yellow")]),
        ([update(("Red an", CORRECTED, True), dropped="never shown")], [Dropped(6, "never shown")]),
    ],
)
def test_text_that_was_taken_back_is_marked_at_its_place(answering, updates, marks):
    answering.update(update(BEGUN, ("yellow", OFFLINE, False)))
    for event in updates:
        answering.update(event)
    assert list(answering.message.dropped) == marks and not answering.message.finished


@pytest.mark.parametrize(
    ("kept", "offline", "says"),
    [
        (0, 4, [strings.PARTLY_OFFLINE, strings.CORRECTED]),
        (8, 8, [strings.AS_WRITTEN]),
        (4, 4, [strings.PARTLY_AS_WRITTEN]),
        (4, 6, [strings.PARTLY_AS_WRITTEN, strings.PARTLY_OFFLINE]),
    ],
)
def test_kept_text_is_not_called_corrected(kept, offline, says):
    statistics = Statistics(tokens=8, kept=kept, offline=offline, rolled_back=3)
    spans = [TextSpan("red", KEPT, True)] * kept + [TextSpan("blue", OFFLINE, True)] * (offline - kept)
    assert summary(statistics, FinishReason.STOP, spans) == " · ".join(says)
    assert strings.PARTLY_OFFLINE not in summary(statistics, FinishReason.STOP, [TextSpan("blue", CORRECTED, True)])
    assert strings.PARTLY_OFFLINE not in summary(statistics, FinishReason.STOP, [TextSpan("\n", Origin.OFFLINE, True)])
    assert summary(Statistics(dropped_turns=4), FinishReason.STOP, []) == strings.WITHOUT_OLDEST.format(4)


def test_a_stopped_answer_keeps_its_confirmed_text(answering):
    answering.update(update(("Red ", DRAFTED, True), ("and", CORRECTED, True), (" yellow", DRAFTED, False)))
    answering.stop()
    assert answering.message.content == "Red and" and answering.message.finished
    assert [span.text for span in answering.message.spans] == ["Red ", "and"]
    assert answering.message.figures.startswith(strings.STOPPED)


def test_a_finished_answer_has_text_and_figures(answering):
    spans = (TextSpan("Red", DRAFTED, True),)
    statistics = Statistics(rounds=4, tokens=10, offline=3, rolled_back=2, seconds=3.0, first_token_seconds=1.0)
    answering.finish(AnswerFinished("Red", (), FinishReason.LENGTH, statistics, spans))
    assert answering.message.content == "Red" and answering.message.spans == spans
    words = (strings.FINISH[FinishReason.LENGTH], strings.CORRECTED)
    assert answering.message.figures == " · ".join(words)
    assert answering.message.cut_off == answering.message.sampling == SAMPLING and answering.message.can_go_on
    answering.finish(AnswerFinished("Red", (), FinishReason.STOP, Statistics(rounds=4, rolled_back=698), spans))
    assert answering.message.figures == "" and not answering.message.can_go_on


def test_a_continued_answer_keeps_the_origins_of_its_beginning():
    """The runtime may have forgotten where the stored part came from."""
    stored = Message("assistant", "Red and", (TextSpan("Red", DRAFTED, True), TextSpan(" and", OFFLINE, True)))
    stored = dataclasses.replace(stored, dropped=(Dropped(3, "!"),), figures="cut off", cut_off=SAMPLING)
    answering = StreamingAnswer(1, 1, "Question", SAMPLING, before=stored)
    assert answering.message.content == "Red and" and not answering.message.finished
    answering.update(update(("Red and blue", CORRECTED, True), (" or", DRAFTED, False)))
    added = TextSpan(" blue", CORRECTED, True), TextSpan(" or", DRAFTED, False)
    assert answering.message.spans == (*stored.spans, *added) and answering.message.dropped == stored.dropped
    answering.stop()
    assert answering.message.content == "Red and blue" and answering.message.spans[:2] == stored.spans
    unchanged = StreamingAnswer(1, 1, "Question", SAMPLING, before=stored)
    unchanged.stop()
    assert unchanged.message == stored


def test_figures_count_words_rounds_and_bytes():
    before, after = Statistics(rounds=1, tokens=2, round_trips=[0.1]), Statistics(rounds=3, tokens=8)
    after.round_trips = [0.1, 0.2, 0.3]
    assert new_round(before, after) == Round(0.3, 3.0) and new_round(after, after) is None
    statistics = Statistics(rounds=10, tokens=30, kept=5, bytes_up=950, bytes_down=1_234_567, round_trips=[0.07])
    shown = [text for text, _ in figures(statistics, 0.75)]
    assert shown == [
        strings.SPEED[0].format(0.0),
        strings.PASSES[0].format(25, 10),
        strings.ROUND_TRIP[0].format(70),
        strings.TRAFFIC[0].format("950 B", "1.2 MB"),
    ]
    statistics = Statistics(tokens=9, seconds=3.0, first_token_seconds=1.0, drafted=12, accepted=7)
    shown = [text for text, _ in figures(statistics, 0.75)]
    drafted = strings.DRAFTED[0].format(7, 12, strings.THIS_DEVICE)
    assert shown[:3] == [strings.SPEED[0].format(3.0), strings.FIRST_WORD[0].format(1.0), drafted]


@pytest.mark.parametrize(
    ("link", "retry", "options", "words"),
    [
        (LinkChanged(LinkStatus.ONLINE), None, {}, "online"),
        (LinkChanged(LinkStatus.ONLINE), None, {"slow": True}, "slow"),
        (LinkChanged(LinkStatus.ONLINE, late=True), None, {}, "slow"),
        (LinkChanged(LinkStatus.RECONNECTING), None, {}, "reconnecting"),
        (LinkChanged(LinkStatus.OFFLINE), 4.6, {}, "reconnecting in 5 s"),
        (LinkChanged(LinkStatus.OFFLINE), None, {}, "no connection"),
        (LinkChanged(LinkStatus.OFFLINE), None, {"wanted_offline": True}, "working offline"),
    ],
)
def test_the_link_has_a_word_for_each_state(link, retry, options, words):
    assert strings.link_words(link, retry, **{"wanted_offline": False, **options}) == words
