"""Chats and their history while answers in them are checked, and between."""

from __future__ import annotations

import dataclasses
import sqlite3

import pytest

from moa_chat import strings
from moa_chat.desktop.offline_checks import AnswerCheck, OfflineChecks
from moa_chat.history.message import Dropped, Message
from moa_chat.history.store import History
from moa_runtime.conversation import Unconfirmed
from moa_runtime.errors import MoaError
from moa_runtime.events import Origin, TextSpan
from moa_runtime.session.events import Sampling
from support.chat.desktop.window_driving import QUESTION, ask, contents

MARK = Unconfirmed(1, Sampling(), 16)
LONG = Unconfirmed(1, Sampling(), 400)


def fails(*_):
    raise MoaError("DISK FULL", code="refused")


def written(text: str = "Red.", mark: Unconfirmed | None = MARK, **fields) -> Message:
    return Message("assistant", text, unconfirmed=mark, **fields)


def asked(history: History, *answers: Message) -> int:
    chat = history.create("Colours")
    history.replace(chat, 0, [message for answer in answers for message in (Message("user", QUESTION), answer)])
    return chat


def checked(history: History, text: str, *, target: str = "", most: int = 16) -> tuple[OfflineChecks, AnswerCheck]:
    """The next answer, as if the target had written ``text``."""
    checks = OfflineChecks(history)
    checking = checks.next(None, target)
    assert checking is not None
    checking.message, checking.done = Message("assistant", text), True
    assert checks.settle(checking, most)
    return checks, checking


def test_an_answer_is_checked_and_continued_by_its_own_target_alone(history, connected):
    ours = asked(history, written(target="one"))
    assert OfflineChecks(history).next(ours, "other") is None
    theirs = asked(history, written("Green.", target="other"))
    for target, chat in (("one", ours), ("other", theirs)):
        checking = OfflineChecks(history).next(ours, target)
        assert checking is not None and checking.chat == chat
    asked(history, written("Blue."))  # of an older moa-edge
    assert OfflineChecks(history).next(None, "third") is not None
    connected.chats.open_chat(asked(history, written("Red,", None, cut_off=Sampling(), target="other")))
    connected.chats.continue_answer()
    assert connected.page.notice.text == strings.OTHER_MODEL and not connected.chats.busy


def test_only_answers_of_the_same_target_after_a_corrected_one_are_checked_again(history):
    chat = asked(
        history,
        written(target="one"),
        written("Green.", None, target="other"),
        written("Blue,", None, target="one", cut_off=Sampling(0.5)),
        written("Black.", None, target="one", sampling=Sampling(0.5, 0.9, 3)),
        written("White.", None, target="one"),  # of an older moa-edge
    )
    checked(history, "Yellow.", target="one", most=99)
    after = {turn: history.messages(chat)[turn].unconfirmed for _, turn in history.unconfirmed()}
    samplings = {5: Sampling(0.5), 7: Sampling(0.5, 0.9, 3), 9: MARK.sampling}
    assert after == {turn: Unconfirmed(turn, sampling, 99) for turn, sampling in samplings.items()}
    assert history.messages(chat)[1].target == "one"


def test_undo_leaves_answers_that_have_changed_since(history):
    chat, other = asked(history, written()), asked(history, written())
    for _ in range(2):
        checks, _ = checked(history, "Yellow.")
        _, corrected = checks.report()
        if history.messages(chat)[1].unconfirmed is None:
            history.replace(chat, 0, [Message("user", "Another?"), Message("assistant", "Another answer.")])
            assert not checks.undo(corrected)
            assert history.messages(chat)[1].content == "Another answer."
            history.truncate(chat, 0)
            assert not checks.undo(corrected) and history.messages(chat) == []
        else:
            assert checks.undo(corrected) and not checks.undo(corrected)  # twice
            assert history.messages(other)[1].content == "Red."


def test_undo_brings_back_the_devices_text_without_marks(history):
    """Also of an answer that was checked twice, and not that of the server in between."""
    spans = (TextSpan("Red.", Origin.OFFLINE, False),)
    chat = asked(history, written(spans=spans, dropped=(Dropped(1, "an earlier word"),)))
    checks = OfflineChecks(history)
    for text in ("Yellow.", "Green."):
        checking = checks.next(None, "")
        assert checking is not None and checking.message.dropped == ()
        checking.message = Message("assistant", text, (TextSpan(text, Origin.CORRECTED, True),), (Dropped(0, "Red"),))
        assert checks.settle(checking, 16)
        if text == "Yellow.":  # an answer before it has changed
            history.save(chat, 1, dataclasses.replace(history.messages(chat)[1], unconfirmed=MARK))
    says, corrected = checks.report()
    assert says == strings.CORRECTED_WORD and checks.undo(corrected)
    back = history.messages(chat)[1]
    assert (back.content, back.spans, back.dropped, back.figures) == ("Red.", spans, (), strings.AS_WRITTEN)


def test_another_answer_of_the_server_is_no_correction_of_the_device(history):
    asked(history, written("Yellow.", spans=(TextSpan("Yellow.", Origin.CORRECTED, True),)))
    checks, _ = checked(history, "Green.")
    assert checks.report() == (strings.ALL_CONFIRMED, [])


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "null",
        "[" * 100_000,
        '{"spans": [], "dropped": [], "unconfirmed": {"turn": -1}}',
        '{"spans": [[2, "offline", false]], "dropped": []}',
        '{"spans": [["x", "nowhere", 1]], "dropped": [[1]]}',
        '{"spans": [], "dropped": [], "cut_off": {"temperature": "hot"}}',
    ],
)
def test_damaged_origins_hide_no_text_and_keep_no_other_answer_from_its_check(history, profile, stored):
    chat, other = asked(history, written()), asked(history, written("Green."))
    with sqlite3.connect(profile.history_path) as database:
        database.execute("UPDATE message SET spans = ? WHERE chat = ? AND position = 1", (stored, chat))
    assert history.messages(chat)[1] == written(mark=None)
    checking = OfflineChecks(history).next(chat, "")
    assert checking is not None and checking.chat == other


def test_odd_answers_are_not_checked_but_shown(history, profile):
    history.save(history.create("Gap"), 1, written())  # without its question, as after a full disk
    assert OfflineChecks(history).next(None, "") is None
    history.truncate(1, 0)
    asked(history, written("Yes.", None, dropped=(Dropped(0, "unconfirmed"), Dropped(0, '"unconfirmed": {'))))
    assert history.unconfirmed() == [], "a word that was taken back is no mark"
    chat = asked(history, written(mark=None))
    with sqlite3.connect(profile.history_path) as database:
        database.execute(
            "UPDATE message SET content = CAST(x'52ff64' AS TEXT) WHERE chat = ? AND position = 1", (chat,)
        )
    assert history.messages(chat)[1].content == "R\ufffdd", "text that is no UTF-8 hides no chat"


def test_a_chat_that_cannot_be_read_is_not_written_over(writing, qtbot, until, monkeypatch):
    chat = asked(writing.chats.history, written(mark=None))
    with monkeypatch.context() as patch:
        patch.setattr(writing.chats.history, "messages", fails)
        writing.chats.open_chat(chat)
        assert "DISK FULL" in writing.page.notice.text and writing.chats.current is None
    ask(qtbot, writing)
    until(lambda: len(writing.chats.messages) == 2 and not writing.chats.busy)
    assert contents(writing.chats.history.messages(chat)) == [QUESTION, "Red."]


def test_a_refusal_that_cannot_be_stored_is_not_asked_for_again_and_again(writing, until, monkeypatch):
    history, told, checks = writing.chats.history, [], []
    chat = history.create("Endless")
    history.replace(chat, 0, [Message("user", "word " * 2000), written()])
    monkeypatch.setattr(history, "save", fails)
    check = writing.runtime.check
    monkeypatch.setattr(writing.runtime, "check", lambda *given: (checks.append(given), check(*given)))
    writing.chats.told.connect(lambda *words: told.append(words[0]))
    writing.chats.check()
    until(lambda: len(told) == 2)
    assert writing.chats._answering is None and len(checks) == 1 and history.messages(chat)[1].unconfirmed == MARK


def test_a_chat_that_is_deleted_in_its_check_keeps_no_other_from_its(writing, until):
    history = writing.chats.history
    other, chat = asked(history, written("Green.")), asked(history, written(mark=LONG))
    writing.chats.open_chat(chat)
    writing.chats.check()
    writing.chats.delete(chat)
    until(lambda: history.unconfirmed() == [])
    assert history.messages(other)[1].content != "Green."


def test_a_question_in_a_check_is_asked_after_it_in_its_own_chat_alone(writing, until):
    history = writing.chats.history
    other, chat = asked(history, written("Green.", None)), asked(history, written(mark=LONG))
    writing.chats.open_chat(chat)
    writing.chats.check()
    writing.chats.send("Only here?")
    writing.chats.open_chat(other)
    until(lambda: writing.page.composer.text == "Only here?")
    assert len(writing.chats.messages) == 2 and len(history.messages(chat)) == 2
    writing.page.composer.field.clear()
    writing.chats.open_chat(chat)
    writing.chats.check()
    writing.chats.send("One?")
    writing.chats.send("Two?")
    until(lambda: len(writing.chats.messages) == 4 and not writing.chats.busy)
    assert writing.chats.messages[2].content == "One?" and writing.page.composer.text == "Two?"


def test_a_question_that_could_not_be_stored_is_stored_with_its_answer(writing, qtbot, until, monkeypatch):
    history = writing.chats.history
    monkeypatch.setattr(history, "save", fails)
    ask(qtbot, writing)
    until(lambda: len(writing.chats.messages) == 2 and not writing.chats.busy)
    stored = history.messages(writing.chats.current)
    assert [message.turn for message in stored] == [message.turn for message in writing.chats.messages]
    assert stored[1].target == writing.runtime.target != ""
