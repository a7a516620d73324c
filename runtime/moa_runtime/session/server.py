"""The verifier's end of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.session.checks import about, draft_problem, no_answer, prompt_problem, refused, unreached
from moa_runtime.session.greeting import goes_on, marks_known, welcome_of
from moa_runtime.session.handshake import Limits
from moa_runtime.session.row_queue import RowsBehind
from moa_runtime.session.sampling import sampling_of
from moa_runtime.session.server_state import ServerState
from moa_runtime.session.server_table import CHECKED, FRAMES, Action, Event
from moa_runtime.session.tree import check_parents, depths, walk
from moa_runtime.session.work import Verify, until_end
from moa_runtime.wire.moa.v1 import session_pb2 as wire


class ServerSession(ServerState):
    """One conversation at the verifier. It outlives connections; all it knows of them is their count.

    Only a Prompt or Cancel cuts what is committed. A frame that names an earlier position than the server has reached
    is answered from there, without the engine: what was lost on its way is said once more.

    What a frame does in which state: :mod:`~moa_runtime.session.server_table`.

    Whoever runs a session takes a frame as soon as there is one (:meth:`receive`), else what :meth:`next_work` says,
    else :meth:`take_rows`; each piece of work is decided before anything else is done.

    Memory rows go to a connection once: from those that its Hello says the client holds, or its Prompt, in order. What
    is done unasked: :mod:`~moa_runtime.session.server_state`.
    """

    def __init__(self, limits: Limits, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        super().__init__(limits)
        self._vocab_size = vocab_size
        self._stop_tokens = frozenset(stop_tokens)

    # -- frames --------------------------------------------------------------------------------

    def greet(
        self,
        hello: wire.Hello,
        token: str,
        *,
        rows: bool = True,
        capabilities: Sequence[int] = (),
        load: wire.Load | None = None,
    ) -> list[wire.ServerMessage]:
        """What a new connection hears: the Welcome, and a verdict on what was decided since the client heard last.

        Args:
            token: of this conversation, for a later Hello.
            rows: whether the verifier makes memory rows.
            capabilities: ``Capability`` values of the wire.
        """
        resume = hello.resume
        self.connection = max(self.connection, resume.connection)
        agreed = marks_known(resume, self.committed)
        encoding = hello.row_encoding if rows else wire.ROW_ENCODING_UNSPECIFIED
        self._rows = RowsBehind(encoding, min(resume.rows, agreed))
        same = goes_on(resume, self._epoch, agreed)
        news = same and self._answer_start is not None and self._answer_start <= agreed < len(self.committed)
        self._while_away, self._stands = self._while_away and same, False
        self._credit, self._asked, self._told = resume.credit if same else 0, same, agreed
        welcome = welcome_of(self.limits, capabilities)
        welcome.resume_token = token
        welcome.committed_length, welcome.epoch, welcome.connection = agreed, self._epoch, self.connection
        welcome.verdict_follows = news
        if load is not None:
            welcome.load.CopyFrom(load)
        said = [wire.ServerMessage(welcome=welcome)]
        return [*said, self._known_verdict(agreed)] if news else said

    def receive(self, message: wire.ClientMessage) -> Verify | wire.ServerMessage | None:
        """Take a frame behind the Hello.

        Returns:
            work for the engine (answer it with :meth:`decide` before the next frame), a message to send,
            or None where nothing is to be done.
        """
        self._stands = False
        event = self.classify(message)
        problem = self._problem(message) if event in CHECKED else None
        said = self._do(FRAMES[event][self.state].action, message) if problem is None else problem
        return about(message, said) if isinstance(said, wire.ServerMessage) else said

    # -- what the engine did -------------------------------------------------------------------

    def decide(
        self,
        work: Verify,
        path: Sequence[int],
        token: int,
        compute_us: int = 0,
        draft_us: int = 0,
        sharing: int = 0,
        *,
        sent: bool = True,
    ) -> wire.ServerMessage:
        """Commit what the target chose; the verdict says it.

        Args:
            work: what was asked for.
            path: indices into the draft of the tokens that the target accepts.
            token: its own choice behind them.
            compute_us, draft_us: time of the target, and of the server's own draft, microseconds; for the verdict.
            sharing: conversations that share the target, this one included, 0 where that is not known; likewise.
            sent: whether the client is sent the verdict.
        """
        base_len = len(work.prefix)
        chosen = [*(work.draft[index] for index in path), token]
        most = self.limits.max_context
        tokens, finish = until_end(chosen, base_len, self._stop_tokens, self._max_length, most)
        self.committed = [*work.prefix, *tokens]
        self._told = len(self.committed) if sent else self._told
        self._rows_turn = True
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
            sharing=sharing,
            pushed=work.pushed,
            drafted=len(work.draft) if work.pushed else 0,
        )
        if self._makes_rows and not self.pushes:
            verdict.rows_until = len(self.committed) - 1
        return wire.ServerMessage(verdict=verdict)

    # -- helpers -------------------------------------------------------------------------------

    def classify(self, message: wire.ClientMessage) -> Event:
        """What a frame says to a conversation that is where this one is."""
        event = str(message.WhichOneof("event"))
        if event not in ("prompt", "draft", "credit", "cancel"):
            return Event.PING if event == "ping" else Event.UNEXPECTED
        frame = getattr(message, event)
        if frame.epoch < self._epoch:
            return Event.STALE
        newer = frame.epoch > self._epoch
        if event == "cancel":
            return Event.CANCEL
        if event == "credit":
            known = Event.CREDIT if frame.position > self._told else Event.CREDIT_REVOKED
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

    def _problem(self, message: wire.ClientMessage) -> wire.ServerMessage | None:
        """What is wrong with a Prompt or Draft wherever the conversation is."""
        if message.HasField("prompt"):
            return prompt_problem(message.prompt, self.limits, self._vocab_size)
        return draft_problem(message.draft, self.limits, self._vocab_size)

    def _do(self, action: Action, message: wire.ClientMessage) -> Verify | wire.ServerMessage | None:
        """What the table says."""
        match action:
            case Action.BEGIN_ANSWER:
                return self._begin(message.prompt)
            case Action.DECIDE_TOKEN:
                return self._work(supplied=len(message.prompt.tokens))
            case Action.VERIFY:
                return self._verify(message.draft)
            case Action.REPEAT:
                return self._repeat(message)
            case Action.GRANT_CREDIT:
                self._take_credit(message.credit)
                return self._known_verdict(self._told) if self._told < len(self.committed) else None
            case Action.REVOKE_CREDIT:
                self._take_credit(message.credit)
                return wire.ServerMessage(standing=wire.CreditRevoked(epoch=self._epoch, serial=message.credit.serial))
            case Action.CANCEL:
                self._epoch = message.cancel.epoch
                self._cut(message.cancel.base_len)
                return None
            case Action.ANSWER_PING:
                return wire.ServerMessage(pong=wire.Pong())
            case Action.OUT_OF_SYNC:
                return unreached(_position(message), len(self.committed))
            case Action.NO_ANSWER:
                position = len(self.committed) if message.HasField("credit") else _position(message)
                return no_answer(position, len(self.committed))
            case Action.REFUSE:
                return refused(message)
            case Action.DROP:
                return None

    def _begin(self, prompt: wire.Prompt) -> Verify:
        self._epoch, self._asked, end = prompt.epoch, True, _end(prompt)
        self._cut(prompt.base_len)
        self._rows.held_by_client(min(prompt.rows_from, end))
        self.committed += prompt.tokens
        self._answer_start = self._told = end
        self._max_length, self._while_away = prompt.max_length, prompt.while_away
        self._sampling = sampling_of(prompt.sampling)
        return self._work(supplied=len(prompt.tokens))

    def _verify(self, draft: wire.Draft) -> Verify:
        parents = check_parents(draft.parents, len(draft.tokens))
        room = self.limits.max_context - draft.base_len
        rows_from = self._rows.next if self._rows.wanted else None
        return self._work(tuple(draft.tokens[:room]), tuple(parents[:room]), rows_from=rows_from)

    def _repeat(self, message: wire.ClientMessage) -> wire.ServerMessage:
        if message.HasField("prompt"):
            return self._known_verdict(_end(message.prompt))
        draft = message.draft
        return self._known_verdict(draft.base_len, draft.tokens, check_parents(draft.parents, len(draft.tokens)))

    def _take_credit(self, credit: wire.Credit) -> None:
        self._credit = credit.position
        self.round_trip_us = credit.round_trip_us or self.round_trip_us

    def _known_verdict(
        self, base_len: int, draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> wire.ServerMessage:
        """On what is decided already."""
        self._told = len(self.committed)
        tokens, levels = self.committed[base_len:], [0, *depths(parents)]
        path, _ = walk(draft, parents, lambda node: tokens[levels[node]] if levels[node] < len(tokens) else -1)
        finish = wire.Finish.Name(wire.FINISH_UNSPECIFIED if self._finish is None else self._finish)
        verdict = wire.Verdict(epoch=self._epoch, base_len=base_len, tokens=tokens, accepted=len(path), finish=finish)
        return wire.ServerMessage(verdict=verdict)


def _end(prompt: wire.Prompt) -> int:
    """Committed length right behind a Prompt."""
    return prompt.base_len + len(prompt.tokens)


def _position(message: wire.ClientMessage) -> int:
    """That a Prompt or Draft names."""
    return int(message.prompt.base_len if message.HasField("prompt") else message.draft.base_len)
