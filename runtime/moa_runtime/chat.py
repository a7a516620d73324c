"""A chat with the target: the runtime's front door.

>>> async with await Chat.connect(bundle, Endpoint("ws://127.0.0.1:8765")) as chat:   # doctest: +SKIP
...     async for event in chat.send("Name three primary colours."):
...         ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from moa_runtime.answer import AnswerFinished, AnswerUpdate, ChatEvent, LinkChanged, Paused
from moa_runtime.answer_record import AnswerRecord
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.chat_link import ChatLink
from moa_runtime.control import Controller
from moa_runtime.conversation import Conversation, Question
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.for_bundle import drafter_for
from moa_runtime.errors import ChatError, ContextFullError
from moa_runtime.loop_events import Drafted, LoopEvent, PauseBegan
from moa_runtime.loop_settings import LoopSettings
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Finished, Policy, RolledBack, Sampling
from moa_runtime.timeline import Timeline
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint, Timing
from moa_runtime.wire.moa.v1 import session_pb2 as wire

__all__ = ["Chat", "ChatError", "ContextFullError"]


class Chat(ChatLink):
    """One conversation. It keeps its history over turns and survives lost connections.

    Use :meth:`connect`; every method must be called in the event loop it was called in.

    Attributes:
        tokenizer: the bundle's.
    """

    def __init__(
        self,
        bundle: Bundle,
        endpoint: Endpoint,
        *,
        drafter: Drafter | None,
        controller: Controller | None = None,
        policy: Policy = Policy.ROLLBACK,
        settings: LoopSettings | None = None,
        timing: Timing | None = None,
        system: str | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.tokenizer = ChatTokenizer.from_bundle(bundle)
        self._conversation = Conversation(self.tokenizer, system)
        manifest = bundle.manifest
        session = ClientSession(
            manifest.fingerprints,
            stop_tokens=manifest.stop_tokens,
            policy=policy,
            # Nobody would read the memory rows, and they are most of what a verdict weighs.
            row_encoding=wire.ROW_ENCODING_INT8 if drafter else wire.ROW_ENCODING_UNSPECIFIED,
        )
        super().__init__(session, endpoint, drafter, controller, settings, timing, timeline)
        self._max_context = manifest.max_context
        self._following = False
        self._record = self._new_record(Question([], 0, []))

    @classmethod
    async def connect(
        cls,
        bundle: Bundle,
        endpoint: Endpoint,
        *,
        backend: str | Backend | None = None,
        threads: int = 2,
        ngrams: bool = True,
        controller: Controller | None = None,
        policy: Policy = Policy.ROLLBACK,
        settings: LoopSettings | None = None,
        timing: Timing | None = None,
        system: str | None = None,
        timeline: Timeline | None = None,
        wait: bool = True,
    ) -> Chat:
        """Load the bundle's drafter and open the first connection.

        Args:
            backend: a key of :data:`moa_runtime.backends.load.BACKENDS`; the first that the bundle has a graph for
                when omitted. Or one that is loaded, for several chats a
                :class:`~moa_runtime.backends.shared.SharedBackend`.
            threads: of a backend that is to be loaded.
            ngrams: also copy from the conversation, see :func:`moa_runtime.drafters.for_bundle.drafter_for`.
            timeline: gets what the device does and when, see :class:`moa_runtime.driver.Driver`.
            wait: see :meth:`open`.

        Raises:
            ConnectError: no verifier answers there, or it refuses the token.
            MoaError: the verifier serves another target, tokenizer or drafter than the bundle's.
        """
        if backend is None or isinstance(backend, str):
            backend = load_backend(bundle, backend, threads=threads)
        chat = cls(
            bundle,
            endpoint,
            drafter=drafter_for(bundle.manifest, backend, ngrams=ngrams),
            controller=controller,
            policy=policy,
            settings=settings,
            timing=timing,
            system=system,
            timeline=timeline,
        )
        try:
            await chat.open(wait=wait)
        except BaseException:
            await chat.close()
            raise
        return chat

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns so far, ``{"role": ..., "content": ...}``, finished answers included."""
        return list(self._conversation.messages)

    @property
    def tokens(self) -> list[int]:
        """Tokens of the whole conversation that the target has confirmed."""
        return self._loop.committed[: None if self._following else self._conversation.length]

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the conversation had up to the last answer's beginning."""
        return self._record.start

    def restore(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Set the conversation to these turns, so that the next question continues them.

        For regenerating an answer (all turns but the last two), editing a question (the turns before it) and
        opening a stored chat. Works offline too. What the new turns have in common with the old ones is not sent
        again.

        Args:
            messages: ``{"role": ..., "content": ...}`` each; none, a system message, or turns up to an answer.

        Raises:
            ChatError: an answer is being written.
            MoaError: a message of another form.
        """
        self._check_idle()
        self._conversation.restore(messages)
        self._record.disputed = None

    async def send(
        self, text: str, *, max_new_tokens: int = 512, sampling: Sampling | None = None, while_away: bool = True
    ) -> AsyncGenerator[ChatEvent, None]:
        """Ask, and follow the answer as it is written; the last event is :class:`AnswerFinished`.

        Leaving the iteration early stops the answer where the target has confirmed it.

        Args:
            while_away: whether the verifier may finish the answer while there is no link.

        Raises:
            ContextFullError: the conversation does not fit the target's context.
            ChatError: the verifier refused it, or another answer is being written.
            ChatTemplateError: the target's template refuses the conversation.
        """
        self._check_idle()
        self._check_accepted()
        if sampling is not None and not 0 <= sampling.seed < 1 << 64:
            raise ChatError(f"a seed is a whole number of 64 bits, 0 or more, not {sampling.seed}")
        if sampling is not None and (sampling.top_k or sampling.min_p):
            raise ChatError("the verifier takes temperature, top_p and a seed so far: leave out top_k and min_p")
        if max_new_tokens < 0:
            raise ChatError(f"an answer may have 0 tokens (no limit) or more, not {max_new_tokens}")
        question = self._conversation.ask(self._loop.committed, text)
        if question.length >= self._max_context:
            raise ContextFullError(
                f"the conversation would have {question.length} tokens, the target's context holds "
                f"{self._max_context}; shorten the message or begin a new chat"
            )
        self._events.clear()
        self._record = self._new_record(question)
        most = min(max_new_tokens, self._max_context)
        chosen = sampling or Sampling()
        self._driver.post(lambda: self._loop.ask(question.kept, question.supplied, chosen, most, while_away=while_away))
        async with aclosing(self._follow()) as events:
            async for event in events:
                yield event

    def keep_mine(self) -> AsyncGenerator[ChatEvent, None] | None:
        """Take the answer back to the last :class:`Disagreement` and keep what the device had written there.

        The target goes on behind it. Without a disagreement nothing happens.

        Returns:
            None while the answer is being written, whose events go on; after it, the events of what is written
            now, to be followed like those of :meth:`send`.
        """
        disputed, self._record.disputed = self._record.disputed, None
        if disputed is None:
            return None
        if not self._following:
            return self._reopen(disputed)
        self._take_back(disputed)
        return None

    # -- helpers -------------------------------------------------------------------------------

    def _check_idle(self) -> None:
        if self._following:
            raise ChatError("an answer is being written: stop it or wait for its end")

    def _new_record(self, question: Question) -> AnswerRecord:
        return AnswerRecord(self.tokenizer, question, self._driver.bytes_moved)

    async def _follow(self) -> AsyncGenerator[ChatEvent, None]:
        self._following, finished = True, False
        try:
            while not finished:
                event = await self._events.get()
                if isinstance(event, AnswerFinished):
                    finished = True
                    self._following = False
                    self._answered(event.text)
                yield event
        finally:
            if not finished:
                try:
                    await self._stop_answer()
                finally:
                    self._following = False

    async def _reopen(self, disputed: RolledBack) -> AsyncGenerator[ChatEvent, None]:
        """Go on with an answer that has ended."""
        self._check_idle()
        self._conversation.restore(self._record.question.messages)
        self._record.resume_clock()
        self._take_back(disputed)
        async with aclosing(self._follow()) as events:
            async for event in events:
                yield event

    def _take_back(self, disputed: RolledBack) -> None:
        edition = self._events.ask_for_edition()

        def keep() -> None:
            self._events.begin_edition(edition)
            self._loop.keep(disputed.start, disputed.tokens)
            self._record.take_back(disputed.start)
            self._publish()

        self._driver.post(keep)

    async def _stop_answer(self) -> None:
        """Cancel, and keep of question and answer what the target has confirmed."""
        stopped = asyncio.get_running_loop().create_future()

        def cancel() -> None:
            self._loop.cancel()
            stopped.set_result(None)

        self._driver.post(cancel)
        await asyncio.wait({stopped, *([self._running] if self._running else [])}, return_when="FIRST_COMPLETED")
        if len(self._loop.committed) >= self._record.start:
            self._answered(self._record.confirmed_text())

    def _answered(self, text: str) -> None:
        self._record.pause_clock()
        self._conversation.answered(self._record.question, text, len(self._loop.committed))

    # -- what the loop says --------------------------------------------------------------------

    def _hear(self, event: LoopEvent) -> None:
        self._record.hear(event)
        if isinstance(event, Committed):
            update = self._publish()
            disagreement = self._record.disagreement(update)
            disputed = self._record.disputed
            if disputed is not None and not self._loop.may_keep(disputed.start, disputed.tokens):
                self._record.disputed = None  # where nothing can be kept, nobody is asked
            elif disagreement is not None and self.policy is Policy.ASK:
                self._events.put(disagreement)
        elif isinstance(event, Drafted):
            self._publish()
        elif isinstance(event, Finished):
            self._events.put(self._record.finish(event.reason))
        elif isinstance(event, PauseBegan):
            self._events.put(Paused(event.reason))
        elif isinstance(event, LinkChanged) and self._following:
            self._events.put(event)
        super()._hear(event)

    def _publish(self) -> AnswerUpdate:
        update = self._record.update(self._loop.unconfirmed)
        self._events.publish(update)
        return update
