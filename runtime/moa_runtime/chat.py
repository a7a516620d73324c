"""A chat with the target: the runtime's front door.

>>> async with await Chat.connect(bundle, Endpoint("ws://127.0.0.1:8765")) as chat:   # doctest: +SKIP
...     async for event in chat.send("Name three primary colours."):
...         ...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import load_writer
from moa_runtime.bundle import Bundle
from moa_runtime.chat_checks import ChatChecks
from moa_runtime.chat_keeper import ChatKeeper
from moa_runtime.chat_state import ChatState
from moa_runtime.conversation import Conversation
from moa_runtime.datastore.reader import Datastore
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.factory import backend_for, drafter_for, writer_for
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.errors import ChatError, ContextFullError
from moa_runtime.events import ChatEvent, Origin
from moa_runtime.options import DRAFTERS, DrafterName
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.session_id import new_session_id
from moa_runtime.timeline import Timeline
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.tokens import common_length
from moa_runtime.transport import Endpoint, Timing
from moa_runtime.unconfirmed import Unconfirmed
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_runtime.wishes import check_wishes

__all__ = ["Chat", "ChatError", "ContextFullError"]


class Chat(ChatChecks):
    """One conversation. It keeps its history over turns and survives lost connections.

    Use :meth:`connect`; every method must be called in the event loop it was called in.

    Attributes:
        tokenizer: the bundle's.
        manifest: the bundle's.
    """

    def __init__(
        self,
        bundle: Bundle,
        endpoint: Endpoint,
        *,
        drafter: Drafter | None,
        reads_rows: bool = True,
        writer: Drafter | None = None,
        controller: Controller | None = None,
        policy: Policy = Policy.ROLLBACK,
        settings: LoopSettings | None = None,
        timing: Timing | None = None,
        system: str | None = None,
        timeline: Timeline | None = None,
        store: str | Path | None = None,
        raw: bool = False,
    ) -> None:
        tokenizer, manifest = ChatTokenizer.from_bundle(bundle, raw=raw), bundle.manifest
        prints = manifest.fingerprints
        # Where nobody reads the memory rows they are not sent: they are most of what a verdict weighs.
        rows = wire.ROW_ENCODING_INT8 if drafter and reads_rows and manifest.has_rows else wire.ROW_ENCODING_UNSPECIFIED
        options: dict[str, Any] = {
            "stop_tokens": manifest.stop_tokens,
            "row_encoding": rows,
            "vocab_size": manifest.vocab_size,
        }

        def restore(content: object) -> tuple[ChatState, ClientSession]:
            state = ChatState.from_json(content)
            return state, state.restore(endpoint.url, prints, **options)

        keeper = ChatKeeper(self._state)
        saved = None if store is None else keeper.open(store, restore)
        session = saved[1] if saved else ClientSession(prints, **options)
        session.policy = policy
        conversation = Conversation(tokenizer, system)
        loop = DraftingLoop(session, drafter, controller or CostModel(), settings, writer)
        session_id = saved[0].session_id_for(endpoint.url) if saved else new_session_id()
        super().__init__(session, loop, conversation, tokenizer, endpoint, timing, timeline, keeper, session_id)
        self.manifest = manifest
        if saved:
            self._resume(saved[0])

    @classmethod
    async def connect(
        cls,
        bundle: Bundle,
        endpoint: Endpoint,
        *,
        drafter: DrafterName | None = None,
        backend: str | Backend | None = None,
        writer: Backend | None = None,
        threads: int = 2,
        ngrams: bool = True,
        datastore: Datastore | None = None,
        controller: Controller | None = None,
        policy: Policy = Policy.ROLLBACK,
        settings: LoopSettings | None = None,
        timing: Timing | None = None,
        system: str | None = None,
        timeline: Timeline | None = None,
        store: str | Path | None = None,
        raw: bool = False,
        wait: bool = True,
    ) -> Chat:
        """Load the bundle's drafter and open the first connection.

        Args:
            drafter: which one, see :data:`moa_runtime.options.DRAFTERS`; the bundle's own when omitted.
            backend: a key of :data:`moa_runtime.backends.load.BACKENDS`; the first that the bundle has a graph for
                when omitted. Or one that is loaded, for several chats a
                :class:`~moa_runtime.backends.shared.SharedBackend`. Without use where the drafter has no graph.
            writer: the bundle's, for several chats a shared one; otherwise it is loaded when it is first needed.
            threads: of a backend that is to be loaded.
            ngrams: also copy from the conversation, see :func:`moa_runtime.drafters.factory.drafter_for`.
            datastore: and from earlier texts. The verifier is sent parts of them as drafts.
            system: a message at the beginning of a new conversation.
            timeline: gets what the device does and when, see :class:`moa_runtime.driver.Driver`.
            store: a file to keep the conversation in. The one that is there goes on, an answer that was under way
                included (:meth:`pending`); one that cannot is set aside, and :attr:`store_problem` says why.
            raw: without the target's chat template: what is sent is a text, and the answer what the target writes on.
            wait: see :meth:`open`.

        Raises:
            ConnectError: no verifier answers there, or it refuses the token.
            StoreError: another program has the file, or it can be neither used nor set aside.
            OtherDrafterError: ``drafter`` is not the bundle's.
            MoaError: the verifier serves another target, tokenizer or drafter than the bundle's.
        """
        if backend is None or isinstance(backend, str):
            backend = backend_for(bundle, drafter, backend, threads=threads)
        writer = writer or load_writer(bundle, threads=threads)
        chat = cls(
            bundle,
            endpoint,
            drafter=drafter_for(bundle.manifest, backend, drafter, ngrams=ngrams, datastore=datastore),
            reads_rows=drafter is None or DRAFTERS[drafter].reads_rows,
            writer=writer_for(bundle.manifest, writer) if writer else None,
            controller=controller,
            policy=policy,
            settings=settings,
            timing=timing,
            system=system,
            timeline=timeline,
            store=store,
            raw=raw,
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
        return list(self._turns[0])

    @property
    def tokens(self) -> list[int]:
        """Tokens of the whole conversation that the target has confirmed."""
        return self._loop.committed[: None if self._following or self._pending else self._conversation.length]

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the conversation had up to the last answer's beginning."""
        return self._record.start

    @property
    def new_tokens(self) -> int:
        """How many of these the verifier was given with the last question: it had not read them yet."""
        return len(self._record.question.supplied)

    def restore(self, messages: Sequence[Mapping[str, str]], unconfirmed: Sequence[Unconfirmed] = ()) -> None:
        """Set the conversation to these turns, so that the next question continues them.

        For regenerating an answer (all turns but the last two), editing a question (the turns before it) and
        opening a stored chat. Works offline too. What the new turns have in common with the old ones is not sent
        again. An answer of another program that was :meth:`pending` is dropped.

        Args:
            messages: ``{"role": ..., "content": ...}`` each; none, a system message, or turns up to an answer.
            unconfirmed: those answers among them that :meth:`check` is to have checked.

        Raises:
            ChatError: an answer is being written.
            MoaError: a message of another form, or a mark on what is no answer.
        """
        self._check_idle()
        self._conversation.restore(messages, unconfirmed)
        self._record.disputed = None
        if self._pending:
            self._pending = self._unheard = False
            self._driver.post(self._loop.cancel)
        self._keeper.touch()

    async def send(
        self, text: str, *, max_new_tokens: int = 512, sampling: Sampling | None = None, while_away: bool = True
    ) -> AsyncGenerator[ChatEvent, None]:
        """Ask, and follow the answer as it is written; the last event is :class:`AnswerFinished`, unless the chat is
        closed before.

        Leaving the iteration early stops the answer where the target has confirmed it. What the device has written
        while the verifier was away stays as well, and is :attr:`unconfirmed`; with policy ``KEEP`` it just stays.

        Args:
            while_away: whether the verifier may finish the answer while there is no link.

        Raises:
            ContextFullError: the conversation does not fit the target's context.
            ChatError: the verifier refused it, or another answer is being written, or :meth:`pending`.
            ChatTemplateError: the target's template refuses the conversation.
        """
        self._check_idle()
        self._check_complete()
        self._check_accepted()
        check_wishes(max_new_tokens, sampling)
        question = await self._question(text)
        room = self.manifest.max_context
        if question.length >= room:
            what = "text" if self.tokenizer.raw else "conversation"
            raise ContextFullError(
                f"the {what} would have {question.length} tokens, the target's context holds {room}; "
                f"shorten {'it' if self.tokenizer.raw else 'the message or begin a new chat'}"
            )
        most, chosen = min(max_new_tokens, room), sampling or Sampling()

        def ask() -> None:
            self._loop.ask(question.kept, question.supplied, chosen, most, while_away=while_away)

        async with aclosing(self._ask(question, ask)) as events:
            async for event in events:
                yield event

    async def continue_answer(
        self, *, max_new_tokens: int = 512, sampling: Sampling | None = None, while_away: bool = True
    ) -> AsyncGenerator[ChatEvent, None]:
        """Go on with the last answer, which was cut off at its greatest length or stopped. Events, and leaving them, as
        of :meth:`send`: texts are of the whole answer, figures of what is written now.

        With the sampling that it was asked with, seed included, the answer becomes what a larger limit would have made
        it. Its tokens are those that it was written with; of one that came by :meth:`restore` only the text is known,
        which is encoded anew.

        Args:
            max_new_tokens: by how many tokens it may become longer.
            sampling: as the last question was asked, when omitted.

        Raises:
            ContextFullError: the target's context is full.
            ChatError: see :meth:`send`; there is no such answer, it has ended by itself, or it is :attr:`unconfirmed`.
        """
        self._check_idle()
        self._check_complete()
        self._check_accepted()
        check_wishes(max_new_tokens, sampling)
        committed, record = self._loop.committed, self._record
        question, tokens = await self._encoded(partial(self._conversation.last_answer, committed))
        if not tokens or tokens[-1] in self.tokenizer.stop_tokens:
            raise ChatError("the answer has ended by itself: there is nothing to continue")
        whole = [*committed[: question.kept], *question.supplied, *tokens]
        if len(whole) >= self.manifest.max_context:
            raise ContextFullError(
                f"the target's context holds {self.manifest.max_context} tokens, which the conversation has: begin a "
                "new chat"
            )
        same = record.question.messages == question.messages and len(record.origins) == len(tokens)
        origins = record.origins if same else (Origin.CORRECTED,) * len(tokens)
        kept = common_length(committed, whole)
        chosen, most = sampling or self._session.sampling, min(max_new_tokens, self.manifest.max_context)

        self._conversation.restore(question.messages[:-1], self._conversation.unconfirmed)

        def go_on() -> None:
            rest, start = whole[kept:], question.length
            self._loop.continue_answer(kept, rest, start, chosen, most, while_away=while_away)

        async with aclosing(self._ask(question, go_on, (tokens, origins))) as events:
            async for event in events:
                yield event
