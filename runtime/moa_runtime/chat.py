"""A chat with the target: the runtime's public interface.

>>> async with await Chat.connect(bundle, Endpoint("ws://127.0.0.1:8765")) as chat:   # doctest: +SKIP
...     async for event in chat.send("Name three primary colours."):
...         ...
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from moa_runtime.answer_view import AnswerRecord
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import load_writer
from moa_runtime.bundle import Bundle
from moa_runtime.chat_store import AnswerState, ChatSaver, ChatState
from moa_runtime.chat_template import ChatTemplateError, Message, Tool
from moa_runtime.conversation import Conversation, Question, Unconfirmed, check_request, is_answer
from moa_runtime.datastore import Datastore
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.factory import backend_for, drafter_for, writer_for
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.events import Drafted, LoopEvent, PauseBegan, Problem
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.driver import Driver
from moa_runtime.errors import ChatError, ContextFullError, MoaError
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    ChatEvent,
    EventQueue,
    Follower,
    LinkChanged,
    LinkStatus,
    Origin,
    Paused,
    Statistics,
    TokenOrigin,
)
from moa_runtime.grammar.after_reasoning import after_reasoning
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.options import DRAFTERS, Conditions, DrafterName, LoopSettings, Offline, Overflow
from moa_runtime.reasoning import CLOSE, OPEN
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Decided, Finished, Grammar, Policy, RolledBack, Sampling, Welcomed
from moa_runtime.session.memory_rows import encoding_of
from moa_runtime.timeline import Timeline
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.tokens import common_length
from moa_runtime.transport import ConnectError, Endpoint, Timing, new_session_id
from moa_runtime.wire.moa.v1 import session_pb2 as wire

T = TypeVar("T")
#: Done when the loop has asked, with a future that is done when the question is stored.
_Asked: TypeAlias = "asyncio.Future[asyncio.Future[None]] | None"

#: Characters of a conversation that are encoded within a few milliseconds; longer ones are encoded in a thread.
_LONG_TEXT = 1 << 13


class Chat:
    """One conversation. It keeps its history over turns and survives lost connections.

    Use :meth:`connect`. Call every method in the event loop that :meth:`connect` was called in.

    Attributes:
        tokenizer: the bundle's.
        manifest: the bundle's.
        overflow: handling of a conversation that outgrows the target's context; may be set between answers.
        shown_tokens: special tokens that stay in the text of the next answers, such as the marks of a tool call.
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
        overflow: Overflow = "error",
    ) -> None:
        self.tokenizer, self.manifest = ChatTokenizer.from_bundle(bundle, raw=raw), bundle.manifest
        self.overflow: Overflow = overflow
        self.shown_tokens: Collection[int] = frozenset()
        self._server = endpoint.url
        self._events = EventQueue()
        self._saver = ChatSaver(self._state)
        saved = self._open_session(store, drafter is not None and reads_rows)
        self._session.policy = policy
        self._session_id = saved.session_id_for(endpoint.url) if saved else new_session_id()
        self._conversation = Conversation(self.tokenizer, system)
        self._loop = DraftingLoop(self._session, drafter, controller or CostModel(), settings, writer)
        self._loop.listen(self._hear)
        self._driver = Driver(
            self._loop,
            endpoint,
            timing,
            timeline,
            on_problem=self._on_problem,
            on_rest=self._opened,
            store=lambda: self._saver.save() if self._saver.keeps else None,
            session_id=self._session_id,
        )
        self._refusal: ChatError | None = None
        self._opening: asyncio.Future[None] | None = None  # awaited by open()
        self._running: asyncio.Task[None] | None = None
        self._grammars = partial(GrammarCompiler.of_bundle, bundle)
        self._compiling: asyncio.Task[None] | None = None
        self._closed = False
        self._record = self._new_record(Question([], 0, []))
        self._follower: Follower | None = None  # of the present answer, until it has ended
        self._pending = False  # an answer of an earlier program is being written, and is not followed yet
        self._unheard = False  # the application has not received the end of the record's answer
        #: While an answer is checked: turns and marks as before, which stay until the check is done.
        self._checking: tuple[list[dict[str, Any]], list[Unconfirmed]] | None = None
        if saved:
            self._resume(saved)

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
        overflow: Overflow = "error",
        wait: bool = True,
    ) -> Chat:
        """Load the bundle's drafter and open the first connection.

        Args:
            drafter: a key of :data:`moa_runtime.options.DRAFTERS`; the bundle's own by default.
            backend: a key of :data:`moa_runtime.backends.load.BACKENDS`, by default the first that the bundle has a
                graph for; or a loaded one, for several chats a :class:`~moa_runtime.backends.load.SharedBackend`.
                Ignored if the drafter has no graph.
            writer: a loaded offline writer, which several chats may share; by default it is loaded when first needed.
            threads: of a backend that is loaded here.
            ngrams: whether to copy from the conversation, too, see :func:`moa_runtime.drafters.factory.drafter_for`.
            datastore: earlier texts to copy from. Parts of them are sent to the server as drafts.
            system: a system message at the beginning of a new conversation.
            timeline: records the device's actions and their times, see :class:`moa_runtime.driver.Driver`.
            store: a file to keep the conversation in. A conversation in the file continues, with an unfinished answer
                (:meth:`pending`); an unusable file is renamed, and :attr:`store_problem` says why.
            raw: whether the target continues the text that is sent, without its chat template.
            overflow: handling of a conversation that outgrows the target's context, see
                :data:`moa_runtime.options.Overflow`; :class:`~moa_runtime.events.Statistics` count the dropped turns.
            wait: see :meth:`open`.

        Raises:
            ConnectError: no verifier answers at the address, or it refuses the token.
            StoreError: another program uses the file, or it can be neither used nor renamed.
            OtherDrafterError: ``drafter`` is not the bundle's.
            MoaError: the verifier serves another target, tokenizer or drafter than the bundle's.
        """
        if backend is None or isinstance(backend, str):
            backend = backend_for(bundle, drafter, backend, threads=threads)
        writer = writer or load_writer(bundle, backend, threads=threads)
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
            overflow=overflow,
        )
        try:
            await chat.open(wait=wait)
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

    async def open(self, *, wait: bool = True) -> None:
        """Begin to connect.

        Args:
            wait: whether to wait for the verifier's reply. If not, or if no connection is made (because the app is in
                the background, see :meth:`tell_conditions`, or the user works offline), the chat begins offline, and
                :meth:`send` raises the error if the verifier refuses.

        Raises:
            ConnectError: the chat was closed meanwhile; see :meth:`connect` for other causes.
        """
        if wait:
            self._opening = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._driver.run())
        self._running.add_done_callback(self._on_loop_end)
        self._follow_grammar()
        self._driver.begin()
        if self._opening is not None:
            await self._opening

    async def close(self) -> None:
        """Close the connection. An :meth:`open` that waits raises an error; the events of a running answer end. The
        next program with the stored chat continues the answer."""
        self._closed = True
        self._saver.save()
        self._events.end()
        if opening := self._connecting():
            text = "the chat was closed before the verifier had answered"
            opening.set_exception(ConnectError(text, final=True, code="closed"))
        try:
            await self._driver.close()
            tasks = [task for task in (self._running, self._compiling) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._saver.close()

    # -- the conversation -----------------------------------------------------------------------------

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns, ``{"role": ..., "content": ...}`` each, with finished answers."""
        return list(self._turns[0])

    @property
    def tokens(self) -> list[int]:
        """Tokens of the whole conversation that the target has confirmed."""
        return self._loop.committed[: None if self._followed or self._pending else self._conversation.length]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the last answer."""
        return self._record.start

    @property
    def new_tokens(self) -> int:
        """Number of tokens that were sent with the last question, because the server had not read them yet."""
        return len(self._record.question.supplied)

    @property
    def question(self) -> str:
        """The text of the present or last answer's question; empty before the first one."""
        messages = self._record.question.messages
        return messages[-1]["content"] if messages else ""

    @property
    def unconfirmed(self) -> Sequence[Unconfirmed]:
        """The answers of :attr:`messages` that the target has not confirmed, in order; see :meth:`check`."""
        return tuple(self._turns[1])

    def restore(self, messages: Sequence[Message], unconfirmed: Sequence[Unconfirmed] = ()) -> None:
        """Set the conversation to ``messages``, so that the next question continues them.

        Use it to regenerate an answer (all turns but the last two), to edit a question (the turns before it) or to
        open a chat that the application has stored. It works offline, too. Tokens that old and new turns share are not
        sent again. An answer that is being written is dropped, and so is a :meth:`pending` one.

        Args:
            messages: see :data:`moa_runtime.chat_template.Message`. Empty, a system message alone, or turns whose
                last one is an answer; if the next question is a tool's result, the last one may be another tool's
                result.
            unconfirmed: marks of those answers that :meth:`check` is for.

        Raises:
            MoaError: a message has another form, or a mark is not on an answer.
        """
        self._conversation.restore(messages, unconfirmed)
        self._record.disputed = self._checking = None
        if self._follower is not None:
            self._follower.leave()
        if self._follower is not None or self._pending:
            self._pending = self._unheard = False

            def drop() -> None:
                self._unheard = False  # the loop may have been about to ask
                self._loop.cancel()

            self._driver.post(drop)
        self._saver.touch()

    async def keep_in(self, path: str | Path) -> None:
        """Store the conversation in the file ``path`` from now on, replacing its content. To continue that content
        instead, see :meth:`connect`.

        Raises:
            StoreError: this chat is stored already, another program uses the file, or it cannot be used.
        """
        self._saver.open(path, lambda content: None)
        await asyncio.wait({self._saver.save()})

    @property
    def store_problem(self) -> str:
        """Why the stored chat was not continued, or why this one is not stored; empty if all is well."""
        return self._saver.problem

    # -- answers --------------------------------------------------------------------------------------

    def send(
        self,
        text: str | Message,
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        while_away: bool = True,
    ) -> AsyncGenerator[ChatEvent, None]:
        """Ask, and yield events while the answer is written. The last one is :class:`AnswerFinished`, unless the chat
        is closed before.

        Leaving the iteration early stops the answer at its last committed token; ``aclose()`` waits until
        :attr:`messages` has the turn. The next question stops the answer and ends its iteration, too. Text that the
        device wrote during an outage stays and is :attr:`unconfirmed`; with policy ``KEEP`` it counts as confirmed.

        Args:
            text: the user's text, a turn of the user, or a turn with the result of a tool that the target has called.
            max_new_tokens: largest number of tokens of the answer; 0 for no limit.
            while_away: whether the verifier may finish the answer while there is no link.

        Raises:
            ContextFullError: the conversation does not fit the target's context.
            ChatError: the verifier refused the question, or another answer is :meth:`pending`.
            ChatTemplateError: the target's template refuses the conversation.
        """

        async def begin() -> _Asked:
            self._check_complete()
            self._check_accepted()
            self._check_request(max_new_tokens, sampling or Sampling())
            question = await self._question(text)
            self._check_room(question.length)
            most, chosen = min(max_new_tokens, self.manifest.max_context), self._chosen(sampling or Sampling())
            ask = partial(self._loop.ask, question.kept, question.supplied, chosen, most, while_away=while_away)
            return self._ask(question, ask)

        return self._iterate(partial(self._follow, begin))

    def continue_answer(
        self, *, max_new_tokens: int = 512, sampling: Sampling | None = None, while_away: bool = True
    ) -> AsyncGenerator[ChatEvent, None]:
        """Continue the last answer, which reached its limit or was stopped. Yields events as :meth:`send` does, with
        the text of the whole answer and the figures of the continuation.

        With the same sampling and seed, the result is the answer that a larger limit would have given. It continues
        from the answer's own tokens; an answer that was set by :meth:`restore` is encoded from its text.

        Args:
            max_new_tokens: largest number of further tokens.
            sampling: by default that of the last question.

        Raises:
            ContextFullError: the target's context is full.
            ChatError: see :meth:`send`; or there is no such answer, it is complete, or it is :attr:`unconfirmed`.
        """

        async def begin() -> _Asked:
            self._check_complete()
            self._check_accepted()
            self._check_request(max_new_tokens, sampling or self._session.sampling)
            committed, record = self._loop.committed, self._record
            question, tokens = await self._encoded(partial(self._conversation.last_answer, committed))
            if not tokens or tokens[-1] in self.tokenizer.stop_tokens:
                text = "the answer has ended by itself: there is nothing to continue"
                raise ChatError(text, code="nothing_to_continue")
            whole = [*committed[: question.kept], *question.supplied, *tokens]
            self._check_room(len(whole))
            same = record.question.messages == question.messages and len(record.tokens) == len(tokens)
            known = record.tokens if same else [TokenOrigin(token, Origin.CORRECTED, True) for token in tokens]
            kept = common_length(committed, whole)
            chosen = self._chosen(sampling) if sampling else self._session.sampling
            most = min(max_new_tokens, self.manifest.max_context)
            if self._followed:
                self._conversation.restore(question.messages[:-1], self._conversation.unconfirmed)
            span = kept, whole[kept:], question.length
            ask = partial(self._loop.continue_answer, *span, chosen, most, while_away=while_away)
            return self._ask(question, ask, known)

        return self._iterate(partial(self._follow, begin))

    def pending(self) -> AsyncGenerator[ChatEvent, None] | None:
        """Follow the answer to :attr:`question` that was being written when the last program ended.

        Returns:
            events as of :meth:`send`, the first one with the whole text so far; None if there is no such answer.
        """

        async def begin() -> _Asked:
            self._pending = False
            return None

        return self._iterate(partial(self._follow, begin)) if self._pending else None

    def keep_mine(self) -> AsyncGenerator[ChatEvent, None] | None:
        """Return to the last :class:`Disagreement`, if there is one, and keep the device's own text there. Does nothing
        after a :meth:`check` of an answer that other turns follow.

        Returns:
            None while the answer is being written: its events continue. After the answer, events as of :meth:`send`.
        """
        disputed, self._record.disputed = self._record.disputed, None
        if disputed is None or (self._checking and not self._followed):  # leaving a check changes nothing
            return None
        if self._followed or self._pending:
            self._take_back(disputed)
            return None

        async def reopen() -> _Asked:
            self._check_complete()
            self._check_accepted()
            self._conversation.restore(self._record.question.messages)
            self._record.resume_clock()
            self._take_back(disputed)
            return None

        return self._iterate(partial(self._follow, reopen))

    def check(self) -> AsyncGenerator[ChatEvent, None]:
        """Have the target check the first :attr:`unconfirmed` answer: the device's text is its draft, and the target's
        own choice replaces it from the first difference on. Yields events as :meth:`send` does; no events if all is
        confirmed, or without a link.

        Later turns stay. If the answer changed, the later answers become unconfirmed, because they followed the old
        text. Leaving the iteration early changes nothing. An answer that the verifier refuses stays as the
        device wrote it and is no longer unconfirmed.

        Raises:
            ChatError: an answer is :meth:`pending`.
        """
        return self._iterate(self._check)

    # -- link and device ------------------------------------------------------------------------------

    @property
    def link(self) -> LinkChanged:
        """The link's last change, whether or not an answer is being written."""
        return self._loop.link

    @property
    def status(self) -> LinkStatus:
        """The link as the user should see it."""
        return self._loop.link.status

    @property
    def gave_up(self) -> bool:
        """Whether a refusal or a defect prevents questions until :meth:`work_offline` connects again."""
        return self._refusal is not None and (self._driver.gave_up or self._running is None or self._running.done())

    @property
    def policy(self) -> Policy:
        """The policy for text that was written offline; may be set at any time."""
        return self._session.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._session.policy = policy

    @property
    def offline(self) -> Offline:
        """The part of the bundle that writes during an outage, if any; may be set at any time."""
        return self._loop.offline

    @offline.setter
    def offline(self, offline: Offline) -> None:
        self._loop.offline = offline
        self._driver.post(lambda: None)  # an answer may wait for it

    @property
    def thinking(self) -> bool | None:
        """Whether the target reasons before the next answers; None for its template's default. Set it between answers.

        Raises:
            ChatTemplateError: the template cannot switch it.
        """
        return self._conversation.thinking

    @thinking.setter
    def thinking(self, thinking: bool | None) -> None:
        if thinking is not None and not self.tokenizer.knows_thinking:
            text = (
                f"the chat template of {self.manifest.target} cannot switch reasoning on or off: leave `thinking` out"
            )
            raise ChatTemplateError(text, code="no_thinking")
        self._conversation.thinking = thinking

    @property
    def tools(self) -> Sequence[Tool] | None:
        """Functions that the target may call, if its template knows them; None for none. Set them between answers. They
        are not stored with the chat.

        Raises:
            MoaError: they are no JSON values.
        """
        return self._conversation.tools

    @tools.setter
    def tools(self, tools: Sequence[Tool] | None) -> None:
        self._conversation.tools = tools

    async def work_offline(self, offline: bool) -> None:
        """If ``offline``, close the connection and make no other; else connect again, unless the chat is closed."""
        if offline:
            await self._driver.go_offline()
        elif not self._closed:
            self._driver.go_online()

    @property
    def conditions(self) -> Conditions:
        """Conditions of the last :meth:`tell_conditions`."""
        return self._driver.conditions

    def tell_conditions(self, conditions: Conditions) -> None:
        """Set the conditions of the device that the host knows: background, low power, metered network."""
        self._driver.tell_conditions(conditions)

    async def network_changed(self) -> None:
        """Connect anew at once, not after the next ping or backoff, because the device has another network. Does
        nothing while the user works offline."""
        await self._driver.reconnect()

    # -- preconditions --------------------------------------------------------------------------------

    def _check_complete(self) -> None:
        """Raise ChatError if an answer is :meth:`pending`."""
        if self._pending:
            text = "the answer of the stored chat is not complete: follow pending(), or restore() other turns"
            raise ChatError(text, code="pending")

    @property
    def _max_context(self) -> int:
        """Tokens that the target's context holds here: a verifier may hold fewer, which its first answer tells."""
        known, most = self._session.capabilities is not None, self.manifest.max_context
        return min(most, self._session.limits.max_context) if known else most

    def _check_room(self, length: int) -> None:
        """Raise ContextFullError if the target's context has no room after ``length`` tokens."""
        if length >= (room := self._max_context):
            what = "text" if self.tokenizer.raw else "message, or begin a new chat"
            text = f"there are {length} tokens, the target's context holds {room}: shorten the {what}"
            raise ContextFullError(text, code="context_full")

    def _check_accepted(self) -> None:
        """Raise ChatError if the verifier refused or the loop has ended."""
        if self.gave_up and self._refusal is not None:
            raise self._refusal

    def _check_request(self, max_new_tokens: int, sampling: Sampling) -> None:
        """Raise ChatError if the verifier could not serve this request."""
        check_request(max_new_tokens, sampling)
        able = self._session.capabilities
        needed = {wire.CAPABILITY_PENALTIES: sampling.penalised, wire.CAPABILITY_LOGIT_BIAS: sampling.biased}
        if able is not None and any(needs and each not in able for each, needs in needed.items()):
            text = "this verifier has no penalties, logit_bias or min_tokens: it is older than this program"
            raise ChatError(text, code="unsupported_sampling")
        if able is not None and sampling.grammar is not None and wire.CAPABILITY_GRAMMAR not in able:
            text = "this verifier has no grammars: install moa-edge[grammar] on its machine"
            raise ChatError(text, code="unsupported_grammar")
        if able is not None and sampling.logprobs is not None and wire.CAPABILITY_LOGPROBS not in able:
            text = "this verifier has no logprobs: it is older than this program"
            raise ChatError(text, code="unsupported_logprobs")

    def _chosen(self, sampling: Sampling) -> Sampling:
        """Return the sampling of an answer that may reason before it conforms."""
        if sampling.grammar is None or self.tokenizer.raw:
            return sampling
        special = self.tokenizer.special_tokens((OPEN, CLOSE))
        return after_reasoning(sampling, self.tokenizer.thought(self.thinking), special)

    # -- encoding -------------------------------------------------------------------------------------

    async def _question(self, asked: str | Message) -> Question:
        more = len(asked if isinstance(asked, str) else str(asked.get("content")))
        return await self._encoded(partial(self._conversation.ask, self._loop.committed, asked), more)

    async def _encoded(self, encode: Callable[[], T], more: int = 0) -> T:
        """Call ``encode`` on the turns and ``more`` characters, in a thread if that takes tenths of a second."""
        self._conversation.context = self._max_context if self.overflow == "trim" else 0
        if more + sum(len(turn["content"]) for turn in self._conversation.messages) < _LONG_TEXT:
            return encode()
        return await asyncio.to_thread(encode)

    # -- following an answer --------------------------------------------------------------------------

    def _new_record(self, question: Question) -> AnswerRecord:
        return AnswerRecord(self.tokenizer, question, self._driver.bytes_moved, self.shown_tokens)

    def _ask(self, question: Question, ask: Callable[[], None], known: Sequence[TokenOrigin] = ()) -> _Asked:
        """Have the loop ask; return None if the chat is not stored, or if the application has left meanwhile.

        Args:
            known: the answer's beginning, if it is continued.
        """
        if not self._followed:
            return None
        asked = asyncio.get_running_loop().create_future()
        self._events.clear()
        edition = self._events.ask_for_edition()

        def begin() -> None:
            self._events.begin_edition(edition)
            self._record, self._unheard = self._new_record(question), True
            self._record.resume(known, Statistics(dropped_turns=question.dropped))
            ask()
            self._follow_grammar()
            asked.set_result(self._saver.save())

        self._driver.post(begin)
        return asked if self._saver.keeps else None

    def _follow_grammar(self) -> None:
        """Have the device follow the grammar of the answer that begins or continues, when it is compiled."""
        grammar = self._session.sampling.grammar
        if self._compiling is not None:
            self._compiling.cancel()
        grammars = self._grammars() if grammar is not None else None
        self._loop.follow_grammar(None, compiling=grammars is not None)
        if grammar is not None and grammars is not None:
            self._compiling = asyncio.create_task(self._compile(grammars, grammar))

    async def _compile(self, grammars: GrammarCompiler, grammar: Grammar) -> None:
        try:
            state = await grammars.compiled(grammar)
        except MoaError:  # the verifier tells why, or knows better
            state = None

        def follow() -> None:
            if self._session.sampling.grammar == grammar:  # else another question came
                self._loop.follow_grammar(state)

        self._driver.post(follow)

    @property
    def _followed(self) -> bool:
        """Whether the application follows an answer."""
        return self._follower is not None and not self._follower.left

    def _iterate(
        self, events_of: Callable[[Follower], AsyncGenerator[ChatEvent, None]]
    ) -> AsyncGenerator[ChatEvent, None]:
        follower = Follower(self._events.wake)
        events = events_of(follower)
        follower.events = weakref.ref(events)
        return events

    async def _end_other(self) -> None:
        """End the answer that was asked for before, as leaving it does."""
        while self._follower is not None:
            await self._follower.end()

    async def _follow(
        self, begin: Callable[[], Awaitable[_Asked]], follower: Follower
    ) -> AsyncGenerator[ChatEvent, None]:
        """Call ``begin`` when the first event is asked for, and yield the events of the answer."""
        await self._end_other()
        self._follower, stops, known = follower, False, ""
        try:
            asked = await begin()
            stops = not follower.left  # else nothing was asked
            # The question is stored first: an application that has seen a part of the answer finds it again.
            if asked is not None and await self._done(asked):
                await self._done(asked.result())
            while stops and (event := await self._events.get(follower)) is not None:
                if isinstance(event, AnswerUpdate):
                    event, known = event.since(known), event.text
                if isinstance(event, AnswerFinished):
                    self._follower, stops = None, False
                    self._answered(event.text)
                yield event
        finally:
            try:
                if stops:
                    await self._stop_answer()
            finally:
                if self._follower is follower:
                    self._follower = None
                follower.closed.set()

    def _take_back(self, disputed: RolledBack) -> None:
        edition = self._events.ask_for_edition()

        def keep() -> None:
            self._events.begin_edition(edition)
            self._unheard = True
            self._loop.keep(disputed.start, disputed.tokens)
            self._record.take_back(disputed.start)
            self._publish()
            self._saver.save()

        self._driver.post(keep)

    async def _stop_answer(self) -> None:
        """Cancel the answer; keep the question, the committed text and the text written offline."""
        if self._closed:
            return
        stopped: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

        def cancel() -> None:
            stopped.set_result(self._written_alone())
            self._loop.cancel()

        self._driver.post(cancel)
        done = await self._done(stopped)
        if self._unheard and not self._closed:
            written, most = stopped.result() if done else ("", 0)
            if written:
                kept, sampling = self.policy is Policy.KEEP, self._session.sampling
                self._conversation.set_aside(self._record.question, written, sampling, most, kept=kept)
            elif len(self._loop.committed) >= self._record.start:
                self._answered(self._record.confirmed_text())
            self._unheard = False
            self._saver.save()

    def _written_alone(self) -> tuple[str, int]:
        """Return the answer's text and largest length in tokens if the device wrote some of it offline; else no text.
        An answer that is not at its end was stopped by the user, so it may not grow."""
        session = self._session
        if Origin.OFFLINE not in [origin for _, origin in self._loop.unconfirmed]:
            return "", 0
        update = self._record.update(self._loop.unconfirmed)
        most = session.max_new_tokens if session.tentative_finish is not None else session.length - session.answer_start
        return update.committed + update.tentative, most

    def _answered(self, text: str) -> None:
        self._record.pause_clock()
        self._conversation.answered(self._record.question, text, len(self._loop.committed))
        self._unheard = False
        self._saver.save()

    def _publish(self) -> AnswerUpdate:
        update = self._record.update(self._loop.unconfirmed)
        self._events.publish(update)
        return update

    # -- checking an answer ---------------------------------------------------------------------------

    async def _check(self, follower: Follower) -> AsyncGenerator[ChatEvent, None]:
        await self._end_other()
        self._check_complete()
        conversation = self._conversation
        turns, marks = conversation.messages, conversation.unconfirmed
        if not marks or self.status is not LinkStatus.ONLINE:
            return
        mark = marks[0]
        written = turns[mark.turn]["content"]
        conversation.restore(turns[: mark.turn - 1])
        self._checking = checking = turns, marks
        done = False
        try:

            async def begin() -> _Asked:
                question = await self._question(turns[mark.turn - 1])
                draft, most = self.tokenizer.encode(written), min(mark.most, self._session.limits.max_context)

                def ask() -> None:
                    self._loop.ask(question.kept, question.supplied, mark.sampling, most, draft=draft)
                    self._publish()  # otherwise the first verdict could not say what it replaces

                return self._ask(question, ask)

            async with aclosing(self._follow(begin, follower)) as events:
                async for event in events:
                    if isinstance(event, AnswerFinished):
                        conversation.add(turns, self._left(marks, mark, turns, changed=event.text != written))
                        self._checking, done = None, True
                        if mark.turn < len(turns) - 1:
                            self._record.disputed = None  # keeping it would drop the turns after it
                        self._saver.save()
                    yield event
        except MoaError:
            if self.status is LinkStatus.ONLINE:
                # Refused for good, for example because the context is full: a second attempt would not help.
                marks = [each for each in marks if each is not mark]
            raise
        finally:
            if not done:
                self._record.disputed = None
            if self._checking is checking:
                self._checking = None
                conversation.restore(turns, marks)
                self._saver.touch()

    def _left(
        self, marks: Sequence[Unconfirmed], checked: Unconfirmed, turns: Sequence[dict[str, Any]], *, changed: bool
    ) -> list[Unconfirmed]:
        """Return the marks after a checked turn. An answer without a known limit gets its present length, at least."""
        known = {mark.turn: mark for mark in marks if mark.turn > checked.turn}
        left = []
        for turn in range(checked.turn + 1, len(turns)) if changed else known:
            if turn in known:
                left.append(known[turn])
            elif is_answer(turns, turn):
                length = len(self.tokenizer.encode(turns[turn]["content"])) + 1  # its end too
                left.append(Unconfirmed(turn, checked.sampling, max(checked.most, length) if checked.most else 0))
        return left

    # -- storing and resuming -------------------------------------------------------------------------

    def _open_session(self, store: str | Path | None, reads_rows: bool) -> ChatState | None:
        """Make the session, a stored one if there is any; return what was stored."""
        manifest = self.manifest
        # Rows are most of a verdict's bytes: they are not sent if the drafter does not read them.
        wanted = reads_rows and manifest.has_rows
        rows = encoding_of(manifest.architecture) if wanted else wire.ROW_ENCODING_UNSPECIFIED
        prints = manifest.fingerprints
        options: dict[str, Any] = {
            "stop_tokens": manifest.stop_tokens,
            "row_encoding": rows,
            "vocab_size": manifest.vocab_size,
        }

        def restore(content: object) -> tuple[ChatState, ClientSession]:
            state = ChatState.from_json(content)
            return state, state.restore(self._server, prints, **options)

        saved = None if store is None else self._saver.open(store, restore)
        self._session = saved[1] if saved else ClientSession(prints, **options)
        return saved[0] if saved else None

    @property
    def _turns(self) -> tuple[list[dict[str, Any]], list[Unconfirmed]]:
        """The conversation's turns, and the marks of the unconfirmed ones."""
        return self._checking or (self._conversation.messages, self._conversation.unconfirmed)

    def _state(self) -> dict[str, Any]:
        """Return what the next program needs, as JSON."""
        record, session, answer = self._record, self._session.snapshot(), None
        messages, unconfirmed = self._turns
        if self._unheard and not self._checking:
            question = record.question
            answer = AnswerState(
                question.messages[-1], question.kept, record.start, record.origins, record.figures(), record.ended
            )
            messages = question.messages[:-1]
            unconfirmed = [mark for mark in unconfirmed if mark.turn < len(messages)]
        same = common_length(self._conversation.messages, messages)  # a check's tokens may be those of another text
        ends = [end for end in self._conversation.ends if end[0] <= same]
        state = ChatState(self._server, session, list(messages), ends, answer, list(unconfirmed), self._session_id)
        return state.to_json()

    def _resume(self, saved: ChatState) -> None:
        """Continue where the last program ended; the session already does."""
        session, answer = self._session, saved.answer
        committed = len(session.committed)
        left = committed if answer is None else answer.kept
        self._conversation.resume(saved.messages, saved.ends, left, saved.unconfirmed)
        if answer is None:
            self._record = self._new_record(Question([], 0, session.committed[: saved.session["answer_start"] or 0]))
            return
        messages = [*saved.messages, answer.question]
        question = self._conversation.question(messages, session.tokens[: answer.start], answer.kept)
        question = replace(question, dropped=answer.statistics.dropped_turns)
        record = self._record = self._new_record(question)
        written = zip(session.committed[answer.start :], answer.origins, strict=True)
        record.resume([TokenOrigin(token, origin, True) for token, origin in written], answer.statistics)
        if not session.answering and answer.ended is None:  # the user stopped it
            if committed >= answer.start:
                self._conversation.answered(question, record.confirmed_text(), committed)
            return
        self._unheard = self._pending = True
        self._events.publish(record.update(self._loop.unconfirmed), even_without_tokens=True)
        if answer.ended is not None:
            self._events.put(record.finish(answer.ended))
        else:
            record.statistics.reconnects += 1

    # -- events of loop and link ----------------------------------------------------------------------

    def _hear(self, event: LoopEvent) -> None:
        """Take an event of the drafting loop."""
        if isinstance(event, Decided):
            self._record.note_dtype(self._session.dtype)
        self._record.hear(event)
        if isinstance(event, Committed):
            update = self._publish()
            disagreement = self._record.disagreement(update)
            disputed = self._record.disputed
            if disputed is not None and not self._loop.may_keep(disputed.start, disputed.tokens):
                self._record.disputed = None  # nothing could be kept, so the user is not asked
            elif disagreement is not None and self.policy is Policy.ASK:
                self._events.put(disagreement)
        elif isinstance(event, Drafted):
            self._publish()
        elif isinstance(event, Finished):
            self._events.put(self._record.finish(event.reason))
        elif isinstance(event, PauseBegan):
            self._events.put(Paused(event.reason))
        elif isinstance(event, LinkChanged) and self._followed:
            self._events.put(event)
        # Text that the user's policy keeps could not be written again, so it must reach the disk.
        if isinstance(event, Finished | Welcomed) or (isinstance(event, Committed) and Origin.KEPT in event.origins):
            self._saver.save()
        else:
            self._saver.touch()
        if isinstance(event, LinkChanged) and event.status is LinkStatus.ONLINE:
            self._opened()
        elif isinstance(event, Problem):
            self._on_problem(event.error, event.final)

    def _on_problem(self, problem: MoaError, final: bool) -> None:
        if opening := self._connecting():
            opening.set_exception(problem)
        if final:
            # The verifier refuses a question that was asked before its limit was known.
            kind = ContextFullError if problem.code == "context_full" else ChatError
            self._refusal = problem if isinstance(problem, ChatError) else kind(str(problem), code=problem.code)
            self._refusal.__cause__ = problem.__cause__
            self._events.put(self._refusal)

    def _opened(self) -> None:
        if opening := self._connecting():
            opening.set_result(None)

    def _connecting(self) -> asyncio.Future[None] | None:
        """Return the future that :meth:`open` waits for, if it does."""
        return None if self._opening is None or self._opening.done() else self._opening

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """Report the end of the loop by a bundle that cannot draft, or a defect: the application waits for events."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            told = str(error) if isinstance(error, MoaError) else repr(error)
            failure = ChatError(f"the drafting loop failed: {told}", code="defect")
            failure.__cause__ = error
            self._on_problem(failure, True)

    async def _done(self, something: asyncio.Future[Any]) -> bool:
        """Wait for a future of the loop or the disk; return whether it was done before the loop ended."""
        await asyncio.wait({something, *([self._running] if self._running else [])}, return_when="FIRST_COMPLETED")
        return something.done()
