"""``moa-chat --terminal``: questions and answers until the user leaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from moa_chat.keys import Keyboard, watch_keyboard
from moa_chat.screen import View, view_for
from moa_chat.setup import Setup
from moa_chat.status import Palette, status_line, summary, tentative_spans
from moa_chat.text import Span, clean
from moa_chat.worker import ChatLike, RunningAnswer, Worker
from moa_runtime.answer import AnswerFinished, AnswerUpdate, FinishReason, LinkChanged, LinkStatus, Statistics
from moa_runtime.errors import MoaError

_HELP = """\
/help      this list
/offline   work without the verifier, or with it again
/stats     figures of the last answer
/quit      leave (also Ctrl-D, or Ctrl-C twice)
While an answer is written: Ctrl-C stops it, Tab switches between offline and online."""


def run_terminal(setup: Setup) -> int:
    """Connect and chat until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing and a history)
    # input() must run in the main thread: a thread that waits in it cannot be interrupted by Ctrl-C.
    # So the chat's event loop gets the other thread, which also keeps the link alive between questions.
    worker = Worker()
    try:
        chat = worker.run(setup.connect())
        try:
            Terminal(setup, worker, chat, view_for(sys.stdout), input).loop()
        finally:
            worker.run(chat.close())
    finally:
        worker.close()
    return 0


class Terminal:
    """The dialogue with the user.

    Args:
        read_line: shows a prompt and returns a line, like ``input``.
    """

    def __init__(
        self, setup: Setup, worker: Worker, chat: ChatLike, view: View, read_line: Callable[[str], str]
    ) -> None:
        self._setup, self._worker, self._chat = setup, worker, chat
        self._view, self._read_line = view, read_line
        self._palette = Palette.from_environment()
        self._offline = False  # by the user's wish
        self._last: Statistics | None = None
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._say(_HELP),
            "/offline": self._toggle_offline,
            "/stats": self._show_statistics,
        }

    def loop(self) -> None:
        """Until ``/quit``, the end of the input, or Ctrl-C twice."""
        self._say(f"{self._setup.target} at {self._setup.server}; /help lists the commands, Ctrl-C stops an answer")
        interrupted = False
        while True:
            try:
                line = self._read_line(self._prompt()).strip()
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
                self._say("Ctrl-C again or Ctrl-D leaves; /help lists the commands")

    # -- lines ---------------------------------------------------------------------------------

    def _prompt(self) -> str:
        link = self._chat.status
        return "you> " if link is LinkStatus.ONLINE else f"({link.value}) you> "

    def _handle(self, line: str) -> None:
        if not line:
            return
        if line in self._commands:
            self._commands[line]()
        elif line.startswith("/"):
            self._complain(f"there is no command {line.split()[0]}; /help lists them")
        else:
            self._answer(line)

    def _toggle_offline(self) -> None:
        self._offline = not self._offline
        self._worker.run(self._chat.work_offline(self._offline))
        self._say(
            "working offline: answers stay tentative; /offline connects again" if self._offline else "connecting again"
        )

    def _show_statistics(self) -> None:
        if self._last is None:
            self._say("no answer yet")
            return
        for name, value in self._last.as_dict().items():
            self._say(f"{name.replace('_', ' '):20} {'-' if value is None else value}")

    def _say(self, text: str) -> None:
        self._view.write(Span(clean(text), self._palette.quiet))

    def _complain(self, text: str) -> None:
        self._view.write(Span(clean(f"error: {text}"), self._palette.error))

    # -- an answer -----------------------------------------------------------------------------

    def _answer(self, question: str) -> None:
        shown = _Shown(self._chat.status)
        problem: MoaError | None = None
        with watch_keyboard() as keyboard:
            running = self._worker.ask(self._chat, question, self._setup.max_new_tokens, self._setup.sampling())
            try:
                self._follow(running, shown, keyboard)
            except MoaError as error:
                problem = error
            finally:
                running.stop()
                self._view.finish(shown.confirmed)
        self._last = shown.statistics
        if problem is not None:
            self._complain(str(problem))
        if problem is None or shown.confirmed:
            self._say(summary(shown.reason, shown.statistics))
        self._view.write()

    def _follow(self, running: RunningAnswer, shown: _Shown, keyboard: Keyboard) -> None:
        while not running.ended:
            for event in running.events():
                shown.take(event)
            if keyboard.interrupts:
                running.stop()
            if "\t" in keyboard.pressed():  # no letter, which could be typed ahead
                self._offline = not self._offline
                self._worker.run(self._chat.work_offline(self._offline))
            hint = f"Tab: go {'online' if self._offline else 'offline'}" if keyboard.reads_keys else ""
            status = status_line(shown.link, shown.detail, shown.update, self._palette, hint)
            tentative = []
            if shown.update is not None:
                tentative = tentative_spans(shown.update, self._chat.tokenizer.decode, self._palette)
            self._view.draw(shown.confirmed, tentative, status)


class _Shown:
    """What is known of the answer on the screen."""

    def __init__(self, link: LinkStatus) -> None:
        self.link, self.detail = link, ""
        self.update: AnswerUpdate | None = None
        self.confirmed = ""
        self.reason: FinishReason | None = None
        self.statistics = Statistics()

    def take(self, event: AnswerUpdate | LinkChanged | AnswerFinished) -> None:
        if isinstance(event, LinkChanged):
            self.link, self.detail = event.status, event.detail
        elif isinstance(event, AnswerUpdate):
            self.update, self.confirmed, self.statistics = event, event.committed, event.statistics
        else:
            self.update, self.confirmed, self.statistics = None, event.text, event.statistics
            self.reason = event.reason
