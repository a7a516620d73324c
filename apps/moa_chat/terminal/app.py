"""``moa-chat --terminal``: a dialogue in the terminal."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial

from moa_chat import strings
from moa_chat.chat_config import ChatConfig
from moa_chat.loop_thread import LoopThread, RunningAnswer
from moa_chat.terminal.answer_state import AnswerState, Palette, ending, summary
from moa_chat.terminal.input import Keyboard, TypedAhead, read_line, watch_keyboard
from moa_chat.terminal.renderer import LiveView, PlainView, Span, clean, view_for
from moa_chat.transcript import save_conversation
from moa_runtime.chat import Chat
from moa_runtime.chat_store import StoreError
from moa_runtime.conversation import Unconfirmed
from moa_runtime.errors import MoaError, printable
from moa_runtime.events import Disagreement, FinishReason, LinkStatus, Statistics
from moa_runtime.reasoning import split_reasoning
from moa_runtime.transport import ConnectError

_EXCERPT_LENGTH = 70
#: How long ``/offline`` waits for the link, which is tried again after that, too.
_CONNECT_S, _POLL_S = 5.0, 0.05
_KEEP_KEY = "\x0b"  # Ctrl-K; like Tab no letter, which could be typed ahead


def run_terminal(config: ChatConfig) -> int:
    """Connect and chat until the user leaves."""
    # input() must run in the main thread: a thread that waits in it cannot be interrupted by Ctrl-C.
    # So the chat's event loop gets the other thread, which also keeps the link alive between questions.
    worker = LoopThread()
    try:
        view = view_for(sys.stdout)
        chat, note = _connect(config, worker, may_write=config.writes_offline and isinstance(view, LiveView))
        if note:
            print(f"moa-chat: {printable(note)}", file=sys.stderr)
        try:
            Terminal(config, worker, chat, view, read_line).loop()
        finally:
            worker.run(chat.close())
    finally:
        worker.close()
    return 0


def _connect(config: ChatConfig, worker: LoopThread, *, may_write: bool) -> tuple[Chat, str]:
    """Open the chat; return it with a note for the user.

    Without its verifier, a chat opens if it was kept, or if unchecked words can be shown (``may_write``; a pipe gets
    checked text only). A kept chat that another program has open is not used, unless the user named it.
    """
    try:
        return worker.run(config.connect()), ""
    except StoreError as error:
        if config.must_store:
            raise
        return worker.run(dataclasses.replace(config, store=None).connect()), strings.KEPT_NOWHERE.format(error)
    except ConnectError as error:
        if error.final or (config.store is None and not may_write):
            raise
        chat = worker.run(config.connect(wait=False))
        if chat.messages or chat.question:
            return chat, str(error)
        if may_write:
            return chat, strings.WRITER_ANSWERS.format(error)
        worker.run(chat.close())
        raise


class Terminal:
    """The dialogue with the user; ``read_line``: see :func:`moa_chat.terminal.input.read_line`."""

    def __init__(
        self, config: ChatConfig, worker: LoopThread, chat: Chat, view: PlainView, read_line: Callable[..., str]
    ) -> None:
        self._config, self._worker, self._chat = config, worker, chat
        self._view, self._read_line = view, read_line
        self._palette = Palette.from_environment()
        view.begins_reasoning = chat.tokenizer.begins_reasoning(config.thinking)
        view.reasoning_style = self._palette.quiet
        self._offline = False  # whether the user works offline
        self._put_off = False  # whether a check that did not end waits for the next question
        self._ahead = TypedAhead()
        self._last: Statistics | None = None
        self._tentative = 0  # tokens of the last answer that are not confirmed
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._say(strings.TERMINAL_HELP),
            "/offline": self._toggle_offline,
            "/stats": self._show_statistics,
            "/regen": self._regenerate,
            "/new": self._begin_anew,
        }

    def loop(self) -> None:
        """Read lines until ``/quit``, the end of the input, or Ctrl-C twice."""
        self._say(strings.TERMINAL_WELCOME.format(self._config.model_words, self._config.server))
        if not self._config.bundle.manifest.has_graph:
            self._say(strings.NO_DRAFTER)
        self._go_on()
        interrupted = False
        while True:
            try:
                if not self._put_off:
                    self._check()
                line = self._next_line().strip()
                interrupted = False
                if line == "/quit":
                    return
                self._handle(line)
            except EOFError:
                self._view.write()
                return
            except KeyboardInterrupt:
                self._view.write()
                if interrupted:
                    return
                interrupted = True
                self._say(strings.HOW_TO_LEAVE)

    def _prompt(self) -> str:
        link = self._chat.status
        return "you> " if link is LinkStatus.ONLINE else f"({link.value}) you> "

    def _next_line(self) -> str:
        line = self._ahead.take_line()
        if line is None:
            return self._read_line(self._prompt(), self._ahead.take_begun())
        self._view.write(Span(clean(self._prompt() + line)))
        return line

    def _handle(self, line: str) -> None:
        if not line:
            return
        if line in self._commands:
            self._commands[line]()
        elif line.split()[0] == "/save":
            self._save(line.removeprefix("/save").strip())
        elif line.startswith("/"):
            self._complain(strings.UNKNOWN_COMMAND.format(line.split()[0]))
        else:
            self._ask(line)

    def _toggle_offline(self) -> None:
        self._offline, self._put_off = not self._offline, False
        self._worker.run(self._chat.work_offline(self._offline))
        self._say(strings.NOW_OFFLINE if self._offline else strings.NOW_ONLINE)
        if self._offline:
            return
        # The prompt after it shows the link, and cannot be drawn anew while a line is edited.
        ends = time.monotonic() + _CONNECT_S
        while self._chat.status is not LinkStatus.ONLINE and time.monotonic() < ends:
            time.sleep(_POLL_S)
        online = self._chat.status is LinkStatus.ONLINE
        self._say(strings.ONLINE_AGAIN if online else strings.STILL_OFFLINE.format(self._chat.link.detail))

    def _show_statistics(self) -> None:
        if self._last is None:
            self._say(strings.NO_ANSWER_YET)
            return
        for name, value in self._last.as_dict().items():
            self._say(f"{name.replace('_', ' '):20} {'-' if value is None else value}")
        if self._tentative:
            self._say(f"{'tentative':20} {self._tentative}")

    def _regenerate(self) -> None:
        messages = self._chat.messages
        if not messages or messages[-1]["role"] != "assistant":
            self._say(strings.NO_ANSWER_YET)
            return
        marks = [mark for mark in self._chat.unconfirmed if mark.turn < len(messages) - 2]
        self._worker.call(self._chat.restore, messages[:-2], marks)
        self._ask(messages[-2]["content"])

    def _begin_anew(self) -> None:
        system = self._config.system
        self._worker.call(self._chat.restore, [{"role": "system", "content": system}] if system else [])
        self._say(strings.NEW_CONVERSATION)

    def _save(self, name: str) -> None:
        try:
            messages, may_overwrite = self._chat.messages, strings.MAY_OVERWRITE
            marked = [mark.turn for mark in self._chat.unconfirmed]
            saved = save_conversation(name, messages, lambda path: self._agrees(may_overwrite.format(path)), marked)
        except MoaError as error:
            self._complain(str(error))
        else:
            self._say(strings.NOT_SAVED if saved is None else strings.SAVED.format(saved))

    def _agrees(self, question: str) -> bool:
        return self._read_line(question).strip().lower() in ("y", "yes")

    def _say(self, text: str) -> None:
        self._view.write(Span(clean(text), self._palette.quiet))

    def _complain(self, text: str) -> None:
        self._view.write(Span(clean(f"error: {text}"), self._palette.error))

    def _go_on(self) -> None:
        """Show the conversation that was kept, and finish its answer."""
        if self._chat.store_problem:
            self._complain(self._chat.store_problem)
        turns = [message["content"] for message in self._chat.messages if message["role"] != "system"]
        pending = self._worker.call(self._chat.pending)
        if not turns and pending is None:
            return
        self._say(strings.CONTINUES)
        shown = [] if pending is not None else turns[-2:]
        if len(turns) > len(shown):
            self._say(strings.EARLIER_MESSAGES.format(len(turns) - len(shown)))
        for prompt, text in zip(("you> ", ""), shown, strict=False):
            self._view.write(Span(clean(prompt + text)))
        if pending is not None:
            self._view.write(Span(clean(f"you> {self._chat.question}")))
            self._settle(self._show(lambda: self._worker.follow(pending)))

    def _check(self) -> None:
        """Have the verifier, if it is there, check what was written without it."""
        self._put_off = False
        while not self._put_off and self._chat.unconfirmed and self._chat.status is LinkStatus.ONLINE:
            events = self._worker.call(self._chat.check)
            mark, turns = self._chat.unconfirmed[0], self._chat.messages
            self._say(strings.CHECKED)
            self._view.write(Span(clean(f"you> {turns[mark.turn - 1]['content']}")))
            self._put_off = True  # also if Ctrl-C raises an exception
            self._show(partial(self._worker.follow, events), mark)
            self._put_off = mark in self._chat.unconfirmed

    def _ask(self, question: str) -> None:
        self._check()
        most, sampling = self._config.max_new_tokens, self._config.sampling()
        send = partial(self._chat.send, question, max_new_tokens=most, sampling=sampling)
        before = len(self._chat.messages)
        shown = self._show(lambda: self._worker.follow(send()))
        marks = self._chat.unconfirmed
        if marks and marks[-1].turn > before and not (shown.confirmed or shown.left_behind):
            # It was stopped before the device's first words were drawn, so these are not kept.
            self._worker.call(self._chat.restore, self._chat.messages[:before], marks[:-1])
        self._settle(shown)

    def _settle(self, shown: AnswerState) -> None:
        """Ask which version counts, if the target disagreed."""
        if shown.disagreement is not None and self._wants_own(shown.disagreement, shown.confirmed):
            again = self._worker.call(self._chat.keep_mine)
            if again is not None:
                self._show(lambda: self._worker.follow(again))

    def _wants_own(self, disagreement: Disagreement, answer: str) -> bool:
        self._say(strings.DIFFERS)
        self._say(f"  server: {strings.excerpt(answer[disagreement.offset :], _EXCERPT_LENGTH)}")
        self._say(f"  mine:   {strings.excerpt(disagreement.dropped_text, _EXCERPT_LENGTH)}")
        return self._agrees(strings.KEEP_MINE_ASKED)

    def _show(self, begin: Callable[[], RunningAnswer], mark: Unconfirmed | None = None) -> AnswerState:
        """Draw an answer while it is written, and its figures after it; ``mark`` is that of an answer being checked."""
        shown = AnswerState(self._chat.link)
        problem: MoaError | None = None
        with watch_keyboard() as keyboard:
            try:
                self._follow(begin(), shown, keyboard)
            except MoaError as error:
                problem = error
            finally:
                self._view.finish(shown.confirmed, [Span(shown.left_behind, self._palette.offline)])
                self._ahead.add(keyboard.pressed())
        self._last, self._tentative = shown.statistics, shown.tentative_tokens
        if mark is not None and mark in self._chat.unconfirmed:
            self._say(strings.CHECK_STOPPED)
        elif shown.left_behind and isinstance(self._view, LiveView):
            self._say(shown.words_left(checked=bool(self._chat.unconfirmed)))
        if problem is not None:
            self._complain(str(problem))
        if not self._ends_alone(shown) and (problem is None or shown.confirmed):
            answer = split_reasoning(shown.confirmed, begun=self._view.begins_reasoning).answer
            # An answer that was stopped may not grow when it is checked: then the limit is its length, not the option.
            stopped = mark is not None and mark.most != self._config.max_new_tokens
            reason = None if stopped and shown.reason is FinishReason.LENGTH else shown.reason
            note = ending(reason, answer, as_json=self._config.schema is not None)
            self._say(summary(note, shown.statistics))
        self._view.write()
        return shown

    def _ends_alone(self, shown: AnswerState) -> bool:
        return isinstance(self._view, LiveView) and shown.ended_alone(wanted_offline=self._offline)

    def _follow(self, running: RunningAnswer, shown: AnswerState, keyboard: Keyboard) -> None:
        try:
            while not running.ended:
                for event in running.events():
                    shown.take(event)
                if keyboard.interrupts or self._ends_alone(shown):
                    running.stop()
                keys = keyboard.pressed()
                self._ahead.add(keys)
                if "\t" in keys:
                    self._offline = not self._offline
                    self._worker.run(self._chat.work_offline(self._offline))
                if "\n" in keys and shown.at_limit:
                    running.stop()
                if _KEEP_KEY in keys and shown.disagreement is not None and shown.reason is None:
                    running = self._keep(running, shown)
                status = shown.status(self._palette, wanted_offline=self._offline, hint=self._hint(shown, keyboard))
                self._view.draw(shown.confirmed, shown.tentative(self._palette), status)
        except BaseException as error:
            if not isinstance(error, SystemExit):  # on SystemExit the answer is kept, and continues at the next start
                running.stop()
            raise

    def _keep(self, running: RunningAnswer, shown: AnswerState) -> RunningAnswer:
        """Continue the answer from the device's text; it is drawn anew, as confirmed rows are never drawn twice."""
        shown.disagreement = None
        self._view.finish(shown.confirmed)
        again = self._worker.call(self._chat.keep_mine)
        if again is not None:  # it has just ended
            return self._worker.follow(again)
        running.events(wait=0)  # these are about the text that is taken back
        return running

    def _hint(self, shown: AnswerState, keyboard: Keyboard) -> str:
        if not keyboard.reads_keys:
            return ""
        if shown.disagreement is not None:
            return strings.KEEP_KEY
        if shown.at_limit:
            return strings.ASK_ON_KEY
        if self._offline:
            return strings.ONLINE_KEY
        return strings.STAY_OFFLINE_KEY if shown.away else strings.OFFLINE_KEY
