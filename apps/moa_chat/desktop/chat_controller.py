"""The conversations: asking, answering, editing, storing, and checking what was written offline.

No widgets are imported: the window connects these signals with its pages.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from PySide6.QtCore import QObject, QTimer, Signal

from moa_chat import strings
from moa_chat.desktop.offline_checks import AnswerCheck, Corrected, OfflineChecks
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.runtime_thread import RuntimeThread
from moa_chat.desktop.stats_panel import figures, round_trip
from moa_chat.desktop.streaming_answer import StreamingAnswer, answering_again
from moa_chat.history.chat_settings import ChatSettings, sampling_of
from moa_chat.history.message import Message, title_of
from moa_chat.history.store import History
from moa_chat.strings import as_sentence
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, Disagreement, LinkStatus, Paused, Statistics

T = TypeVar("T")

_SAVE_MS = 700  # a crash loses at most this much of an answer
_PATIENCE_MS = 800  # until the window says what it is waiting for


class ChatController(QObject):
    """The open conversation, and the answer that is being written, in it or in another one.

    Answers that the device wrote without the verifier are checked one after the other, while nothing else is asked.

    Args:
        general: returns the program's settings as they are now.
        options: of the command line.
    """

    chats_changed = Signal()  # the list of chats has changed
    opened = Signal()  # another conversation is open
    message_changed = Signal(int, object)  # position and content of a message that has changed or was added
    truncated = Signal(int)  # the messages from this position on are gone
    returned = Signal(str)  # a question that could not be asked, for the composer
    told = Signal(str, str, object)  # a sentence for the user; a button's text; what it does
    busy_changed = Signal(bool)  # whether an answer is being written
    figures_changed = Signal(list)  # the answer's figures, each with its meaning
    round_seen = Signal(object)  # a new Round
    round_trip_changed = Signal(float)  # seconds
    waiting = Signal(str)  # why there is no text yet
    context_changed = Signal(int, int)  # tokens of the open chat, and how many the target can read; 0 if not known
    corrected = Signal(str, object)  # a sentence about words that the server has replaced; what undoes that
    disagreed = Signal(object)  # a Disagreement that the user has to decide

    def __init__(
        self,
        runtime: RuntimeThread,
        history: History,
        general: Callable[[], Settings],
        options: argparse.Namespace,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.current: int | None = None  # id of the open chat; None for a new one without messages
        self.messages: list[Message] = []  # of the open chat
        self.history = history
        self._runtime, self._general, self._options = runtime, general, options
        self._own: ChatSettings | None = None  # of the open chat
        self._answering: StreamingAnswer | None = None  # the answer that is written or checked, perhaps in another chat
        self._last: StreamingAnswer | None = None
        self._checks = OfflineChecks(history)
        #: What the user wants to do after the running check: in which chat, what, and the text that would be lost.
        self._wanted: list[tuple[int | None, Callable[[], None], str]] = []
        self._clock = QTimer(self, singleShot=True, timeout=self._save)
        self._patience = QTimer(self, singleShot=True, timeout=self._say_what_is_read)
        self.opened.connect(self.measure_context)
        runtime.events.connect(self._take)
        runtime.ended.connect(self._ended)
        runtime.reopened.connect(self._reopened)
        runtime.pending.connect(self._follow_pending)

    @property
    def busy(self) -> bool:
        """Whether an answer is being written. A check does not count: it ends as soon as the user asks something."""
        return self._answering is not None and not isinstance(self._answering, AnswerCheck)

    @property
    def statistics(self) -> Statistics:
        """Statistics of the answer that is being written, or of the last one."""
        latest = self._answering or self._last
        return latest.statistics if latest is not None else Statistics()

    @property
    def settings(self) -> ChatSettings:
        """Settings of the open chat; those of the program if it has none of its own."""
        return self._own or self._general().of_new_chats

    @property
    def turns(self) -> list[dict[str, str]]:
        """Messages of the open chat for the runtime, with its instructions as the system message."""
        return _turns(self.settings, self.messages)

    def change_settings(self, settings: ChatSettings) -> None:
        """Use these settings from the open chat's next question on."""
        self._own = settings
        if (chat := self.current) is not None:
            self._try(lambda: self.history.change_settings(chat, settings), None)

    def settings_of(self, chat: int) -> ChatSettings:
        """Return the settings of any chat."""
        if chat == self.current:
            return self.settings
        return self._try(lambda: self.history.settings(chat), None) or self._general().of_new_chats

    # -- chats ---------------------------------------------------------------------------------

    def new_chat(self) -> None:
        """Open an empty chat, which is stored with its first question."""
        self.current, self.messages, self._own = None, [], None
        self.opened.emit()
        self.chats_changed.emit()

    def open_interrupted(self) -> None:
        """Open the latest chat if its answer was being written when the program ended."""
        latest = self._try(self.history.chats, [])[:1]
        interrupted = {chat for chat, _ in self._try(self.history.unfinished, [])}
        if self.current is None and latest and latest[0].id in interrupted:
            self.open_chat(latest[0].id)

    def open_chat(self, chat: int) -> None:
        running, stored = self._answering, self._try(lambda: self.history.messages(chat), None)
        if stored is None:  # a question asked in it would overwrite what could not be read
            self.new_chat()
            return
        self.current = chat
        self._own = self._try(lambda: self.history.settings(chat), None)
        self.messages = [message.settled for message in stored]
        if running is not None and running.chat == chat:
            running.place_in(self.messages)
        elif self.messages and self.messages[-1].role == "user":
            # The program ended before there was an answer.
            self.returned.emit(self._drop_last())
        self.opened.emit()
        self.chats_changed.emit()

    def rename(self, chat: int, title: str) -> None:
        self._try(lambda: self.history.rename(chat, title), None)
        self.chats_changed.emit()

    def delete(self, chat: int) -> None:
        """Take a chat out of the list; the user can undo that."""
        if self._answering is not None and self._answering.chat == chat:
            if isinstance(self._answering, AnswerCheck):
                self._answering.gone = True
            self.stop()
        self._try(lambda: self.history.delete(chat), None)
        self.told.emit(strings.CHAT_DELETED, strings.UNDO, lambda: self._undelete(chat))
        if chat == self.current:
            self.new_chat()
        self.chats_changed.emit()

    def _undelete(self, chat: int) -> None:
        self._try(lambda: self.history.restore(chat), None)
        self.open_chat(chat)

    # -- asking --------------------------------------------------------------------------------

    def send(self, text: str, *, replaces: bool = False) -> None:
        """Ask a question in the open chat; its answer ``replaces`` stored turns once words of it are confirmed."""
        if self._after_check(lambda: self.send(text, replaces=replaces), text):
            return
        ready = not self.busy and self._runtime.chat is not None
        if ready and self.current is None:
            self.current = self._try(lambda: self.history.create(title_of(text), self.settings), None)
            self._own = self.settings
        if not ready or self.current is None:
            self.returned.emit(text)
            return
        settings, turns = self.settings, self.turns
        sampling = sampling_of(settings, self._runtime.recommended, self._options.seed)
        self._answering = StreamingAnswer(self.current, len(self.messages) + 1, text, sampling, replaces=replaces)
        chat = self.current
        for position, message in enumerate(self._answering.turns, len(self.messages)):
            self.messages.append(message)
            if not replaces:
                self._try(lambda at=position, one=message: self.history.save(chat, at, one), None)
            self.message_changed.emit(position, message)
        self._runtime.ask(turns, text, max_new_tokens=settings.max_new_tokens, sampling=sampling)
        self._patience.start(_PATIENCE_MS)
        self.busy_changed.emit(True)
        self.chats_changed.emit()

    def stop(self) -> None:
        """Stop the answer, and keep what is confirmed of it."""
        self._runtime.stop()

    def again(self) -> None:
        """Ask the last question again."""
        asked = [number for number, message in enumerate(self.messages) if message.role == "user"]
        if asked and not self.busy:
            self.edit(asked[-1], self.messages[asked[-1]].content)

    def continue_answer(self) -> None:
        """Continue the last answer, if it was cut off."""
        if self._after_check(self.continue_answer):
            return
        last, chat = self.messages[-1] if self.messages else None, self.current
        if self.busy or self._runtime.chat is None or chat is None or last is None or not last.can_go_on:
            return
        if last.target not in ("", self._runtime.target):
            self._tell(strings.OTHER_MODEL)
            return
        settings, turns, position = self.settings, self.turns, len(self.messages) - 1
        question = self.messages[position - 1].content
        self._answering = StreamingAnswer(chat, position, question, last.cut_off, before=last)
        self._show(self._answering)
        self._save()
        self._runtime.continue_answer(turns, max_new_tokens=settings.max_new_tokens, sampling=last.cut_off)
        self.busy_changed.emit(True)

    def edit(self, position: int, text: str) -> None:
        """Replace the question at a position; stored turns after it go when words of the new answer are confirmed."""
        if self._after_check(lambda: self.edit(position, text), text):
            return
        if self.busy or self._runtime.chat is None:
            return
        del self.messages[position:]
        self.truncated.emit(position)
        self.send(text, replaces=True)

    def measure_context(self) -> None:
        """Emit how many tokens the open chat has; while an answer is written, :meth:`_show` does so."""
        chat = self.current

        def say(tokens: int) -> None:
            if chat == self.current and not self.busy:
                self.context_changed.emit(tokens, self._runtime.max_context)

        self._runtime.count(self.turns, say)

    def close(self) -> None:
        """Store the answer that is being written as it is now."""
        self._clock.stop()
        self._save()

    def settle(self, mine: bool) -> None:
        """Decide a disagreement: keep the device's version, or leave the server's, which is there already."""
        if mine:
            self._runtime.keep_mine()

    # -- the answer ----------------------------------------------------------------------------

    def _take(self, events: list[ChatEvent]) -> None:
        """Apply all events since the last tick, then show the result once."""
        answering = self._answering
        if answering is None:
            return
        for event in events:
            if isinstance(event, AnswerUpdate):
                if seen := answering.update(event):
                    self.round_seen.emit(seen)
            elif isinstance(event, AnswerFinished):
                answering.finish(event)
            elif isinstance(event, Disagreement):
                self.handle_disagreement(event)
            elif isinstance(event, Paused):
                answering.pause = event.reason
                if not answering.message.content:
                    self.waiting.emit(strings.PAUSES[event.reason])
        self._show(answering)
        if answering.ended_alone:
            self._runtime.stop()
        if answering.replaces and answering.confirmed:
            answering.replaces = False
            self._store_turns(answering)
        if not self._clock.isActive():
            self._clock.start(_SAVE_MS)

    def handle_disagreement(self, event: Disagreement) -> None:
        """Ask the user, or do what the settings say and report it."""
        choice = self._general().disagreement
        if isinstance(self._answering, AnswerCheck) and choice != "mine":
            return  # reported when the check has ended
        if choice == "ask":
            self.disagreed.emit(event)
        elif choice == "mine":
            self.settle(True)
        else:
            self.corrected.emit(strings.corrected_sentence(len(event.dropped_text.split())), lambda: self.settle(True))

    def _show(self, answering: StreamingAnswer) -> None:
        if answering.chat == self.current:
            self.messages[answering.position] = answering.shown
            self.message_changed.emit(answering.position, answering.shown)
            if answering.tokens and answering.position == len(self.messages) - 1:
                self.context_changed.emit(self._runtime.prompt_tokens + answering.tokens, self._runtime.max_context)
        self.figures_changed.emit(figures(answering.statistics, answering.words_a_token))
        self.round_trip_changed.emit(round_trip(answering.statistics))

    def _save(self) -> None:
        if self._answering is not None and not self._answering.replaces:
            self._store_turns(self._answering)

    def _store_turns(self, answering: StreamingAnswer) -> None:
        """Store question and answer in one transaction, so that none is stored alone after an earlier write failed."""
        answering.message = dataclasses.replace(answering.message, target=self._runtime.target)
        self._try(lambda: self.history.replace(answering.chat, answering.position - 1, answering.turns), None)

    def _say_what_is_read(self) -> None:
        """Say that the target reads the prompt, if the link is up and no text has come yet."""
        answering, chat = self._answering, self._runtime.chat
        if answering is None or chat is None or answering.message.content or chat.status is not LinkStatus.ONLINE:
            return
        if answering.chat == self.current:
            self.waiting.emit(strings.reading_words(chat.new_tokens))

    def _ended(self, problem: MoaError | None) -> None:
        answering, self._answering = self._answering, None
        self._clock.stop()
        if isinstance(answering, AnswerCheck):
            self._checked(answering, problem)
            return
        if answering is not None:
            self._settle_answer(answering, problem)
        if problem is None:
            self.check()

    def _settle_answer(self, answering: StreamingAnswer, problem: MoaError | None) -> None:
        if not answering.message.finished:
            left = None if answering.replaces else self._runtime.left_alone(answering.position)
            answering.stop() if left is None else answering.set_aside(*left)
        self._last = answering
        self._patience.stop()
        if answering.message.content:
            self._store_turns(answering)
            self._show(answering)
        else:
            self._take_back(answering)
        self.busy_changed.emit(False)
        self.chats_changed.emit()
        if problem is not None:
            self._tell(as_sentence(str(problem)))

    def _reopened(self) -> None:
        self._answering = self._last
        self.busy_changed.emit(True)

    def _follow_pending(self, turns: list[dict[str, str]], question: str) -> None:
        """Follow the answer that was under way when the window was closed, unless its chat is gone."""
        answering = self._try(lambda: answering_again(self.history, turns, question), None)
        if answering is not None and not self.busy:
            self._answering = answering
            if self.current in (None, answering.chat):
                self.open_chat(answering.chat)
            self._runtime.follow_pending()
            self.busy_changed.emit(True)

    def _take_back(self, answering: StreamingAnswer) -> None:
        """Return the question of an answer without text to the composer; stored turns that it was to replace stay."""
        if answering.replaces and answering.chat == self.current:
            self.open_chat(answering.chat)
            if answering.question not in [message.content for message in self.messages]:
                self.returned.emit(answering.question)
        elif answering.replaces:
            return
        elif answering.chat == self.current:
            del self.messages[answering.position :]
            self.returned.emit(self._drop_last())
        else:
            self._try(lambda: self.history.truncate(answering.chat, answering.position), None)

    # -- checking ------------------------------------------------------------------------------

    def check(self) -> None:
        """Have the verifier check the next answer that was written without it; report when there are no more."""
        chat = self._runtime.chat
        if self._answering is not None or chat is None or chat.status is not LinkStatus.ONLINE:
            return
        checking = self._try(lambda: self._checks.next(self.current, self._runtime.target), None)
        if checking is not None and (mark := checking.written.unconfirmed) is not None:
            self._answering = checking
            messages = self._try(lambda: self.history.messages(checking.chat), [])
            turns = _turns(self.settings_of(checking.chat), messages)
            before = len(turns) - len(messages)  # the instructions
            self._runtime.check(turns, dataclasses.replace(mark, turn=checking.position + before))
        elif self._checks.any_done:
            words, corrected = self._checks.report()
            if corrected:
                self.corrected.emit(words, lambda: self._undo(corrected))
            else:
                self._tell(words)

    def _checked(self, checking: AnswerCheck, problem: MoaError | None) -> None:
        wanted, self._wanted = self._wanted, []
        most = self.settings_of(checking.chat).max_new_tokens
        settled = checking.done and self._try(lambda: self._checks.settle(checking, most), False)
        if problem is not None and (chat := self._runtime.chat) is not None and chat.status is LinkStatus.ONLINE:
            settled = self._try(lambda: self._checks.give_up(checking), False)
        if checking.chat == self.current:
            self._show_stored(checking.chat)
        if problem is not None:
            self._tell(as_sentence(str(problem)))
        for chat, does, text in wanted:
            if chat == self.current:
                does()
            elif text:  # another chat has been opened since
                self.returned.emit(text)
        if (settled or checking.gone) and not wanted:
            self.check()

    def _after_check(self, wanted: Callable[[], None], text: str = "") -> bool:
        """Stop a running check and call ``wanted`` after it; return False if none runs."""
        if not isinstance(self._answering, AnswerCheck):
            return False
        self._wanted.append((self.current, wanted, text))
        self.stop()
        return True

    def _undo(self, corrected: list[Corrected]) -> None:
        if not self._try(lambda: self._checks.undo(corrected), True):
            self._tell(strings.UNDO_STAYS)
        if self.current is not None and not self.busy:
            self._show_stored(self.current)

    def _show_stored(self, chat: int) -> None:
        """Show the open chat's messages as they are stored now."""
        for position, message in enumerate(self._try(lambda: self.history.messages(chat), [])[: len(self.messages)]):
            self.messages[position] = message.settled
            self.message_changed.emit(position, message.settled)

    # -- storing -------------------------------------------------------------------------------

    def _drop_last(self) -> str:
        """Remove the last question from the open chat, and an empty chat from the list; return the question."""
        question = self.messages[-1].content
        del self.messages[-1]
        length = len(self.messages)
        if (chat := self.current) is not None:
            self._try(lambda: self.history.truncate(chat, length), None)
        self.truncated.emit(length)
        if not self.messages and chat is not None:
            self.current = None
            self._try(lambda: self.history.delete(chat), None)
            self.chats_changed.emit()
        return question

    def _tell(self, text: str) -> None:
        self.told.emit(text, "", None)

    def _try(self, does: Callable[[], T], otherwise: T) -> T:
        """Return what ``does`` returns; if the history fails, tell the user and return ``otherwise``."""
        try:
            return does()
        except MoaError as error:
            self._tell(as_sentence(str(error)))
            return otherwise


def _turns(settings: ChatSettings, messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return the messages of a chat as the runtime gets them, with the instructions as the system message."""
    before = [{"role": "system", "content": settings.system}] if settings.system else []
    return before + [message.turn for message in messages]
