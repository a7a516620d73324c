"""The open conversation: shown, stored, with settings of its own. Knows no widgets and asks nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from PySide6.QtCore import QObject, Signal

from moa_chat.desktop.profile import Settings
from moa_chat.desktop.streaming_answer import Answering
from moa_chat.history.chat_settings import ChatSettings
from moa_chat.history.message import Message
from moa_chat.history.store import History
from moa_chat.strings import as_sentence
from moa_runtime.errors import MoaError

T = TypeVar("T")


class OpenChat(QObject):
    """The base of :class:`~moa_chat.desktop.chat_controller.ChatController`, which is the class to use.

    Args:
        general: the program's settings as they are now.

    Attributes:
        current: id of the open chat; None for a new one without messages.
        messages: of the open chat.

    Signals:
        chats_changed: the list of chats is another.
        opened: another conversation is open.
        message_changed: the message at this position is another, or there is one more.
        truncated: the messages from this position on are gone.
        returned: a question that could not be asked, for the composer.
        told: a sentence for the user; a button's text; what it does.
    """

    chats_changed = Signal()
    opened = Signal()
    message_changed = Signal(int, object)
    truncated = Signal(int)
    returned = Signal(str)
    told = Signal(str, str, object)

    def __init__(self, history: History, general: Callable[[], Settings], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.current: int | None = None
        self.messages: list[Message] = []
        self.history = history
        self._general = general
        self._own: ChatSettings | None = None  # of the open chat
        self._answering: Answering | None = None  # what is being written, perhaps in another chat

    @property
    def settings(self) -> ChatSettings:
        """Of the open chat; one that has none of its own follows the program's."""
        return self._own or self._general().of_new_chats

    @property
    def turns(self) -> list[dict[str, str]]:
        """Of the open chat, its instructions included, as the runtime gets them."""
        return self.turns_of(self.settings, self.messages)

    @staticmethod
    def turns_of(settings: ChatSettings, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Of any chat."""
        before = [{"role": "system", "content": settings.system}] if settings.system else []
        return before + [message.turn for message in messages]

    def change_settings(self, settings: ChatSettings) -> None:
        """They count from the open chat's next question on."""
        self._own = settings
        if (chat := self.current) is not None:
            self._try(lambda: self.history.change_settings(chat, settings), None)

    def settings_of(self, chat: int) -> ChatSettings:
        """Of any chat."""
        if chat == self.current:
            return self.settings
        return self._try(lambda: self.history.settings(chat), None) or self._general().of_new_chats

    # -- chats ---------------------------------------------------------------------------------

    def new_chat(self) -> None:
        """It is stored with its first question."""
        self.current, self.messages, self._own = None, [], None
        self.opened.emit()
        self.chats_changed.emit()

    def open_chat(self, chat: int) -> None:
        running, stored = self._answering, self._try(lambda: self.history.messages(chat), None)
        if stored is None:  # what is asked in it would take the place of what could not be read
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
        """Take a chat out of the list; the user may take that back."""
        self._try(lambda: self.history.delete(chat), None)
        self.told.emit("The chat was deleted.", "Undo", lambda: self._undelete(chat))
        if chat == self.current:
            self.new_chat()
        self.chats_changed.emit()

    def _undelete(self, chat: int) -> None:
        self._try(lambda: self.history.restore(chat), None)
        self.open_chat(chat)

    # -- storing -------------------------------------------------------------------------------

    def _drop_last(self) -> str:
        """Take the last question out of the open chat, and the chat out of the list if that was all."""
        question = self.messages[-1].content
        self._truncate(len(self.messages) - 1)
        if not self.messages and self.current is not None:
            chat, self.current = self.current, None
            self._try(lambda: self.history.delete(chat), None)
            self.chats_changed.emit()
        return question

    def _truncate(self, length: int) -> None:
        del self.messages[length:]
        if (chat := self.current) is not None:
            self._try(lambda: self.history.truncate(chat, length), None)
        self.truncated.emit(length)

    def _put(self, position: int, message: Message) -> None:
        self.messages.append(message)
        assert self.current is not None
        self._store(self.current, position, message)
        self.message_changed.emit(position, message)

    def _store(self, chat: int, position: int, message: Message) -> None:
        running = self._answering
        if running is not None and running.replaces and running.chat == chat:
            return
        self._try(lambda: self.history.save(chat, position, message), None)

    def _try(self, does: Callable[[], T], otherwise: T) -> T:
        """What the history cannot do is said, and the chat goes on."""
        try:
            return does()
        except MoaError as error:
            self.told.emit(as_sentence(str(error)), "", None)
            return otherwise
