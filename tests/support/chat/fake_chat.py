"""A chat that plays a script of real events; one token is one character."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from moa_chat.chat_config import ChatConfig
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Statistics,
    TextSpan,
    TokenOrigin,
    WholeAnswer,
)
from moa_runtime.transport import Endpoint

HANG = object()  # in a script: from here on nothing comes; a float: nothing for this number of seconds


def origins(committed: str, drafted: str = "", offline: str = "") -> tuple[TokenOrigin, ...]:
    return (
        *(TokenOrigin(ord(char), Origin.DRAFTED, True) for char in committed),
        *(TokenOrigin(ord(char), Origin.DRAFTED, False) for char in drafted),
        *(TokenOrigin(ord(char), Origin.OFFLINE, False) for char in offline),
    )


def figures(tokens: int) -> Statistics:
    return Statistics(rounds=tokens // 2, tokens=tokens, seconds=0.5, round_trips=[0.063])


def update(committed: str, drafted: str = "", offline: str = "") -> AnswerUpdate:
    spans = (
        TextSpan(committed, Origin.DRAFTED, True),
        TextSpan(drafted, Origin.DRAFTED, False),
        TextSpan(offline, Origin.OFFLINE, False),
    )
    tokens, texts = origins(committed, drafted, offline), tuple(span for span in spans if span.text)
    whole = committed + drafted + offline
    return AnswerUpdate.of(WholeAnswer(tokens, texts, tuple(whole), figures(len(committed))))


def finished(text: str, reason: FinishReason = FinishReason.STOP) -> AnswerFinished:
    return AnswerFinished(text, origins(text), reason, figures(len(text)), pieces=tuple(text))


class FakeChat:
    """Each question takes the next script; an exception in it is raised.

    Attributes:
        asked: the questions.
        stopped: how many answers were left early.
        worked_offline: what ``work_offline`` was told.
        pending_script: of the answer that was under way when the program before ended.
        kept: how often the device's text was to be kept.
        marks: of the unconfirmed turns.
    """

    tokenizer = SimpleNamespace(
        begins_reasoning=lambda thinking: False, token_bytes=lambda token: chr(token).encode(), stop_tokens=frozenset()
    )

    def __init__(self, *scripts) -> None:
        self._scripts = list(scripts)
        self.asked: list[str] = []
        self.sampling = []
        self.stopped = 0
        self.worked_offline: list[bool] = []
        self.closed = False
        self.status = LinkStatus.ONLINE
        self.messages: list[dict[str, str]] = []
        self.kept = 0
        self.question = self.store_problem = ""
        self.pending_script = None
        self.marks = []

    @property
    def link(self) -> LinkChanged:
        return LinkChanged(self.status)

    def restore(self, messages, unconfirmed=()) -> None:
        self.messages, self.marks = list(messages), list(unconfirmed)

    @property
    def unconfirmed(self):
        return tuple(self.marks)

    def check(self):
        """The next script is what the first unconfirmed answer becomes."""
        return self._check()

    async def _check(self):
        if not self.marks or self.status is not LinkStatus.ONLINE:
            return
        async with contextlib.aclosing(self._play(self._scripts.pop(0))) as events:
            async for event in events:
                if isinstance(event, AnswerFinished):
                    mark = self.marks.pop(0)
                    self.messages[mark.turn] = {"role": "assistant", "content": event.text}
                yield event

    def pending(self):
        """The script of an answer of the program before."""
        script, self.pending_script = self.pending_script, None
        return None if script is None else self._play(script)

    def keep_mine(self):
        """As after an answer: the next script is what is written now."""
        self.kept += 1
        return self._play(self._scripts.pop(0))

    async def send(self, text, *, max_new_tokens=512, sampling=None):
        self.asked.append(text)
        self.sampling.append(sampling)
        async with contextlib.aclosing(self._play(self._scripts.pop(0))) as events:
            async for event in events:
                if isinstance(event, AnswerFinished):
                    turns = {"role": "user", "content": text}, {"role": "assistant", "content": event.text}
                    self.messages = [*self.messages, *turns]
                yield event

    async def _play(self, script):
        completed = False
        try:
            for step in script:
                if step is HANG:
                    await asyncio.Event().wait()
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif callable(step):
                    step()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
                    await asyncio.sleep(0)
            completed = True
        finally:
            self.stopped += not completed

    async def work_offline(self, offline: bool) -> None:
        self.worked_offline.append(offline)
        self.status = LinkStatus.OFFLINE if offline else LinkStatus.ONLINE

    async def close(self) -> None:
        self.closed = True


class FakeChatConfig(ChatConfig):
    """A config that connects to a fake chat."""

    def __init__(self, chat: FakeChat | None = None, **options) -> None:
        manifest = SimpleNamespace(target="tiny-target", target_parameters=135e6, writer=None, has_graph=True)
        options.setdefault("bundle", SimpleNamespace(manifest=manifest))
        options.setdefault("endpoint", Endpoint("ws://127.0.0.1:8765"))
        super().__init__(**options)
        object.__setattr__(self, "chat", chat)

    async def connect(self) -> FakeChat:
        return self.chat
