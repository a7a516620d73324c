"""A chat with the target: the runtime's front door.

>>> async with await Chat.connect(bundle, Endpoint("ws://127.0.0.1:8765")) as chat:   # doctest: +SKIP
...     async for event in chat.send("Name three primary colours."):
...         ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType

from moa_runtime.answer import AnswerFinished, AnswerUpdate, ChatEvent, LinkChanged, LinkStatus, Statistics, TokenOrigin
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.control import Controller, FixedLength
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.driver import Driver, DriverSettings
from moa_runtime.errors import MoaError
from moa_runtime.sequences import common_length
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Event, Finished, Policy, Sampling
from moa_runtime.timeline import Timeline
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint
from moa_runtime.wire.moa.v1 import session_pb2 as wire


class ChatError(MoaError):
    """An answer that cannot go on: the verifier refused it, or the conversation does not fit."""


class Chat:
    """One conversation. It keeps its history over turns and survives lost connections.

    Use :meth:`connect`; every method must be called in the event loop it was called in.

    Attributes:
        messages: the turns so far, ``{"role": ..., "content": ...}``, finished answers included.
        status: the link as the user should see it.
    """

    def __init__(
        self,
        bundle: Bundle,
        endpoint: Endpoint,
        *,
        drafter: Drafter | None,
        controller: Controller | None = None,
        policy: Policy = Policy.ROLLBACK,
        settings: DriverSettings | None = None,
        system: str | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.tokenizer = ChatTokenizer.from_bundle(bundle)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        manifest = bundle.manifest
        self._session = ClientSession(
            manifest.fingerprints,
            stop_tokens=manifest.stop_tokens,
            policy=policy,
            # Nobody would read the memory rows, and they are most of what a verdict weighs.
            row_encoding=wire.ROW_ENCODING_INT8 if drafter else wire.ROW_ENCODING_UNSPECIFIED,
        )
        self._max_context = manifest.max_context
        self._drafter = drafter
        self._updates: asyncio.Queue[ChatEvent | ChatError] = asyncio.Queue()
        self._answer: list[TokenOrigin] = []
        self._answer_start = 0
        self._asked_at = 0.0
        self._bytes_before = (0, 0)
        self._refusal: ChatError | None = None
        self._first_connection: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop_task: asyncio.Task[None] | None = None
        self._driver = Driver(
            self._session,
            drafter,
            controller or FixedLength(),
            endpoint,
            settings or DriverSettings(),
            on_event=self._on_event,
            on_tentative=self._publish,
            on_status=self._on_status,
            on_problem=self._on_problem,
            timeline=timeline,
        )

    @classmethod
    async def connect(
        cls,
        bundle: Bundle,
        endpoint: Endpoint,
        *,
        backend: str | None = None,
        threads: int = 2,
        controller: Controller | None = None,
        policy: Policy = Policy.ROLLBACK,
        settings: DriverSettings | None = None,
        system: str | None = None,
        timeline: Timeline | None = None,
    ) -> Chat:
        """Load the bundle's drafter and open the first connection.

        Args:
            backend: a key of :data:`moa_runtime.backends.load.BACKENDS`; the first that the bundle has a graph for
                when omitted.
            threads: of the backend.
            timeline: gets what the device does and when, see :class:`moa_runtime.driver.Driver`.

        Raises:
            ConnectError: no verifier answers there, or it refuses the token.
            MoaError: the verifier serves another target, tokenizer or drafter than the bundle's.
        """
        manifest = bundle.manifest
        drafter = MoaDrafter(
            load_backend(bundle, backend, threads=threads),
            max_context=manifest.max_context,
            stop_tokens=manifest.stop_tokens,
        )
        chat = cls(
            bundle,
            endpoint,
            drafter=drafter,
            controller=controller,
            policy=policy,
            settings=settings,
            system=system,
            timeline=timeline,
        )
        try:
            await chat.open()
        except BaseException:
            await chat.close()
            raise
        return chat

    async def __aenter__(self) -> Chat:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect for the first time; see :meth:`connect` for what it raises."""
        self._loop_task = asyncio.create_task(self._driver.run())
        self._loop_task.add_done_callback(self._on_loop_end)
        self._driver.go_online()
        await self._first_connection

    async def close(self) -> None:
        await self._driver.close()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)

    @property
    def status(self) -> LinkStatus:
        return self._driver.status

    @property
    def tokens(self) -> list[int]:
        """Tokens of the whole conversation that the target has confirmed."""
        return list(self._session.committed)

    async def work_offline(self, offline: bool) -> None:
        """Drop the connection and make no other, or connect again."""
        if offline:
            await self._driver.go_offline()
        else:
            self._driver.go_online()

    async def send(
        self, text: str, *, max_new_tokens: int = 512, sampling: Sampling | None = None
    ) -> AsyncGenerator[ChatEvent, None]:
        """Ask, and follow the answer as it is written; the last event is :class:`AnswerFinished`.

        Leaving the iteration early stops the answer where the target has confirmed it.

        Raises:
            ChatError: the conversation does not fit the target's context, or the verifier refused it.
        """
        if self._refusal is not None and self._driver.gave_up:
            raise self._refusal
        question = self.tokenizer.continue_chat(self._session.committed, self.messages, text)
        length = len(self._session.committed) + len(question)
        if length >= self._max_context:
            raise ChatError(
                f"the conversation would have {length} tokens, the target's context holds {self._max_context}; "
                "shorten the message or begin a new chat"
            )
        self._begin_answer(length)
        history = [*self.messages, {"role": "user", "content": text}]
        self._driver.post(lambda: self._session.prompt(question, sampling or Sampling(), max_new_tokens))
        finished = False
        try:
            while not finished:
                event = await self._updates.get()
                if isinstance(event, ChatError):
                    raise event
                if isinstance(event, AnswerFinished):
                    finished = True
                    self.messages = [*history, {"role": "assistant", "content": event.text}]
                yield event
        finally:
            if not finished:
                await self._stop_answer(history)

    # -- helpers -------------------------------------------------------------------------------

    def _begin_answer(self, start: int) -> None:
        while not self._updates.empty():
            self._updates.get_nowait()
        self._answer, self._answer_start = [], start
        self._asked_at = time.monotonic()
        self._bytes_before = self._driver.bytes_moved()
        self._driver.statistics = Statistics()

    async def _stop_answer(self, history: list[dict[str, str]]) -> None:
        """Cancel, and keep of question and answer what the target has confirmed."""
        stopped = asyncio.get_running_loop().create_future()

        def cancel() -> None:
            self._session.cancel()
            stopped.set_result(None)

        self._driver.post(cancel)
        await asyncio.wait({stopped, *([self._loop_task] if self._loop_task else [])}, return_when="FIRST_COMPLETED")
        if len(self._session.committed) >= self._answer_start:
            text = self.tokenizer.decode([token.token for token in self._answer])
            self.messages = [*history, {"role": "assistant", "content": text}]

    def _statistics(self) -> Statistics:
        statistics = self._driver.statistics
        up, down = self._driver.bytes_moved()
        statistics.bytes_up, statistics.bytes_down = up - self._bytes_before[0], down - self._bytes_before[1]
        statistics.seconds = time.monotonic() - self._asked_at
        return statistics.snapshot()

    # -- what the driver says ------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        statistics = self._driver.statistics
        if isinstance(event, Committed):
            if statistics.first_token_seconds is None:
                statistics.first_token_seconds = time.monotonic() - self._asked_at
            self._answer += [TokenOrigin(t, o, True) for t, o in zip(event.tokens, event.origins, strict=True)]
            self._publish()
        elif isinstance(event, Finished):
            text = self.tokenizer.decode([token.token for token in self._answer])
            self._updates.put_nowait(AnswerFinished(text, tuple(self._answer), event.reason, self._statistics()))

    def _publish(self) -> None:
        unconfirmed = self._session.unconfirmed
        committed = self.tokenizer.decode([token.token for token in self._answer])
        whole = self.tokenizer.decode([*(token.token for token in self._answer), *(token for token, _ in unconfirmed)])
        # A character of several tokens may be committed in part: it counts as tentative.
        committed = committed[: common_length(committed, whole)]
        self._updates.put_nowait(
            AnswerUpdate(
                committed=committed,
                tentative=whole[len(committed) :],
                tokens=(*self._answer, *(TokenOrigin(token, origin, False) for token, origin in unconfirmed)),
                statistics=self._statistics(),
            )
        )

    def _on_status(self, status: LinkStatus, detail: str) -> None:
        self._updates.put_nowait(LinkChanged(status, detail))
        if status is LinkStatus.ONLINE and self._connecting():
            self._first_connection.set_result(None)

    def _on_problem(self, problem: MoaError, final: bool) -> None:
        if self._connecting():
            self._first_connection.set_exception(problem)
        elif final:
            self._refusal = ChatError(str(problem))
            self._updates.put_nowait(self._refusal)

    def _connecting(self) -> bool:
        return not self._first_connection.done()

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """The loop only ends by cancellation or by a defect, which must not leave the application waiting."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_problem(ChatError(f"the drafting loop failed: {error!r}"), True)
