"""The server session: the verifier's end of a conversation, a state machine without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from google.protobuf.message import DecodeError

from moa_runtime.errors import MoaError
from moa_runtime.session.events import (
    GRAMMAR_KINDS,
    AnswerSampling,
    Grammar,
    GrammarState,
    Sampling,
    TokenLogprobs,
)
from moa_runtime.session.handshake import PROTOCOL_VERSION, Limits, digest, fault
from moa_runtime.session.memory_rows import Float32, RowQueue
from moa_runtime.session.server_table import CHECKED, FRAMES, Action, Event, State
from moa_runtime.session.tree import (
    TreeError,
    chain,
    check_parents,
    decode_confidences,
    depths,
    subtree_after,
    walk,
)
from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: While verdicts are pushed, rows are made once this many tokens lack them.
_ROWS_BATCH = 16
#: Maximal number of rows in a frame and in a piece of work.
_MAX_ROWS = 64
#: Maximal number of rows after a pushed verdict, so that text does not wait for rows.
_ROWS_AFTER_PUSHED = 2
#: The same for rows of the prompt, and while unsolicited drafts arrive: the client cannot draft without them.
_ROWS_FOR_DRAFTS = 16
#: Tokens at the end of an answer whose log probabilities are kept: a verdict may have to be sent again.
_LOGPROBS_KEPT = 1024
#: A client whose round trip is longer than this many tokens of streamed text drafts hardly anything in time.
_NEAR_TOKENS = 6
#: Weight of the newest time of a token.
_NEWEST = 0.2
#: An unsolicited draft that begins this many tokens back shows that the client drafts.
_DRAFTS_ARE_RECENT = 32


@dataclass(frozen=True)
class Verify:
    """Work for the engine: run the target over a draft; then call :meth:`ServerSession.decide`.

    Attributes:
        prefix: all committed tokens.
        draft: tokens after the prefix, a tree.
        parents: parent of each drafted token, as on the wire (:mod:`~moa_runtime.session.tree`).
        sampling: how the target chooses.
        rows_from: first position of the prefix whose memory row is wanted; None for no rows.
        supplied: number of tokens at the end of the prefix that came with this frame.
        pushed: the verdict is sent within a credit; no frame asked for it.
        confidences: the client's probability of each drafted token after its parent's path; None if it names none.
        stamp: stamp of the Draft that this work answers; 0 for none.
    """

    prefix: tuple[int, ...]
    draft: tuple[int, ...]
    parents: tuple[int, ...]
    sampling: AnswerSampling
    rows_from: int | None = None
    supplied: int = 0
    pushed: bool = False
    confidences: tuple[float, ...] | None = None
    stamp: int = 0


@dataclass(frozen=True)
class SessionDraft:
    """What an unsolicited draft proposes after the committed tokens.

    Attributes:
        tokens, parents: a tree, as on the wire (:mod:`~moa_runtime.session.tree`).
        confidences: the client's probability of each token after its parent's path; None if it names none.
        stamp: stamp of the Draft.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    confidences: tuple[float, ...] | None
    stamp: int

    def after(self, path: Sequence[int], levels: int, nodes: int) -> SessionDraft | None:
        """Return what is left after the tokens ``path``, up to ``levels`` and ``nodes``; None if nothing is."""
        kept, parents = subtree_after(self.tokens, self.parents, path, levels)
        kept, parents = kept[:nodes], parents[:nodes]
        if not kept:
            return None
        claims = self.confidences
        left = None if claims is None else tuple(claims[index] for index in kept)
        return SessionDraft(tuple(self.tokens[index] for index in kept), tuple(parents), left, self.stamp)


@dataclass(frozen=True)
class RowsWork:
    """Work for the engine: make the memory rows of ``prefix`` from ``start`` on.

    Pass them to :meth:`ServerSession.add_rows`.
    """

    prefix: tuple[int, ...]
    start: int


def parse_client_message(data: bytes) -> wire.ClientMessage | wire.ServerMessage:
    """Parse a frame from a client; return the fault that answers it if it is not a ClientMessage."""
    try:
        message = wire.ClientMessage.FromString(data)
    except DecodeError:
        return fault(wire.FAULT_CODE_PROTOCOL, "the frame is no ClientMessage")
    if message.WhichOneof("event") is None:
        return fault(wire.FAULT_CODE_PROTOCOL, "the ClientMessage holds no event this version knows")
    return message


class ServerSession:
    """One conversation at the verifier. It outlives connections and knows only their number.

    Only a Prompt or Cancel truncates the committed tokens. A frame at an earlier position of the answer is answered
    with the tokens decided since then, without the engine, so a lost verdict is sent again.

    What a frame does in each state is defined by :mod:`~moa_runtime.session.server_table`.

    The caller takes a frame as soon as there is one (:meth:`receive`), else does the work of :meth:`next_work`, else
    sends :meth:`take_rows`. Each piece of work is decided (:meth:`decide`, :meth:`add_rows`) before the next call.

    A connection gets every memory row once, in order, starting after those that the client's Hello or Prompt names.

    Args:
        limits: limits of the verifier, sent in the Welcome.
        vocab_size: size of the target's vocabulary; frames with larger token ids are refused.
        stop_tokens: tokens that end an answer.

    Attributes:
        committed: tokens of the conversation.
        connection: number of the newest connection.
        round_trip_us: round trip time of its link, microseconds; 0 if unknown. What a Credit reports replaces it.
        may_make_rows: whether rows may be made for a client that did not ask with a draft, as of the last work.
    """

    def __init__(self, limits: Limits, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self.limits = limits
        self._vocab_size = vocab_size
        self._stop_tokens = frozenset(stop_tokens)
        self.committed: list[int] = []
        self.connection = 0
        self._epoch = self.round_trip_us = 0
        self._answer_start: int | None = None  # committed length right after the last Prompt
        self._computed = 0  # tokens that the engine need not be asked for rows of alone: the rest is forced
        self._logprobs: deque[TokenLogprobs | None] = deque(maxlen=_LOGPROBS_KEPT)  # of the answer's last tokens
        self._finish: int | None = None  # Finish of the answer that ended, if one did
        self._max_length = 0
        self._sampling = AnswerSampling()
        self._grammar: GrammarState | MoaError | None = None  # of the Prompt that is processed
        self._while_away = False
        self._credit = 0  # verdicts are pushed up to this position
        self._sent_length = 0  # committed tokens that the client has or was sent
        self._rows = RowQueue()
        self.may_make_rows = True
        self._rows_turn = False  # rows may be made before the next verdict is pushed
        self._rows_taken = 0  # rows sent after the newest verdict
        self._token_us = 0.0  # mean time of a streamed token; 0 if unknown
        self._draft: SessionDraft | None = None  # the newest unsolicited one
        self._draft_base = 0  # position of its first token
        self._drafted_from: int | None = None  # where the client began it
        self._active = False  # an answer continues, or began, on this connection
        self._paused = False  # no unrequested work until the next frame, because the engine failed

    # -- the state -------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The conversation's state, derived from the answer and the committed tokens."""
        if self._answer_start is None:
            return State.IDLE
        if self._finish is not None:
            return State.ENDED
        return State.ANSWERING if len(self.committed) > self._answer_start else State.PROMPTED

    @property
    def runs(self) -> bool:
        """Whether an answer is running."""
        return self.state in (State.PROMPTED, State.ANSWERING)

    @property
    def pushes(self) -> bool:
        """Whether verdicts are pushed: the credit is open."""
        return self.runs and len(self.committed) < self._credit

    @property
    def room(self) -> int | None:
        """Number of tokens that the answer may still have; None without a limit."""
        return max(0, self._max_length - len(self.committed)) if self._max_length else None

    @property
    def continues_without_client(self) -> bool:
        """Whether an answer is running that is to be finished while the client is disconnected."""
        return self._while_away and self.runs

    @property
    def rows_due(self) -> bool:
        """Whether there are memory rows to be made or sent."""
        return self.makes_rows and self._rows.sent < self._rows_end

    @property
    def rows_lacking(self) -> int:
        """Number of memory rows to be made."""
        return max(0, self._rows_end - self._rows.next) if self.makes_rows else 0

    @property
    def makes_rows(self) -> bool:
        """Whether rows are made now; not for idle connections, because rebuilding an evicted cache would be wasted."""
        return self._rows.wanted and self._active and not self._paused

    @property
    def _rows_with_verdicts(self) -> bool:
        """Whether the pass that decides a pushed verdict also makes rows: unsolicited drafts arrive."""
        began = self._drafted_from
        return self.makes_rows and began is not None and len(self.committed) - began <= _DRAFTS_ARE_RECENT

    @property
    def _drafts_in_time(self) -> bool:
        """Whether drafts of the client can arrive before their text: else rows must not delay the text."""
        return self.round_trip_us <= _NEAR_TOKENS * self._token_us or not self._token_us

    @property
    def _rows_end(self) -> int:
        """End of the rows that can be sent: the client's last token, and forced ones, have none until the target has
        processed them."""
        return min(self._sent_length - 1, self._computed)

    # -- frames ------------------------------------------------------------------------------------

    def greet(
        self,
        hello: wire.Hello,
        token: str,
        *,
        rows: bool = True,
        capabilities: Sequence[int] = (),
        load: wire.Load | None = None,
        dtype: str = "",
    ) -> list[wire.ServerMessage]:
        """Answer the Hello of a new connection with a Welcome, and with a verdict on tokens that the client lacks.

        Args:
            hello: a Hello that :func:`~moa_runtime.session.handshake.check_hello` accepts.
            token: resume token of this conversation.
            rows: whether the verifier makes memory rows.
            capabilities: ``Capability`` values of the wire.
            load: load of the verifier, if known.
            dtype: type of the target's numbers.
        """
        resume = hello.resume
        self.connection = max(self.connection, resume.connection)
        agreed = _longest_known_mark(resume, self.committed)
        encoding = hello.row_encoding if rows else wire.ROW_ENCODING_UNSPECIFIED
        self._rows = RowQueue(encoding, min(resume.rows, agreed))
        continues = resume.answering and resume.epoch == self._epoch and 0 < agreed == resume.marks[-1].length
        news = continues and self._answer_start is not None and self._answer_start <= agreed < len(self.committed)
        self._while_away, self._paused = self._while_away and continues, False
        self._credit = resume.credit if continues else 0
        self._active, self._sent_length = continues, agreed
        self._forget_drafts()
        self._rows_taken = 0
        welcome = wire.Welcome(
            protocol_version=PROTOCOL_VERSION,
            resume_token=token,
            limits=self.limits.to_message(),
            committed_length=agreed,
            epoch=self._epoch,
            connection=self.connection,
            verdict_follows=news,
            capabilities=[wire.Capability.Name(each) for each in capabilities],
            load=load,
            dtype=dtype,
        )
        answer = [wire.ServerMessage(welcome=welcome)]
        return [*answer, self._known_verdict(agreed)] if news else answer

    def receive(
        self, message: wire.ClientMessage, grammar: GrammarState | MoaError | None = None
    ) -> Verify | wire.ServerMessage | None:
        """Process a frame after the Hello.

        Args:
            grammar: the grammar of a Prompt that has one, or why it does not compile; None if the verifier has none.

        Returns:
            work for the engine (call :meth:`decide` before the next frame), a message to send, or None.
        """
        event, self._grammar = self.classify(message), grammar
        self._paused = self._paused and event is Event.DRAFT_UNSOLICITED
        problem = self._problem(message) if event in CHECKED else None
        answer = self._do(FRAMES[event][self.state].action, message) if problem is None else problem
        if isinstance(answer, wire.ServerMessage) and answer.HasField("fault"):
            # With the epoch of the frame: a late fault must not be taken for one on the next frame.
            frame = getattr(message, message.WhichOneof("event") or "", None)
            if isinstance(frame, wire.Prompt | wire.Draft | wire.Credit | wire.Cancel):
                answer.fault.epoch = frame.epoch
        return answer

    def classify(self, message: wire.ClientMessage) -> Event:
        """Return the table's event for a frame."""
        event = str(message.WhichOneof("event"))
        if event not in ("prompt", "draft", "credit", "cancel"):
            return Event.PING if event == "ping" else Event.UNEXPECTED
        frame = getattr(message, event)
        if frame.epoch < self._epoch:
            return Event.STALE
        newer = frame.epoch > self._epoch
        if event == "draft" and frame.unsolicited:
            return Event.STALE if newer else Event.DRAFT_UNSOLICITED
        if event == "cancel":
            return Event.CANCEL
        if event == "credit":
            known = Event.CREDIT if frame.position > self._sent_length else Event.CREDIT_REVOKED
            return Event.CREDIT_NEWER_EPOCH if newer else known
        if event == "prompt" and not newer and _end(frame) == self._answer_start:
            return Event.PROMPT_REPEATED
        if frame.base_len > len(self.committed):
            return Event.BEYOND_COMMITTED
        if event == "prompt":
            return Event.PROMPT if newer else Event.PROMPT_CONFLICT
        if newer or self._answer_start is None or frame.base_len < self._answer_start:
            return Event.DRAFT_OUTSIDE_ANSWER
        return Event.DRAFT if frame.base_len == len(self.committed) else Event.DRAFT_EARLIER

    def _do(self, action: Action, message: wire.ClientMessage) -> Verify | wire.ServerMessage | None:
        match action:
            case Action.BEGIN_ANSWER:
                return self._begin_answer(message.prompt)
            case Action.DECIDE_TOKEN:
                return self._work(supplied=len(message.prompt.tokens))
            case Action.VERIFY:
                return self._verify(message.draft)
            case Action.KEEP_DRAFT:
                self.keep_draft(message.draft)
                return None
            case Action.REPEAT:
                return self._repeat(message)
            case Action.GRANT_CREDIT:
                self._set_credit(message.credit)
                return self._known_verdict(self._sent_length) if self._sent_length < len(self.committed) else None
            case Action.REVOKE_CREDIT:
                self._set_credit(message.credit)
                revoked = wire.CreditRevoked(epoch=self._epoch, serial=message.credit.serial)
                return wire.ServerMessage(standing=revoked)
            case Action.CANCEL:
                self._epoch = message.cancel.epoch
                self._truncate(message.cancel.base_len)
                return None
            case Action.ANSWER_PING:
                return wire.ServerMessage(pong=wire.Pong())
            case Action.OUT_OF_SYNC:
                return self._out_of_sync(_position(message))
            case Action.NO_ANSWER:
                return self._no_answer(len(self.committed) if message.HasField("credit") else _position(message))
            case Action.REFUSE:
                return _unexpected(message)
            case Action.DROP:
                return None

    def _begin_answer(self, prompt: wire.Prompt) -> Verify:
        self._epoch, self._active, end = prompt.epoch, True, _end(prompt)
        self._truncate(prompt.base_len)
        self._rows.skip_to(min(prompt.rows_from, end))
        self.committed += prompt.tokens
        self._answer_start = self._sent_length = end
        self._max_length, self._while_away = prompt.max_length, prompt.while_away
        self._sampling = _parse_sampling(prompt.sampling, min(prompt.answer_from, end) or end)
        if self._sampling.grammar is not None and not isinstance(self._grammar, MoaError):
            self._sampling = replace(self._sampling, state=self._grammar)
        self._computed = end
        self._logprobs.clear()
        return self._work(supplied=len(prompt.tokens))

    def _verify(self, draft: wire.Draft) -> Verify:
        parents = check_parents(draft.parents, len(draft.tokens))
        room = self.limits.max_context - draft.base_len
        rows_from = self._rows.next if self._rows.wanted else None
        confidences = decode_confidences(draft.confidences[:room]) or None
        tree = tuple(draft.tokens[:room]), tuple(parents[:room]), confidences
        return self._work(*tree, rows_from=rows_from, stamp=draft.stamp)

    def _repeat(self, message: wire.ClientMessage) -> wire.ServerMessage:
        if message.HasField("prompt"):
            return self._known_verdict(_end(message.prompt))
        draft = message.draft
        return self._known_verdict(draft.base_len, draft.tokens, check_parents(draft.parents, len(draft.tokens)))

    def _set_credit(self, credit: wire.Credit) -> None:
        self._credit = credit.position
        self.round_trip_us = credit.round_trip_us or self.round_trip_us

    def _known_verdict(
        self, base_len: int, draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> wire.ServerMessage:
        """Return a verdict on tokens that are already decided, from ``base_len`` on."""
        self._sent_length = len(self.committed)
        tokens, levels = self.committed[base_len:], [0, *depths(parents)]
        path, _ = walk(draft, parents, lambda node: tokens[levels[node]] if levels[node] < len(tokens) else -1)
        finish = wire.Finish.Name(wire.FINISH_UNSPECIFIED if self._finish is None else self._finish)
        verdict = wire.Verdict(epoch=self._epoch, base_len=base_len, tokens=tokens, accepted=len(path), finish=finish)
        if self._sampling.logprobs is not None:
            known = list(self._logprobs)[-len(tokens) :] if tokens else []
            verdict.logprobs.extend(_logprobs_message(each) for each in [None] * (len(tokens) - len(known)) + known)
        return wire.ServerMessage(verdict=verdict)

    def _truncate(self, length: int) -> None:
        """Drop the tokens from ``length`` on; no answer is running afterwards."""
        self._while_away, self._credit = False, 0
        del self.committed[length:]
        self._rows.truncate(length)
        self._sent_length = min(self._sent_length, length)
        self._answer_start = self._finish = None
        self._forget_drafts()

    # -- unsolicited drafts --------------------------------------------------------------------------

    def keep_draft(self, draft: wire.Draft) -> None:
        """Keep an unsolicited draft in place of the one before, also while work is done.

        Dropped is one of another epoch, at a position outside the answer or after the committed tokens, or with content
        for which another Draft gets a fault.
        """
        start = self._answer_start
        if draft.epoch != self._epoch or start is None or not start <= draft.base_len <= len(self.committed):
            return
        if self._draft_problem(draft) is not None:
            return
        parents = tuple(check_parents(draft.parents, len(draft.tokens)))
        confidences = decode_confidences(draft.confidences) or None
        self._draft = SessionDraft(tuple(draft.tokens), parents, confidences, draft.stamp)
        self._draft_base = self._drafted_from = draft.base_len

    def newest_draft(self) -> SessionDraft | None:
        """Return what the newest unsolicited draft proposes after the committed tokens; None if it went wrong.

        Tokens are left out for which the answer or the context has no room. Its last token is never proposed: the
        target chooses one anyway.
        """
        end = len(self.committed)
        if self._draft is not None:
            limit = min(self.limits.max_context, self._max_length or self.limits.max_context)
            path = self.committed[self._draft_base :]
            self._draft = self._draft.after(path, limit - end - 1, self.limits.max_context - end)
            self._draft_base = end
        return self._draft

    def _forget_drafts(self) -> None:
        self._draft = self._drafted_from = None

    # -- validation ----------------------------------------------------------------------------------

    def _problem(self, message: wire.ClientMessage) -> wire.ServerMessage | None:
        """Return the fault for a Prompt or Draft with invalid content; None if it is valid."""
        if message.HasField("prompt"):
            return self._prompt_problem(message.prompt)
        return self._draft_problem(message.draft)

    def _prompt_problem(self, prompt: wire.Prompt) -> wire.ServerMessage | None:
        if _end(prompt) >= self.limits.max_context:
            return fault(
                wire.FAULT_CODE_CONTEXT_FULL,
                f"the conversation would have {_end(prompt)} tokens, "
                f"the target's context holds {self.limits.max_context}; shorten it or begin a new chat",
            )
        if not prompt.tokens:
            return fault(wire.FAULT_CODE_PROTOCOL, "a Prompt without tokens")
        if text := _parse_sampling(prompt.sampling).problem:
            return fault(wire.FAULT_CODE_PROTOCOL, text)
        if (problem := self._token_problem(prompt.sampling.logit_bias) or self._grammar_problem(prompt)) is not None:
            return problem
        return self._token_problem(prompt.tokens)  # last: there may be a million

    def _grammar_problem(self, prompt: wire.Prompt) -> wire.ServerMessage | None:
        if not prompt.sampling.HasField("grammar"):
            return None
        if parse_grammar(prompt.sampling.grammar) is None:
            return fault(wire.FAULT_CODE_PROTOCOL, f"no kind of grammars is {prompt.sampling.grammar.kind}")
        if (state := self._grammar) is None:
            return fault(wire.FAULT_CODE_PROTOCOL, "this verifier has no grammars, as its Welcome says")
        if isinstance(state, MoaError):
            return fault(wire.FAULT_CODE_PROTOCOL, str(state))
        if not state.accepts(so_far := self.answer_so_far(prompt)):
            if limit := state.problem(so_far):
                return fault(wire.FAULT_CODE_PROTOCOL, f"the answer so far meets a limit of its grammar: {limit}")
            return fault(wire.FAULT_CODE_PROTOCOL, "the tokens of the answer so far do not conform to its grammar")
        return None

    def answer_so_far(self, prompt: wire.Prompt) -> list[int]:
        """Return the tokens that a Prompt has of the answer that it continues; none if they exceed the context."""
        if _end(prompt) >= self.limits.max_context:
            return []
        whole = [*self.committed[: prompt.base_len], *prompt.tokens]
        return whole[min(prompt.answer_from, len(whole)) or len(whole) :]

    def _draft_problem(self, draft: wire.Draft) -> wire.ServerMessage | None:
        if len(draft.tokens) > self.limits.max_draft_tokens:
            text = f"a draft of {len(draft.tokens)} tokens; this verifier takes {self.limits.max_draft_tokens}"
            return fault(wire.FAULT_CODE_TOO_LARGE, text)
        if (problem := self._token_problem(draft.tokens)) is not None:
            return problem
        if draft.confidences and len(draft.confidences) != len(draft.tokens):
            text = f"{len(draft.tokens)} draft tokens need a confidence each, not {len(draft.confidences)}"
            return fault(wire.FAULT_CODE_PROTOCOL, text)
        try:
            parents = check_parents(draft.parents, len(draft.tokens))
        except TreeError as error:
            return fault(wire.FAULT_CODE_PROTOCOL, str(error))
        if not self.limits.trees and parents != chain(len(parents)):
            return fault(wire.FAULT_CODE_PROTOCOL, "a draft tree; this verifier takes chains only, as its Welcome says")
        return None

    def _token_problem(self, tokens: Collection[int]) -> wire.ServerMessage | None:
        if (worst := max(tokens, default=0)) < self._vocab_size:
            return None
        return fault(wire.FAULT_CODE_PROTOCOL, f"token {worst} is outside the vocabulary of {self._vocab_size}")

    def _out_of_sync(self, position: int) -> wire.ServerMessage:
        """Return the fault for a position after the committed tokens."""
        committed = len(self.committed)
        text = f"position {position} was named, this conversation has {committed} tokens"
        return fault(wire.FAULT_CODE_OUT_OF_SYNC, text, committed_length=committed)

    def _no_answer(self, position: int) -> wire.ServerMessage:
        """Return the fault for a frame of an answer that is not running."""
        text = f"no answer runs at position {position}"
        return fault(wire.FAULT_CODE_OUT_OF_SYNC, text, committed_length=min(len(self.committed), position))

    # -- work for the engine -------------------------------------------------------------------------

    def next_work(self, *, rows: bool = True) -> Verify | RowsWork | None:
        """Return unrequested work for a connected client: the next tokens within its credit, or memory rows.

        Args:
            rows: whether rows may be made now.
        """
        self.may_make_rows, lacking = rows, self.rows_lacking if rows else 0
        waiting = self._rows.next - self._rows.sent
        if self.pushes and not (self._rows_turn and lacking >= _ROWS_BATCH and waiting < _ROWS_FOR_DRAFTS):
            together = rows and self._rows_with_verdicts and lacking <= _MAX_ROWS  # more would delay the verdict
            return self._work(rows_from=self._rows.next if together else None, pushed=True)
        self._rows_turn = False
        if lacking < 1:
            return None
        end = min(self._rows_end, self._rows.next + _MAX_ROWS)
        return RowsWork(tuple(self.committed[:end]), self._rows.next)

    def next_background_work(self) -> Verify | None:
        """Return the work for the next token while the client is disconnected; None if the answer does not continue."""
        return self._work(pushed=True) if self.continues_without_client else None

    def _work(
        self,
        draft: tuple[int, ...] = (),
        parents: tuple[int, ...] = (),
        confidences: tuple[float, ...] | None = None,
        *,
        rows_from: int | None = None,
        supplied: int = 0,
        pushed: bool = False,
        stamp: int = 0,
    ) -> Verify:
        known = tuple(self.committed)
        return Verify(known, draft, parents, self._sampling, rows_from, supplied, pushed, confidences, stamp)

    def decide(
        self,
        work: Verify,
        path: Sequence[int],
        token: int,
        compute_us: int = 0,
        draft_us: int = 0,
        *,
        draft_stamp: int = 0,
        forced: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        sent: bool = True,
    ) -> wire.ServerMessage:
        """Commit what the target chose and return the verdict.

        Args:
            work: the work that is done, with the draft that was verified.
            path: indices into the draft of the tokens that the target accepts.
            token: the target's own choice after them.
            compute_us, draft_us: time of the target, and of the server's own draft, microseconds.
            draft_stamp: stamp of the client's Draft if it was unsolicited, or if only a part of it was verified.
            forced: tokens after that one, each the only one that the grammar allows: committed without the
                target, which computes them with the next piece of work.
            logprobs: of the tokens up to ``token``, if the sampling asks for them.
            sent: whether the client is sent the verdict.
        """
        base_len = len(work.prefix)
        chosen = [*(work.draft[index] for index in path), token, *forced]
        tokens, finish = _until_end(chosen, base_len, self._stop_tokens, self._max_length, self.limits.max_context)
        self.committed = [*work.prefix, *tokens]
        state = work.sampling.state
        if finish == wire.FINISH_STOP and state and state.problem(self.committed[work.sampling.answer_from : -1]):
            finish = wire.FINISH_GRAMMAR
        self._computed = base_len + len(path)
        if work.pushed and tokens:
            token_us = (compute_us + draft_us) / len(tokens)
            self._token_us += (_NEWEST if self._token_us else 1.0) * (token_us - self._token_us)
        self._sent_length = len(self.committed) if sent else self._sent_length
        self._rows_turn, self._rows_taken = True, 0
        if finish != wire.FINISH_UNSPECIFIED:
            self._finish = finish
        verdict = wire.Verdict(
            epoch=self._epoch,
            base_len=base_len,
            tokens=tokens,
            accepted=min(len(path), len(tokens)),
            finish=wire.Finish.Name(finish),
            compute_us=compute_us,
            draft_us=draft_us,
            pushed=work.pushed,
            drafted=len(work.draft) if work.pushed or draft_stamp else 0,
            draft_stamp=draft_stamp,
        )
        if work.sampling.logprobs is not None:
            known = [*logprobs, *[None] * (len(tokens) - len(logprobs))][: len(tokens)]
            self._logprobs.extend(known)
            verdict.logprobs.extend(map(_logprobs_message, known))
        rows_end = min(len(self.committed) - 1, self._computed)
        if self.makes_rows and not self.pushes:
            verdict.rows_until = rows_end
        elif self.pushes and work.rows_from is not None and self._rows_with_verdicts:
            verdict.rows_until = min(rows_end, self._rows.sent + _ROWS_FOR_DRAFTS)
        return wire.ServerMessage(verdict=verdict)

    def engine_failed(self) -> bool:
        """Drop the credit and pause memory rows until the next frame: the engine failed on unrequested work.

        Returns:
            whether the client awaits verdicts. It is then sent a fault, and grants its credit again.
        """
        pushed, self._credit, self._paused = self.pushes, 0, True
        return pushed

    # -- memory rows -----------------------------------------------------------------------------------

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Queue memory rows of the engine, float32 ``[n, kv_heads, head_dim]`` from position ``start`` on."""
        self._rows.add(start, keys, values, self._rows_end)

    def take_rows(self) -> wire.ServerMessage | None:
        """Remove and return a frame of memory rows, if there are any; only a few rows after each pushed verdict."""
        if not self.pushes:
            return self._rows.take(_MAX_ROWS, self._epoch)
        to_draft = self._rows_with_verdicts or (self._rows.sent < (self._answer_start or 0) and self._drafts_in_time)
        most = (_ROWS_FOR_DRAFTS if to_draft else _ROWS_AFTER_PUSHED) - self._rows_taken
        rows = self._rows.take(most, self._epoch) if most > 0 else None
        self._rows_taken += 0 if rows is None else rows.rows.count
        return rows

    def disable_rows(self) -> None:
        """Send no memory rows on this connection: the engine makes none."""
        self._rows.disable()


def _until_end(
    tokens: list[int], base_len: int, stop_tokens: Collection[int], max_length: int, max_context: int
) -> tuple[list[int], int]:
    """Cut off the tokens from position ``base_len`` on at the end of the answer; return them and the wire's ``Finish``.

    The answer ends with a stop token, at position ``max_length`` (if it is not 0), or at position ``max_context``.
    """
    for count, token in enumerate(tokens, 1):
        if token in stop_tokens:
            return tokens[:count], wire.FINISH_STOP
        if max_length and base_len + count >= max_length:
            return tokens[:count], wire.FINISH_LENGTH
        if base_len + count >= max_context:
            return tokens[:count], wire.FINISH_CONTEXT
    return tokens, wire.FINISH_UNSPECIFIED


def _longest_known_mark(resume: wire.Resume, committed: Sequence[int]) -> int:
    """Return the length of the client's longest mark whose tokens the server has; 0 for none."""

    def known(mark: wire.Mark) -> bool:
        return mark.length <= len(committed) and digest(committed[: mark.length]) == mark.digest

    return max((mark.length for mark in resume.marks[-2:] if known(mark)), default=0)


def parse_grammar(message: wire.Grammar) -> Grammar | None:
    """Return the grammar of a message; None if there is none, or its kind is unknown."""
    if message.kind not in wire.GrammarKind.values()[1:]:
        return None
    return Grammar(GRAMMAR_KINDS[wire.GrammarKind.values().index(message.kind) - 1], message.text)


def _logprobs_message(logprobs: TokenLogprobs | None) -> wire.TokenLogprobs:
    return wire.TokenLogprobs() if logprobs is None else wire.TokenLogprobs(**vars(logprobs))


def _parse_sampling(message: wire.Sampling, answer_from: int = 0) -> AnswerSampling:
    values = {each.name: getattr(message, each.name) for each in fields(Sampling)}
    values |= {"top_p": message.top_p or 1.0, "repetition_penalty": message.repetition_penalty or 1.0}
    values |= {"grammar": parse_grammar(message.grammar), "logprobs": None}
    if message.HasField("logprobs"):
        values["logprobs"] = message.logprobs
    return AnswerSampling(**values | {"logit_bias": tuple(sorted(message.logit_bias.items()))}, answer_from=answer_from)


def _unexpected(message: wire.ClientMessage) -> wire.ServerMessage:
    """Return the fault for a frame that a client must not send now."""
    event = message.WhichOneof("event")
    if event == "prompt":
        return fault(wire.FAULT_CODE_PROTOCOL, "another Prompt of the same epoch; each begins one of its own")
    return fault(wire.FAULT_CODE_PROTOCOL, f"a {event or 'empty'} event cannot follow the Hello of a connection")


def _end(prompt: wire.Prompt) -> int:
    """Return the committed length right after a Prompt."""
    return prompt.base_len + len(prompt.tokens)


def _position(message: wire.ClientMessage) -> int:
    """Return the position that a Prompt or Draft names."""
    return int(message.prompt.base_len if message.HasField("prompt") else message.draft.base_len)
