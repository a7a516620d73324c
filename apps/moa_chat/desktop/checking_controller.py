"""Conversations whose offline answers are checked when the verifier is back. Knows no widgets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from PySide6.QtCore import QObject

from moa_chat.desktop.checks import Checking, Checks
from moa_chat.desktop.controller import ChatController
from moa_chat.desktop.engine import Engine
from moa_chat.desktop.profile import Settings
from moa_chat.history.message import Message
from moa_chat.history.store import History
from moa_chat.words import as_sentence
from moa_runtime.answer import Disagreement, LinkStatus
from moa_runtime.errors import MoaError


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
        self._wanted: Callable[[], None] | None = None  # by the user, once a check has made room

    @property
    def busy(self) -> bool:
        """Whether an answer is written; to check one keeps nobody from asking."""
        return super().busy and not isinstance(self._answering, Checking)

    def send(self, text: str, *, replaces: bool = False) -> None:
        if not self._after_check(lambda: self.send(text, replaces=replaces)):
            super().send(text, replaces=replaces)

    def edit(self, position: int, text: str) -> None:
        if not self._after_check(lambda: self.edit(position, text)):
            super().edit(position, text)

    def continue_answer(self) -> None:
        if not self._after_check(self.continue_answer):
            super().continue_answer()

    def handle_disagreement(self, event: Disagreement) -> None:
        """Of a check one hears at its end."""
        if not isinstance(self._answering, Checking) or self._general().disagreement == "mine":
            super().handle_disagreement(event)

    def check(self) -> None:
        """Have the verifier, if it is there, check what was written without it, one answer after the other."""
        chat = self._engine.chat
        if self._answering is not None or chat is None or chat.status is not LinkStatus.ONLINE:
            return
        checking = self._try(lambda: self._checks.next(self.current), None)
        if checking is not None and (mark := checking.written.unconfirmed) is not None:
            self._answering = checking
            messages = self._try(lambda: self.history.messages(checking.chat), [])
            turns = self.turns_of(self.settings_of(checking.chat), messages)
            before = len(turns) - len(messages)  # the instructions
            self._engine.check(turns, replace(mark, turn=checking.position + before))
        elif self._checks.any_done:
            words, before = self._checks.report()
            self.told.emit(words, "Undo" if before else "", lambda: self._undo(before))

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
        wanted, self._wanted = self._wanted, None
        settled = checking.done and self._try(lambda: self._checks.settle(checking), False)
        refused = problem is not None and (chat := self._engine.chat) is not None and chat.status is LinkStatus.ONLINE
        if refused:
            self._try(lambda: self._checks.give_up(checking), None)
        if checking.chat == self.current:
            self._show_stored(checking.chat)
        if problem is not None:
            self.told.emit(as_sentence(str(problem)), "", None)
        if wanted is not None:
            wanted()
        elif settled or refused:
            self.check()

    def _after_check(self, wanted: Callable[[], None]) -> bool:
        """End a check that runs, and do what the user wants then; says whether one ran."""
        if not isinstance(self._answering, Checking):
            return False
        self._wanted = wanted
        self.stop()
        return True

    def _undo(self, before: list[tuple[int, int, Message]]) -> None:
        self._try(lambda: self._checks.undo(before), None)
        if self.current is not None and not self.busy:
            self._show_stored(self.current)

    def _show_stored(self, chat: int) -> None:
        """Show the open chat's messages as they are stored, where they stand."""
        for position, message in enumerate(self._try(lambda: self.history.messages(chat), [])[: len(self.messages)]):
            self.messages[position] = message.settled
            self.message_changed.emit(position, message.settled)
