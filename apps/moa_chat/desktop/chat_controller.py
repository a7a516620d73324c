"""What happens to conversations: asking, answering, storing, editing. Knows no widgets."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer, Signal

from moa_chat.desktop.open_chat import OpenChat
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.runtime_thread import Engine
from moa_chat.desktop.stats_panel import figures, round_trip
from moa_chat.desktop.streaming_answer import Answering, answering_again
from moa_chat.history.message import title_of
from moa_chat.history.store import History
from moa_chat.sampling import sampling_of
from moa_chat.strings import PAUSES, as_sentence, corrected_sentence, reading_words
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, Disagreement, LinkStatus, Paused, Statistics

_SAVE_MS = 700  # a crash loses at most what came after
_PATIENCE_MS = 800  # until it is said what one waits for


class ChatController(OpenChat):
    """The answer that is being written, in the open conversation or perhaps in another one.

    Signals:
        busy_changed: whether an answer is being written.
        figures_changed: the answer's figures, a list of Figure.
        round_seen: one more Round.
        round_trip_changed: seconds.
        waiting: why there is no text yet.
        context_changed: how many tokens the open chat takes, and how many the target can read; 0 where not known.
        corrected: a sentence about words of the device that the server has replaced, and what takes that back.
        disagreed: the server would have written something else, and the user has to say what counts.
    """

    busy_changed = Signal(bool)
    figures_changed = Signal(list)
    round_seen = Signal(object)
    round_trip_changed = Signal(float)
    waiting = Signal(str)
    context_changed = Signal(int, int)
    corrected = Signal(str, object)
    disagreed = Signal(object)

    def __init__(
        self,
        engine: Engine,
        history: History,
        settings: Callable[[], Settings],
        options: argparse.Namespace,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(history, settings, parent)
        self._engine, self._options = engine, options
        self._last: Answering | None = None
        self._clock = QTimer(self)
        self._clock.setSingleShot(True)
        self._clock.timeout.connect(self._save)
        self._patience = QTimer(self)
        self._patience.setSingleShot(True)
        self._patience.timeout.connect(self._say_what_is_read)
        self.opened.connect(self.measure_context)
        engine.events.connect(self._take)
        engine.ended.connect(self._ended)
        engine.reopened.connect(self._reopened)
        engine.pending.connect(self._go_on)

    @property
    def busy(self) -> bool:
        return self._answering is not None

    @property
    def statistics(self) -> Statistics:
        """Of the answer that is being written, or of the last one."""
        latest = self._answering or self._last
        return latest.statistics if latest is not None else Statistics()

    def delete(self, chat: int) -> None:
        if self._answering is not None and self._answering.chat == chat:
            self.stop()
        super().delete(chat)

    # -- asking --------------------------------------------------------------------------------

    def send(self, text: str, *, replaces: bool = False) -> None:
        """Ask in the open chat; ``replaces``: in place of stored turns."""
        ready = not self.busy and self._engine.chat is not None
        if ready and self.current is None:
            self.current = self._try(lambda: self.history.create(title_of(text), self.settings), None)
            self._own = self.settings
        if not ready or self.current is None:
            self.returned.emit(text)
            return
        settings, turns = self.settings, self.turns
        sampling = sampling_of(settings, self._engine.recommended, self._options.seed)
        self._answering = Answering(self.current, len(self.messages) + 1, text, sampling, replaces=replaces)
        for message in self._answering.turns:
            self._put(len(self.messages), message)
        self._engine.ask(turns, text, max_new_tokens=settings.max_new_tokens, sampling=sampling)
        self._patience.start(_PATIENCE_MS)
        self.busy_changed.emit(True)
        self.chats_changed.emit()

    def stop(self) -> None:
        """End the answer where it is confirmed."""
        self._engine.stop()

    def again(self) -> None:
        """Write the last answer once more."""
        asked = [number for number, message in enumerate(self.messages) if message.role == "user"]
        if asked and not self.busy:
            self.edit(asked[-1], self.messages[asked[-1]].content)

    def continue_answer(self) -> None:
        """Go on with the last answer, which was cut off."""
        last, chat = self.messages[-1] if self.messages else None, self.current
        if self.busy or self._engine.chat is None or chat is None or last is None or not last.can_go_on:
            return
        if last.target not in ("", self._engine.target):
            self.told.emit("Another model wrote this answer, and only that one can continue it.", "", None)
            return
        settings, turns, position = self.settings, self.turns, len(self.messages) - 1
        question = self.messages[position - 1].content
        self._answering = Answering(chat, position, question, last.cut_off, before=last)
        self._show(self._answering)
        self._save()
        self._engine.continue_answer(turns, max_new_tokens=settings.max_new_tokens, sampling=last.cut_off)
        self.busy_changed.emit(True)

    def edit(self, position: int, text: str) -> None:
        """Ask the question at a position in other words; what followed is gone with the first words of an answer."""
        if self.busy or self._engine.chat is None:
            return
        del self.messages[position:]
        self.truncated.emit(position)
        self.send(text, replaces=True)

    def measure_context(self) -> None:
        """Say how full the target's context is; of an answer under way it is said as it is written."""
        chat = self.current

        def say(tokens: int) -> None:
            if chat == self.current and not self.busy:
                self.context_changed.emit(tokens, self._engine.max_context)

        self._engine.count(self.turns, say)

    def close(self) -> None:
        """Store the answer that is being written as it stands."""
        self._clock.stop()
        self._save()

    def settle(self, mine: bool) -> None:
        """The user's word on a disagreement; without it the server's version stands."""
        if mine:
            self._engine.keep_mine()

    # -- the answer ----------------------------------------------------------------------------

    def _take(self, events: list[ChatEvent]) -> None:
        """All that came since the last tick; the page is changed once."""
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
                    self.waiting.emit(PAUSES[event.reason])
        self._show(answering)
        if answering.ended_alone:
            self._engine.stop()
        if answering.replaces and answering.confirmed:
            answering.replaces = False
            self._store_turns(answering)
        if not self._clock.isActive():
            self._clock.start(_SAVE_MS)

    def handle_disagreement(self, event: Disagreement) -> None:
        """Ask the user, or do what is set, and say so."""
        choice = self._general().disagreement
        if choice == "ask":
            self.disagreed.emit(event)
        elif choice == "mine":
            self.settle(True)
        else:
            self.corrected.emit(corrected_sentence(len(event.dropped_text.split())), lambda: self.settle(True))

    def _show(self, answering: Answering) -> None:
        if answering.chat == self.current:
            self.messages[answering.position] = answering.message
            self.message_changed.emit(answering.position, answering.message)
            if answering.tokens and answering.position == len(self.messages) - 1:
                self.context_changed.emit(self._engine.prompt_tokens + answering.tokens, self._engine.max_context)
        self.figures_changed.emit(figures(answering.statistics, answering.words_a_token))
        self.round_trip_changed.emit(round_trip(answering.statistics))

    def _save(self) -> None:
        if self._answering is not None and not self._answering.replaces:
            self._store_turns(self._answering)

    def _store_turns(self, answering: Answering) -> None:
        """Question and answer at once: neither is there without the other, whatever the disk could not do before."""
        answering.message = dataclasses.replace(answering.message, target=self._engine.target)
        self._try(lambda: self.history.replace(answering.chat, answering.position - 1, answering.turns), None)

    def _say_what_is_read(self) -> None:
        """Nothing has come for a while, and the link is there: the target reads."""
        answering, chat = self._answering, self._engine.chat
        if answering is None or chat is None or answering.message.content or chat.status is not LinkStatus.ONLINE:
            return
        if answering.chat == self.current:
            self.waiting.emit(reading_words(chat.new_tokens))

    def _ended(self, problem: MoaError | None) -> None:
        answering, self._answering = self._answering, None
        self._clock.stop()
        if answering is None:
            return
        if not answering.message.finished:
            left = None if answering.replaces else self._engine.left_alone(answering.position)
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
            self.told.emit(as_sentence(str(problem)), "", None)

    def _reopened(self) -> None:
        self._answering = self._last
        self.busy_changed.emit(True)

    def _go_on(self, turns: list[dict[str, str]], question: str) -> None:
        """The answer that was being written when the window was closed, unless its chat is gone."""
        answering = self._try(lambda: answering_again(self.history, turns, question), None)
        if answering is not None and not self.busy:
            self._answering = answering
            if self.current in (None, answering.chat):
                self.open_chat(answering.chat)
            self._engine.go_on()
            self.busy_changed.emit(True)

    def _take_back(self, answering: Answering) -> None:
        """Nothing came: the question goes back to where it was written, and what it was to replace stays."""
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
