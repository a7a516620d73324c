"""What happens to chats and their history while answers in them are checked, and between."""

from __future__ import annotations

import dataclasses
import sqlite3

import pytest

from moa_chat.desktop.offline_checks import AnswerCheck, OfflineChecks
from moa_chat.history.message import Dropped, Message
from moa_chat.history.store import History
from moa_runtime.conversation import Unconfirmed
from moa_runtime.errors import MoaError
from moa_runtime.events import Origin, TextSpan
from moa_runtime.session.events import Sampling
from support.chat.desktop.window_driving import QUESTION, TOKEN, WAIT, ask

MARK = Unconfirmed(1, Sampling(), 16)
LONG = Unconfirmed(1, Sampling(), 400)


@pytest.fixture
def history(profile):
    opened = History.open(profile.history_path)
    yield opened
    opened.close()


@pytest.fixture
def window(open_window, verifier, writing_bundle, qtbot):
    opened = open_window(server=verifier.url, token=TOKEN, bundle=str(writing_bundle), max_new_tokens=16)
    qtbot.waitUntil(opened.page.composer.is_ready, timeout=WAIT)
    return opened


def asked(history: History, *answers: Message) -> int:
    chat = history.create("Colours")
    for number, answer in enumerate(answers):
        history.save(chat, 2 * number, Message("user", QUESTION))
        history.save(chat, 2 * number + 1, answer)
    return chat


def checked(history: History, text: str, *, target: str = "", most: int = 16) -> tuple[OfflineChecks, AnswerCheck]:
    """The next answer, as if the target had written ``text``."""
    checks = OfflineChecks(history)
    checking = checks.next(None, target)
    assert checking is not None
    checking.message, checking.done = Message("assistant", text), True
    assert checks.settle(checking, most)
    return checks, checking


def test_only_the_target_that_an_answer_was_written_for_checks_it(history):
    ours = asked(history, Message("assistant", "Red.", unconfirmed=MARK, target="one"))
    assert OfflineChecks(history).next(ours, "other") is None
    theirs = asked(history, Message("assistant", "Green.", unconfirmed=MARK, target="other"))
    for target, chat in (("one", ours), ("other", theirs)):
        checking = OfflineChecks(history).next(ours, target)
        assert checking is not None and checking.chat == chat
    asked(history, Message("assistant", "Blue.", unconfirmed=MARK))  # of an older moa-edge
    assert OfflineChecks(history).next(None, "third") is not None


def test_only_the_target_of_an_answer_continues_it(window):
    history = window.chats.history
    window.chats.open_chat(asked(history, Message("assistant", "Red,", cut_off=Sampling(), target="other")))
    window.chats.continue_answer()
    assert "Another model" in window.page.notice.text and not window.chats.busy


def test_an_answer_of_another_target_behind_a_corrected_one_stays(history):
    chat = asked(
        history,
        Message("assistant", "Red.", unconfirmed=MARK, target="one"),
        Message("assistant", "Green.", target="other"),
        Message("assistant", "Blue,", target="one", cut_off=Sampling(0.5)),
        Message("assistant", "Black.", target="one", sampling=Sampling(0.5, 0.9, 3)),
        Message("assistant", "White.", target="one"),  # of an older moa-edge
    )
    checked(history, "Yellow.", target="one", most=99)
    behind = {turn: history.messages(chat)[turn].unconfirmed for _, turn in history.unconfirmed()}
    samplings = {5: Sampling(0.5), 7: Sampling(0.5, 0.9, 3), 9: MARK.sampling}
    assert behind == {turn: Unconfirmed(turn, sampling, 99) for turn, sampling in samplings.items()}
    assert history.messages(chat)[1].target == "one"


def test_undo_leaves_what_has_changed_since(history):
    written = Message("assistant", "Red.", unconfirmed=MARK)
    chat, other = asked(history, written), asked(history, written)
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
    chat = asked(history, Message("assistant", "Red.", spans, (Dropped(1, "an earlier word"),), unconfirmed=MARK))
    checks = OfflineChecks(history)
    for text in ("Yellow.", "Green."):
        checking = checks.next(None, "")
        assert checking is not None and checking.message.dropped == ()
        checking.message = Message("assistant", text, (TextSpan(text, Origin.CORRECTED, True),), (Dropped(0, "Red"),))
        assert checks.settle(checking, 16)
        if text == "Yellow.":  # an answer before it has changed
            history.save(chat, 1, dataclasses.replace(history.messages(chat)[1], unconfirmed=MARK))
    says, corrected = checks.report()
    assert says == "1 word that this device wrote was corrected." and checks.undo(corrected)
    back = history.messages(chat)[1]
    assert (back.content, back.spans, back.dropped) == ("Red.", spans, ())
    assert back.figures == "as this device wrote it, not confirmed"


def test_an_answer_of_the_server_that_is_another_now_is_no_correction(history):
    spans = (TextSpan("Yellow.", Origin.CORRECTED, True),)
    asked(history, Message("assistant", "Yellow.", spans, unconfirmed=MARK))
    checks, _ = checked(history, "Green.")
    assert checks.report() == ("The verifier has confirmed what this device wrote.", [])


def test_a_word_that_was_taken_back_is_no_mark(history):
    asked(history, Message("assistant", "Yes.", dropped=(Dropped(0, "unconfirmed"), Dropped(0, '"unconfirmed": {'))))
    assert history.unconfirmed() == []


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
def test_damaged_origins_hide_no_text(history, profile, stored):
    """And keep no other answer from its check."""
    chat = asked(history, Message("assistant", "Red.", unconfirmed=MARK))
    other = asked(history, Message("assistant", "Green.", unconfirmed=MARK))
    with sqlite3.connect(profile.history_path) as database:
        database.execute("UPDATE message SET spans = ? WHERE chat = ? AND position = 1", (stored, chat))
    assert history.messages(chat)[1] == Message("assistant", "Red.")
    checking = OfflineChecks(history).next(chat, "")
    assert checking is not None and checking.chat == other


def test_an_answer_without_its_question_is_not_checked(history):
    """As where the disk was full for a moment."""
    history.save(history.create("Gap"), 1, Message("assistant", "Red.", unconfirmed=MARK))
    assert OfflineChecks(history).next(None, "") is None


def test_letters_that_are_none_hide_no_chat(history, profile):
    chat = asked(history, Message("assistant", "Red."))
    with sqlite3.connect(profile.history_path) as database:
        database.execute("UPDATE message SET content = CAST(x'52ff64' AS TEXT) WHERE position = 1")
    assert history.messages(chat)[1].content == "R\ufffdd"


def test_a_chat_that_cannot_be_read_is_not_written_over(window, qtbot, monkeypatch):
    chat = asked(window.chats.history, Message("assistant", "Red."))
    with monkeypatch.context() as patch:

        def fails(chat):
            raise MoaError("the history could not be read or written: disk I/O error")

        patch.setattr(window.chats.history, "messages", fails)
        window.chats.open_chat(chat)
        assert "disk I/O" in window.page.notice.text and window.chats.current is None
    ask(qtbot, window)
    qtbot.waitUntil(lambda: len(window.chats.messages) == 2 and not window.chats.busy, timeout=WAIT)
    assert [message.content for message in window.chats.history.messages(chat)] == [QUESTION, "Red."]


def test_a_refusal_that_cannot_be_stored_is_not_asked_for_again_and_again(window, qtbot, monkeypatch):
    history, told = window.chats.history, []
    chat = history.create("Endless")
    history.save(chat, 0, Message("user", "word " * 2000))
    history.save(chat, 1, Message("assistant", "None.", unconfirmed=MARK))

    def fails(*_):
        raise MoaError("the history could not be read or written: database or disk is full")

    monkeypatch.setattr(history, "save", fails)
    window.chats.told.connect(lambda *words: told.append(words[0]))
    window.chats.check()
    qtbot.waitUntil(lambda: len(told) == 2, timeout=WAIT)
    qtbot.wait(500)
    assert len(told) == 2 and history.messages(chat)[1].unconfirmed == MARK


def test_a_chat_that_is_deleted_in_its_check_keeps_no_other_from_its(window, qtbot):
    history = window.chats.history
    other = asked(history, Message("assistant", "Green.", unconfirmed=MARK))
    chat = asked(history, Message("assistant", "Red.", unconfirmed=LONG))
    window.chats.open_chat(chat)
    window.chats.check()
    window.chats.delete(chat)
    qtbot.waitUntil(lambda: history.unconfirmed() == [], timeout=WAIT)
    assert history.messages(other)[1].content != "Green."


def test_two_questions_in_a_check_are_both_there(window, qtbot):
    history = window.chats.history
    window.chats.open_chat(asked(history, Message("assistant", "Red.", unconfirmed=LONG)))
    window.chats.check()
    window.chats.send("One?")
    window.chats.send("Two?")
    qtbot.waitUntil(lambda: len(window.chats.messages) == 4 and not window.chats.busy, timeout=WAIT)
    assert window.chats.messages[2].content == "One?" and window.page.composer.text == "Two?"


def test_a_question_is_not_asked_in_the_chat_that_is_opened_next(window, qtbot):
    history = window.chats.history
    other = asked(history, Message("assistant", "Green."))
    chat = asked(history, Message("assistant", "Red.", unconfirmed=LONG))
    window.chats.open_chat(chat)
    window.chats.check()
    window.chats.send("Only here?")
    window.chats.open_chat(other)
    qtbot.waitUntil(lambda: window.page.composer.text == "Only here?", timeout=WAIT)
    assert len(window.chats.messages) == 2 and len(history.messages(chat)) == 2


def test_a_question_that_could_not_be_stored_is_stored_with_its_answer(window, qtbot, monkeypatch):
    history = window.chats.history

    def fails(*_):
        raise MoaError("the history could not be read or written: database or disk is full")

    monkeypatch.setattr(history, "save", fails)
    ask(qtbot, window)
    qtbot.waitUntil(lambda: len(window.chats.messages) == 2 and not window.chats.busy, timeout=WAIT)
    stored = history.messages(window.chats.current)
    assert [message.turn for message in stored] == [message.turn for message in window.chats.messages]
    assert stored[1].target == window.runtime.target != ""
