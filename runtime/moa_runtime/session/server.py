"""The verifier's end of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.session.checks import draft_problem, no_answer, prompt_problem, unreached
from moa_runtime.session.greeting import goes_on, marks_known, welcome_of
from moa_runtime.session.handshake import Limits, fault
from moa_runtime.session.rows import Float32
from moa_runtime.session.rows_behind import RowsBehind
from moa_runtime.session.sampling import Sampling, sampling_of
from moa_runtime.session.tree import check_parents, depths, walk
from moa_runtime.session.work import RowsWork, Verify, until_end
from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: While verdicts are pushed, rows are made for so many tokens at a time ...
_ROWS_TOGETHER = 16
#: ... of at most so many at once ...
_MOST_ROWS = 64
#: ... and so many follow a verdict, so that text need not wait for them.
_ROWS_BEHIND_PUSHED = 4
#: ... but of the prompt more: without them the client cannot know whether its drafts would be faster.
_PROMPT_ROWS_BEHIND_PUSHED = 16


class ServerSession:
    """One conversation at the verifier. It outlives connections; all it knows of them is their count.

    Only a Prompt or Cancel cuts what is committed. A frame that names an earlier position than the server has reached
    is answered from there, without the engine: what was lost on its way is said once more.

    =============  =========================================  ==========================================
    frame          is taken when                              and then
    =============  =========================================  ==========================================
    Prompt         epoch newer, base_len <= committed         cut, append, Verify
    Prompt         of this epoch: sent again                  a verdict if there is one, else Verify
    Draft          of this epoch, an answer runs there        at the end Verify, before it a verdict
    Credit         of this epoch                              Standing if it is used up; see next_work
    Cancel         epoch not older                            cut, end the answer
    Ping           always                                     Pong
    =============  =========================================  ==========================================

    Frames of an older epoch are dropped; a position that was never reached is the fault OUT_OF_SYNC, and so is a Draft
    or Credit of an epoch whose Prompt did not come.

    Whoever runs a session takes a frame as soon as there is one (:meth:`receive`), else what :meth:`next_work` says,
    else :meth:`take_rows`; each piece of work is decided before anything else is done.

    Memory rows go to a connection once: from those that its Hello says the client holds, or its Prompt, in order.

    Attributes:
        connection: the count of the newest connection.
        round_trip_us: of its link, as the client says; 0 where it does not.
    """

    def __init__(self, limits: Limits, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self.limits = limits
        self.committed: list[int] = []
        self._vocab_size = vocab_size
        self._stop_tokens = frozenset(stop_tokens)
        self.connection = 0
        self._epoch = self.round_trip_us = 0
        self._answer_start: int | None = None  # committed length right after the last Prompt
        self._finish: int | None = None  # of the answer that ended, if one did
        self._max_length = 0
        self._sampling = Sampling()
        self._while_away = False
        self._credit = 0  # up to here verdicts are pushed
        self._rows = RowsBehind()
        self._rows_turn = False  # rows may be made before the next verdict is pushed
        self._asked = False  # the client wants something of this connection
        self._heard: int | None = None  # before the answer went on unheard

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
        self._while_away = self._while_away and same
        self._credit, self._asked, self._heard = resume.credit if same else 0, same, None
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
        event = message.WhichOneof("event")
        if event == "prompt":
            return self._prompt(message.prompt)
        if event == "draft":
            return self._draft(message.draft)
        if event == "credit":
            return self._take_credit(message.credit)
        if event == "cancel":
            return self._cancel(message.cancel)
        if event == "ping":
            return wire.ServerMessage(pong=wire.Pong())
        return fault(wire.FAULT_CODE_PROTOCOL, f"a {event or 'empty'} event cannot follow the Hello of a connection")

    # -- what is done unasked ------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Whether an answer is being written."""
        return self._answer_start is not None and self._finish is None

    @property
    def pushes(self) -> bool:
        """Whether verdicts are to be sent unasked."""
        return self.runs and len(self.committed) < self._credit

    @property
    def drafted_for(self) -> bool:
        """Whether the client could draft: it takes memory rows."""
        return self._rows.wanted

    @property
    def room(self) -> int | None:
        """Tokens that the answer may still have; None without a limit."""
        return max(0, self._max_length - len(self.committed)) if self._max_length else None

    @property
    def goes_on_alone(self) -> bool:
        """Whether an answer runs that is to be finished while the client is away."""
        return self._while_away and self.runs

    def next_work(self, *, rows: bool = True) -> Verify | RowsWork | None:
        """What the engine is to do for a client that waits: the next tokens within its credit, or memory ``rows``."""
        lacking = len(self.committed) - 1 - self._rows.next if rows and self._makes_rows else 0
        if self.pushes and not (self._rows_turn and lacking >= _ROWS_TOGETHER):
            return self._work(pushed=True)
        self._rows_turn = False
        if lacking < 1:
            return None
        end = min(len(self.committed) - 1, self._rows.next + _MOST_ROWS)
        return RowsWork(tuple(self.committed[:end]), self._rows.next)

    def go_on(self) -> Verify | None:
        """While the client is away: the work for the next token, if there is any. The verdict is not sent."""
        if not self.goes_on_alone:
            return None
        if self._heard is None:
            self._heard = len(self.committed)
        return self._work(pushed=True)

    def stop(self) -> None:
        """The engine failed on what no frame asked for: nothing is done until the client says something."""
        self._credit, self._asked = 0, False

    @property
    def rows_due(self) -> bool:
        """Whether there are memory rows to be made or sent."""
        return self._makes_rows and self._rows.sent < len(self.committed) - 1

    def take_rows(self) -> wire.ServerMessage | None:
        """Memory rows to be sent now, if there are any; behind a pushed verdict only a few."""
        if not self.pushes:
            return self._rows.take(_MOST_ROWS, self._epoch)
        of_prompt = self._rows.sent < (self._answer_start or 0)
        return self._rows.take(_PROMPT_ROWS_BEHIND_PUSHED if of_prompt else _ROWS_BEHIND_PUSHED, self._epoch)

    # -- what the engine did -------------------------------------------------------------------

    def decide(
        self, work: Verify, path: Sequence[int], token: int, compute_us: int = 0, draft_us: int = 0
    ) -> wire.ServerMessage:
        """Commit what the target chose; the verdict says it.

        Args:
            work: what was asked for.
            path: indices into the draft of the tokens that the target accepts.
            token: its own choice behind them.
            compute_us, draft_us: time of the target, and of the server's own draft, microseconds; for the verdict.
        """
        base_len = len(work.prefix)
        chosen = [*(work.draft[index] for index in path), token]
        most = self.limits.max_context
        tokens, finish = until_end(chosen, base_len, self._stop_tokens, self._max_length, most)
        self.committed = [*work.prefix, *tokens]
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
            pushed=work.pushed,
            drafted=len(work.draft) if work.pushed else 0,
        )
        if self._makes_rows and not self.pushes:
            verdict.rows_until = len(self.committed) - 1
        return wire.ServerMessage(verdict=verdict)

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Memory rows that the engine made, float32 ``[n, kv_heads, head_dim]`` from position ``start`` on."""
        # The last token has none: the target has not processed it.
        self._rows.add(start, keys, values, len(self.committed) - 1)

    def no_rows(self) -> None:
        """The engine makes none."""
        self._rows.none_come()

    # -- helpers -------------------------------------------------------------------------------

    @property
    def _makes_rows(self) -> bool:
        """Not for who only connects: a cache that was lost would be computed again, perhaps for nobody."""
        return self._rows.wanted and self._asked

    def _prompt(self, prompt: wire.Prompt) -> Verify | wire.ServerMessage | None:
        end = prompt.base_len + len(prompt.tokens)
        if prompt.epoch < self._epoch:
            return None
        if prompt.epoch == self._epoch and end == self._answer_start:
            return self._known_verdict(end) if end < len(self.committed) else self._work(supplied=len(prompt.tokens))
        problem = unreached(prompt.base_len, len(self.committed))
        if problem is None and prompt.epoch == self._epoch:
            problem = fault(wire.FAULT_CODE_PROTOCOL, "another Prompt of the same epoch; each begins one of its own")
        problem = problem or prompt_problem(prompt, self.limits, self._vocab_size)
        if problem is not None:
            return problem
        self._epoch, self._asked = prompt.epoch, True
        self._cut(prompt.base_len)
        self._rows.held_by_client(min(prompt.rows_from, end))
        self.committed += prompt.tokens
        self._answer_start = end
        self._max_length, self._while_away = prompt.max_length, prompt.while_away
        self._sampling = sampling_of(prompt.sampling)
        return self._work(supplied=len(prompt.tokens))

    def _draft(self, draft: wire.Draft) -> Verify | wire.ServerMessage | None:
        if draft.epoch < self._epoch:
            return None
        problem = unreached(draft.base_len, len(self.committed))
        behind = self._answer_start is not None and draft.base_len >= self._answer_start
        if problem is None and (not behind or draft.epoch > self._epoch):
            problem = no_answer(draft.base_len, len(self.committed))
        problem = problem or draft_problem(draft, self.limits, self._vocab_size)
        if problem is not None:
            return problem
        parents = check_parents(draft.parents, len(draft.tokens))
        self._asked, self._heard = True, None
        if draft.base_len < len(self.committed):
            return self._known_verdict(draft.base_len, draft.tokens, parents)
        if self._finish is not None:
            return None
        room = self.limits.max_context - draft.base_len
        rows_from = self._rows.next if self._rows.wanted else None
        return self._work(tuple(draft.tokens[:room]), tuple(parents[:room]), rows_from=rows_from)

    def _take_credit(self, credit: wire.Credit) -> wire.ServerMessage | None:
        if credit.epoch < self._epoch:
            return None
        if credit.epoch > self._epoch:
            return no_answer(len(self.committed), len(self.committed))
        self._credit, self._asked = credit.position, True
        self.round_trip_us = credit.round_trip_us or self.round_trip_us
        heard, self._heard = self._heard, None
        if credit.position > len(self.committed):
            return None if heard is None or heard == len(self.committed) else self._known_verdict(heard)
        return wire.ServerMessage(standing=wire.Standing(epoch=self._epoch, serial=credit.serial))

    def _cancel(self, cancel: wire.Cancel) -> wire.ServerMessage | None:
        if cancel.epoch < self._epoch:
            return None
        self._epoch = cancel.epoch
        self._cut(cancel.base_len)
        return None

    def _cut(self, length: int) -> None:
        """No answer runs behind what is left."""
        self._while_away, self._credit = False, 0
        del self.committed[length:]
        self._rows.cut(length)
        self._answer_start = self._finish = self._heard = None

    def _work(
        self,
        draft: tuple[int, ...] = (),
        parents: tuple[int, ...] = (),
        *,
        rows_from: int | None = None,
        supplied: int = 0,
        pushed: bool = False,
    ) -> Verify:
        return Verify(tuple(self.committed), draft, parents, self._sampling, rows_from, supplied, pushed)

    def _known_verdict(
        self, base_len: int, draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> wire.ServerMessage:
        """On what is decided already."""
        tokens, levels = self.committed[base_len:], [0, *depths(parents)]
        path, _ = walk(draft, parents, lambda node: tokens[levels[node]] if levels[node] < len(tokens) else -1)
        finish = wire.Finish.Name(wire.FINISH_UNSPECIFIED if self._finish is None else self._finish)
        verdict = wire.Verdict(epoch=self._epoch, base_len=base_len, tokens=tokens, accepted=len(path), finish=finish)
        return wire.ServerMessage(verdict=verdict)
