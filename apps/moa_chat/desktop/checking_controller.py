"""Conversations whose offline answers are checked when the verifier is back. Knows no widgets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from PySide6.QtCore import QObject

from moa_chat.desktop.chat_controller import ChatController
from moa_chat.desktop.offline_checks import Checking, Checks, Corrected
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.runtime_thread import Engine
from moa_chat.history.store import History
from moa_chat.strings import as_sentence
from moa_runtime.errors import MoaError
from moa_runtime.events import Disagreement, LinkStatus


class CheckingController(ChatController):
    """What the device wrote without the verifier is checked, answer by answer, while nothing else is asked for."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        settings: Callable[[], Settings],
        options: argparse.Namespace,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(engine, history, settings, options, parent)
        self._checks = Checks(history)
        #: By the user, once a check has made room: in which chat, what, and the words that it is about.
        self._wanted: list[tuple[int | None, Callable[[], None], str]] = []

    @property
    def busy(self) -> bool:
        """Whether an answer is written; to check one keeps nobody from asking."""
        return super().busy and not isinstance(self._answering, Checking)

    def send(self, text: str, *, replaces: bool = False) -> None:
        if not self._after_check(lambda: self.send(text, replaces=replaces), text):
            super().send(text, replaces=replaces)

    def edit(self, position: int, text: str) -> None:
        if not self._after_check(lambda: self.edit(position, text), text):
            super().edit(position, text)

    def continue_answer(self) -> None:
        if not self._after_check(self.continue_answer):
            super().continue_answer()

    def delete(self, chat: int) -> None:
        checking = self._answering
        if isinstance(checking, Checking) and checking.chat == chat:
            checking.gone = True
        super().delete(chat)

    def handle_disagreement(self, event: Disagreement) -> None:
        """Of a check one hears at its end."""
        if not isinstance(self._answering, Checking) or self._general().disagreement == "mine":
            super().handle_disagreement(event)

    def check(self) -> None:
        """Have the verifier, if it is there, check what was written without it, one answer after the other."""
        chat = self._engine.chat
        if self._answering is not None or chat is None or chat.status is not LinkStatus.ONLINE:
            return
        checking = self._try(lambda: self._checks.next(self.current, self._engine.target), None)
        if checking is not None and (mark := checking.written.unconfirmed) is not None:
            self._answering = checking
            messages = self._try(lambda: self.history.messages(checking.chat), [])
            turns = self.turns_of(self.settings_of(checking.chat), messages)
            before = len(turns) - len(messages)  # the instructions
            self._engine.check(turns, replace(mark, turn=checking.position + before))
        elif self._checks.any_done:
            words, corrected = self._checks.report()
            if corrected:
                self.corrected.emit(words, lambda: self._undo(corrected))
            else:
                self.told.emit(words, "", None)

    # -- helpers -------------------------------------------------------------------------------

    def _ended(self, problem: MoaError | None) -> None:
        checking = self._answering
        if isinstance(checking, Checking):
            self._answering = None
            self._clock.stop()
            self._checked(checking, problem)
            return
        super()._ended(problem)
        if problem is None:
            self.check()

    def _checked(self, checking: Checking, problem: MoaError | None) -> None:
        wanted, self._wanted = self._wanted, []
        most = self.settings_of(checking.chat).max_new_tokens
        settled = checking.done and self._try(lambda: self._checks.settle(checking, most), False)
        if problem is not None and (chat := self._engine.chat) is not None and chat.status is LinkStatus.ONLINE:
            settled = self._try(lambda: self._checks.give_up(checking), False)
        if checking.chat == self.current:
            self._show_stored(checking.chat)
        if problem is not None:
            self.told.emit(as_sentence(str(problem)), "", None)
        for chat, does, text in wanted:
            if chat == self.current:
                does()
            elif text:  # it was not meant for the chat that is open now
                self.returned.emit(text)
        if (settled or checking.gone) and not wanted:
            self.check()

    def _after_check(self, wanted: Callable[[], None], text: str = "") -> bool:
        """End a check that runs, and do what the user wants then; says whether one ran."""
        if not isinstance(self._answering, Checking):
            return False
        self._wanted.append((self.current, wanted, text))
        self.stop()
        return True

    def _undo(self, corrected: list[Corrected]) -> None:
        if not self._try(lambda: self._checks.undo(corrected), True):
            self.told.emit("Answers that have changed since stay as they are.", "", None)
        if self.current is not None and not self.busy:
            self._show_stored(self.current)

    def _show_stored(self, chat: int) -> None:
        """Show the open chat's messages as they are stored, where they stand."""
        for position, message in enumerate(self._try(lambda: self.history.messages(chat), [])[: len(self.messages)]):
            self.messages[position] = message.settled
            self.message_changed.emit(position, message.settled)
