"""The client session: the device's end of a conversation, a state machine without I/O."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.client_frames import (
    FINISH,
    BrokenFrameError,
    OutgoingFrames,
    check_verdict,
    classify,
    parse_dtype,
    parse_echo,
    parse_fault,
    parse_limits,
    parse_logprobs,
    parse_rows,
    parse_server_message,
    sampling_message,
)
from moa_runtime.session.client_table import AWAITING, CALLS, Action, Call, State, transition
from moa_runtime.session.events import (
    Cause,
    Committed,
    Decided,
    Faulted,
    Finished,
    FinishReason,
    GrammarState,
    Origin,
    Policy,
    Resumed,
    RolledBack,
    Sampling,
    SessionEvent,
    TokenLogprobs,
    Welcomed,
)
from moa_runtime.session.handshake import Limits, digest
from moa_runtime.session.snapshot import Snapshot
from moa_runtime.session.tree import DraftTree, encode_confidences
from moa_runtime.tokens import common_length
from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: Consecutive OUT_OF_SYNC faults that are answered by a replay; the next one is reported.
_MAX_OUT_OF_SYNC = 8


class LocalProtocolError(Exception):
    """The application made a call that the session's state does not allow."""


class LinkState(enum.Enum):
    """State of the connection to the server."""

    DOWN = "down"
    HANDSHAKE = "handshake"  # Hello sent, no Welcome yet
    UP = "up"


class ClientSession:
    """One conversation on the device: a committed prefix, supplied tokens of a pending prompt, a tentative suffix.

    The application appends drafted tokens (:meth:`extend`), has them verified (:meth:`propose`), passes in every frame
    that arrives (:meth:`receive`) and sends the frames of :meth:`frames_to_send`. While the device is offline, the
    suffix grows and nothing is sent; there is no other code path for it.

    What calls and frames do in each state is defined by :mod:`~moa_runtime.session.client_table`.

    Args:
        fingerprints: those of the bundle.
        stop_tokens: tokens that end an answer.
        policy: what happens to offline tokens that the target does not choose.
        row_encoding: ``RowEncoding`` of the wire for memory rows.
        vocab_size: size of the target's vocabulary; larger token ids are refused.

    Attributes:
        policy: as above; may be set at any time.
        limits: limits of the verifier, as of the last Welcome.
        dtype: type of its target's numbers; empty if it is unknown.
        committed: tokens that the target has confirmed.
        answering: whether an answer is running.
        sampling: sampling of the last answer.
        grammar: state of its grammar; None if it has none, or the device cannot follow it.
        rows: number of memory rows that the device holds, for the first tokens of the conversation.
        link: state of the connection.
        wants_rows: whether the next connection asks for memory rows.
        capabilities: ``Capability`` values of the last Welcome; None before the first.
        held: if set, only a new prompt is requested from the server; :meth:`resume` makes up for it.
    """

    def __init__(
        self,
        fingerprints: Fingerprints,
        *,
        stop_tokens: Sequence[int],
        policy: Policy = Policy.ROLLBACK,
        row_encoding: int = wire.ROW_ENCODING_INT8,
        vocab_size: int = 1 << 32,
    ) -> None:
        self.fingerprints = fingerprints
        self._stop_tokens = frozenset(stop_tokens)
        self.policy = policy
        self._row_encoding = row_encoding
        self._vocab_size = vocab_size
        # The conversation.
        self.committed: list[int] = []
        self._supplied: list[int] = []
        self._kept = 0  # number of supplied tokens, at their end, that are offline tokens kept by policy
        self._tentative: list[int] = []
        self._origins: list[Origin] = []
        # The answer.
        self.answering = False
        self._answer_start: int | None = None  # committed length at which the last answer began
        self.sampling = Sampling()
        self.grammar: GrammarState | None = None
        self._max_length = 0
        self._while_away = True
        # The connection.
        self.link = LinkState.DOWN
        self.limits = Limits()
        self.dtype = ""
        self.capabilities: frozenset[int] | None = None
        self.held = False
        self.wants_rows = True
        self.rows = 0
        self._rows_until = 0  # rows before this position are in flight
        self._resume_token = ""
        self._server_length = 0  # length of the committed prefix that the server has
        self._out_of_sync = 0  # faults since the last verdict
        self._outgoing = OutgoingFrames()

    # -- the conversation ------------------------------------------------------------------------

    @property
    def tentative(self) -> tuple[int, ...]:
        """Tokens that the target has not seen or not answered yet."""
        return tuple(self._tentative)

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation: committed, supplied, tentative. A drafter continues them."""
        return [*self.committed, *self._supplied, *self._tentative]

    @property
    def length(self) -> int:
        """Number of :attr:`tokens`."""
        return len(self.committed) + len(self._supplied) + len(self._tentative)

    @property
    def supplied(self) -> int:
        """Number of supplied tokens of a pending prompt."""
        return len(self._supplied)

    @property
    def unconfirmed(self) -> tuple[tuple[int, Origin], ...]:
        """Answer tokens after the committed prefix with their origins: first the kept ones, then the tentative ones."""
        kept = self._supplied[len(self._supplied) - self._kept :]
        return (*((token, Origin.KEPT) for token in kept), *zip(self._tentative, self._origins, strict=True))

    @property
    def answer_start(self) -> int:
        """Position at which the last answer began; 0 if there is none."""
        return self._answer_start or 0

    @property
    def max_new_tokens(self) -> int:
        """Length limit of the last answer, tokens; 0 for none."""
        return self._max_length - self.answer_start if self._max_length else 0

    @property
    def room(self) -> int | None:
        """Number of tokens that the answer may have after the tentative ones; None without a limit."""
        if not self._max_length:
            return None
        return max(0, self._max_length - self.length)

    @property
    def tentative_finish(self) -> FinishReason | None:
        """Why the tentative suffix is complete: an end-of-turn token or the length limit; None if it is not."""
        if self._tentative and self._tentative[-1] in self._stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.room == 0 else None

    # -- the state ---------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The session's state, derived from the link, the answer, the frame in flight and the credit."""
        if self.link is not LinkState.UP:
            if self.link is LinkState.DOWN:
                return State.OFFLINE_ANSWERING if self.answering else State.DOWN
            return State.RESUMING if self.answering else State.HANDSHAKE
        if not self.answering:
            return State.IDLE
        if self._outgoing.awaits_revocation:
            return State.REVOKING
        if self._outgoing.in_flight is not None:
            return State.PROMPTED if self.awaiting_prefill else State.PROPOSED
        if self.credit_open:
            return State.STREAMING
        server_lacks_tokens = bool(self._supplied) or self._server_length < len(self.committed)
        return State.NEEDS_PROMPT if server_lacks_tokens else State.DRAFTING

    @property
    def takes_unsolicited(self) -> bool:
        """Whether the server reads unsolicited drafts and confidences, as of the last Welcome."""
        return wire.CAPABILITY_UNSOLICITED_DRAFTS in (self.capabilities or ())

    @property
    def may_propose(self) -> bool:
        """Whether :meth:`propose` would send a frame."""
        return self._may(Call.PROPOSE)

    @property
    def may_send_unsolicited(self) -> bool:
        """Whether :meth:`send_unsolicited` is allowed."""
        return self.takes_unsolicited and self._may(Call.SEND_UNSOLICITED)

    @property
    def may_grant_credit(self) -> bool:
        """Whether :meth:`grant_credit` is allowed."""
        return self._may(Call.GRANT_CREDIT)

    @property
    def awaiting_verdict(self) -> bool:
        """Whether the next frame is due from the server: an answer, a pushed verdict, or CreditRevoked."""
        return self.state in AWAITING

    @property
    def awaiting_prefill(self) -> bool:
        """Whether the awaited verdict is on a Prompt, which takes the target longer."""
        flight = self._outgoing.in_flight
        return flight is not None and flight.supplied > 0

    @property
    def credit(self) -> int:
        """Position up to which the server may push verdicts; 0 without credit."""
        return self._outgoing.credit

    @property
    def credit_open(self) -> bool:
        """Whether the server pushes verdicts, or will after it has the prompt."""
        return self.link is LinkState.UP and self.answering and self._outgoing.credit > self._known

    @property
    def server_may_push(self) -> bool:
        """Whether pushed verdicts may still arrive: the credit is open, or its revocation is not confirmed."""
        return self.credit_open or self._outgoing.awaits_revocation

    @property
    def rows_coming(self) -> int:
        """Number of memory rows that follow without a further request."""
        return max(0, self._rows_until - self.rows) if self.link is LinkState.UP else 0

    @property
    def stamp(self) -> int:
        """Stamp of the newest frame that has one."""
        return self._outgoing.stamp

    @property
    def _known(self) -> int:
        """Number of tokens that are not tentative: committed and supplied."""
        return len(self.committed) + len(self._supplied)

    def _may(self, call: Call) -> bool:
        return self.state in CALLS[call].next_states

    def _check(self, call: Call) -> None:
        """Raise LocalProtocolError if the state does not allow the call."""
        if not self._may(call):
            raise self._refusal(call)

    def _refusal(self, call: Call, **values: int) -> LocalProtocolError:
        text = CALLS[call].refusal.format(link=self.link.value, known=self._known, **values)
        return LocalProtocolError(text)

    # -- calls: answers ----------------------------------------------------------------------------

    def prompt(
        self, tokens: Sequence[int], sampling: Sampling, max_new_tokens: int = 0, *, while_away: bool = True
    ) -> None:
        """Append the user's turn and ask for an answer; works offline too.

        Args:
            tokens: tokens of the user's turn.
            sampling: how the target chooses the answer's tokens.
            max_new_tokens: length limit of the answer, 0 for none.
            while_away: whether the server may finish the answer while the device is disconnected.

        Raises:
            LocalProtocolError: if an answer is running, or there are no tokens.
        """
        self._check(Call.PROMPT)
        if not tokens:
            raise LocalProtocolError("a prompt needs at least one token")
        self._supplied, self._kept = list(tokens), 0
        self.sampling = sampling
        self._answer_start = len(self.committed) + len(tokens)
        self._max_length = self._answer_start + max_new_tokens if max_new_tokens else 0
        self._while_away = while_away
        self._answer_supplied()

    def continue_answer(
        self,
        tokens: Sequence[int],
        answer_start: int,
        sampling: Sampling,
        max_new_tokens: int = 0,
        *,
        while_away: bool = True,
    ) -> None:
        """Continue a finished answer as if its length limit had been larger; works offline too.

        Args:
            tokens: tokens between the committed ones and the end of the answer; may be empty.
            answer_start: position of the answer's first token.
            sampling: how the target chooses the next tokens.
            max_new_tokens: number of tokens that may be added, 0 for no limit.
            while_away: as for :meth:`prompt`.

        Raises:
            LocalProtocolError: if an answer is running, or this one is empty.
        """
        self._check(Call.CONTINUE)
        if not 0 < answer_start < len(self.committed) + len(tokens):
            raise LocalProtocolError(f"can't continue an answer from {answer_start} on: it has no tokens")
        self.committed += tokens
        self.sampling, self._while_away = sampling, while_away
        self._answer_start = answer_start
        self._max_length = len(self.committed) + max_new_tokens if max_new_tokens else 0
        self.answering = True
        # As if the server had lost a running answer: replay its tokens, the server decides what follows.
        self._replay()

    def extend(self, tokens: Sequence[int], origin: Origin) -> None:
        """Append drafted tokens to the tentative suffix; ``origin`` is DRAFTED or OFFLINE.

        Raises:
            LocalProtocolError: if no answer is running.
        """
        self._check(Call.EXTEND)
        self._tentative += tokens
        self._origins += [origin] * len(tokens)

    def declare_offline(self, after: int) -> bool:
        """Mark all tentative tokens after the first ``after`` as written offline; return whether there are any."""
        found = len(self._tentative) > after
        self._origins[after:] = [Origin.OFFLINE] * len(self._origins[after:])
        return found

    def cancel(self) -> list[SessionEvent]:
        """End the answer at the last committed token; withdraw a prompt that the server has not answered."""
        events = self._drop_tentative()
        self._supplied, self._kept = [], 0
        self.answering = False
        self._outgoing.begin_epoch(len(self.committed))
        if self.link is LinkState.UP:
            self._outgoing.cancel(len(self.committed))
            self._server_length = min(self._server_length, len(self.committed))
        return events

    def rewind(self, length: int) -> None:
        """Drop committed tokens from position ``length`` on; the next prompt continues from there.

        Nothing is sent, because a Prompt names the position that it continues from.

        Raises:
            LocalProtocolError: if an answer is running, or fewer tokens are committed.
        """
        self._check(Call.REWIND)
        if not 0 <= length <= len(self.committed):
            raise LocalProtocolError(f"can't rewind to {length}: {len(self.committed)} tokens are committed")
        self._answer_start = None
        self._truncate(length)

    def keep(self, start: int, tokens: Sequence[int]) -> list[SessionEvent]:
        """Truncate the last answer at ``start``, keep ``tokens`` there and have the target continue after them.

        The answer may be running or finished. End-of-turn tokens are left out, because the target decides where the
        turn ends, and so are tokens for which the context has no room.

        Raises:
            LocalProtocolError: if ``start`` is outside the answer, or no tokens are left to keep.
        """
        kept = self.keepable(tokens, start)
        if self._answer_start is None or not self._answer_start <= start <= len(self.committed):
            raise LocalProtocolError(f"can't keep tokens from {start} on: no answer of the target has that position")
        if not kept:
            raise LocalProtocolError("can't keep an empty text")
        events = self._drop_tentative()
        self._truncate(start)
        self._supplied, self._kept = kept, len(kept)
        self._answer_supplied()
        return events

    def keepable(self, tokens: Sequence[int], start: int) -> list[int]:
        """Return those of ``tokens`` that :meth:`keep` can supply at ``start``.

        Without end-of-turn tokens, and leaving room in context and answer for one token of the target. None if the
        answer has a grammar, and the text is not known to conform to it.
        """
        if self.sampling.grammar is not None:
            answer = [*self.tokens[self.answer_start : start], *tokens]
            if self.grammar is None or not self.grammar.accepts(answer):
                return []
        without_stops = [token for token in tokens if token not in self._stop_tokens]
        end = min(self.limits.max_context, self._max_length or self.limits.max_context)
        return without_stops[: max(0, end - 1 - start)]

    # -- calls: the connection -----------------------------------------------------------------------

    def connect(self) -> None:
        """Send Hello on a new connection. An application that keeps snapshots saves one before it sends the frame.

        Raises:
            LocalProtocolError: if the link is not down.
        """
        self._check(Call.CONNECT)
        self.link = LinkState.HANDSHAKE
        encoding = self._row_encoding if self.wants_rows else wire.ROW_ENCODING_UNSPECIFIED
        known = [self.committed, *([[*self.committed, *self._supplied]] if self._supplied else [])]
        resume = wire.Resume(
            token=self._resume_token,
            marks=[wire.Mark(length=len(tokens), digest=digest(tokens)) for tokens in known],
            answering=self.answering,
            rows=self.rows,
        )
        self._outgoing.hello(self.fingerprints, encoding, resume)

    def disconnected(self) -> None:
        """Take the link down. Committed and tentative tokens stay."""
        self.link = LinkState.DOWN
        self._outgoing.clear()

    def propose(self, most: int | None = None, *, tree: DraftTree | None = None, claims: bool = True) -> bool:
        """Send the tentative suffix as a Draft; an empty suffix asks the target for one token.

        Args:
            most: maximal number of tokens to send; None for the verifier's limit.
            tree: sent instead of the suffix, which should be its likeliest path. If the frame is lost with its
                connection, or if the verifier takes chains only, the suffix is sent instead.
            claims: whether all scores of the tree are the drafter's; if not, no confidences are sent.

        Returns:
            whether a frame was built: only in the state DRAFTING.
        """
        if not self.may_propose:
            return False
        allowed = self.limits.max_draft_tokens if most is None else min(most, self.limits.max_draft_tokens)
        if tree is not None and self.limits.trees:
            self._send_draft(len(self.committed), tree, allowed, asks=True, claims=claims)
        else:
            self._outgoing.draft(len(self.committed), self._tentative[:allowed], ())
        return True

    def send_unsolicited(self, tree: DraftTree, base_len: int) -> int:
        """Send a Draft that asks for nothing: the server may verify it before it continues.

        The tentative suffix and the state stay as they are.

        Args:
            tree: of it as many tokens are sent as the verifier takes; only the likeliest path if it takes chains only.
            base_len: position of the tree's first token, at most the number of committed tokens.

        Returns:
            the frame's stamp, which the verdict on it names.

        Raises:
            LocalProtocolError: if :attr:`may_send_unsolicited` is False, or the position is outside the answer.
        """
        if not (self.may_send_unsolicited and self.answer_start <= base_len <= len(self.committed)):
            raise self._refusal(Call.SEND_UNSOLICITED, position=base_len)
        tree = tree if self.limits.trees else tree.likeliest_chain()
        self._send_draft(base_len, tree, self.limits.max_draft_tokens, asks=False)
        return self._outgoing.stamp

    def _send_draft(self, base_len: int, tree: DraftTree, most: int, *, asks: bool, claims: bool = True) -> None:
        tokens, parents, confidences = tree.tokens[:most], tree.parents[:most], b""
        if self.takes_unsolicited and claims:
            confidences = encode_confidences(parents, tree.scores[:most])
        self._outgoing.draft(base_len, tokens, parents, confidences, asks=asks)

    def grant_credit(self, position: int) -> None:
        """Let the server push verdicts until ``position`` tokens are committed.

        Raises:
            LocalProtocolError: if :attr:`may_grant_credit` is False, or the position is not after the known tokens.
        """
        if not self.may_grant_credit or position <= self._known:
            raise self._refusal(Call.GRANT_CREDIT, position=position)
        self._outgoing.grant_credit(position)

    def revoke_credit(self) -> None:
        """Revoke open credit; :meth:`propose` is allowed after CreditRevoked arrived. Does nothing without credit."""
        if self._may(Call.REVOKE_CREDIT) and self.credit_open:
            self._outgoing.revoke_credit()

    def note_round_trip(self, seconds: float) -> None:
        """Set the link's round trip time, which the next Credit tells the server."""
        self._outgoing.round_trip_us = max(1, min(int(1e6 * seconds), (1 << 32) - 1))

    def resend(self) -> bool:
        """Send the frame in flight and the newest Credit again; both ends drop duplicates.

        Returns:
            whether a frame was built.
        """
        return self._may(Call.RESEND) and self._outgoing.resend()

    def resume(self) -> list[SessionEvent]:
        """Send the server the tokens that it lacks, unless :attr:`held` forbids it."""
        if not self._may(Call.RESUME) or (self.held and len(self._supplied) == self._kept):
            return []
        missing = len(self.committed) - self._server_length
        self._send_prompt()
        return [Resumed(missing)] if missing else []

    def frames_to_send(self) -> list[bytes]:
        """Remove and return the frames to send, in order."""
        return self._outgoing.take()

    # -- frames from the server ------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[SessionEvent]:
        """Process one frame. Never raises because of its content: a broken frame becomes a Faulted event."""
        try:
            message = parse_server_message(data)
            action = transition(classify(message, self._outgoing.epoch), self.state).action
            return [*parse_echo(message), *self._do(action, message)]
        except BrokenFrameError as error:
            return [Faulted(error.code, str(error), 0)]

    def _do(self, action: Action, message: wire.ServerMessage) -> list[SessionEvent]:
        match action:
            case Action.CANCEL_STALE_ANSWER:
                return self._cancel_stale_answer(message.welcome)
            case Action.RECONCILE:
                return self._reconcile(message.welcome)
            case Action.COMMIT:
                return self._commit_verdict(message.verdict)
            case Action.COMMIT_IF_RESENT:
                # A frame that was sent twice may get two verdicts, and the second one may have more tokens.
                return self._commit_verdict(message.verdict) if self._outgoing.repeated else []
            case Action.END_REVOCATION:
                if message.standing.serial == self._outgoing.serial:
                    self._outgoing.awaits_revocation = False
                return []
            case Action.STORE_ROWS:
                return self._store_rows(message.rows)
            case Action.REPLAY:
                return self._replay_missing(message.fault)
            case Action.REPORT:
                return [parse_fault(message.fault)]
            case Action.DROP | Action.PASS_ECHO:
                return []

    def _welcomed(self, welcome: wire.Welcome) -> tuple[list[SessionEvent], bool]:
        """Bring the link up; return the events, and whether the server is in the client's epoch."""
        self.limits, self.dtype = parse_limits(welcome), parse_dtype(welcome)
        self.link = LinkState.UP
        resumed = bool(self._resume_token) and welcome.resume_token == self._resume_token
        self._resume_token = welcome.resume_token
        same_epoch = welcome.epoch == self._outgoing.epoch
        self._server_length = min(welcome.committed_length, len(self.committed))
        self._outgoing.sync_counters(welcome.epoch, welcome.connection)
        self._rows_until = 0
        self.capabilities = frozenset(welcome.capabilities)
        return [Welcomed(resumed, wire.CAPABILITY_DRAFTS in welcome.capabilities)], same_epoch

    def _cancel_stale_answer(self, welcome: wire.Welcome) -> list[SessionEvent]:
        events, same_epoch = self._welcomed(welcome)
        if welcome.epoch and not same_epoch:  # an answer that was cancelled offline may still run at the server
            self._outgoing.begin_epoch()
            self._outgoing.cancel(self._server_length)
        return events

    def _reconcile(self, welcome: wire.Welcome) -> list[SessionEvent]:
        (events, same_epoch), agreed = self._welcomed(welcome), welcome.committed_length
        if not same_epoch or agreed != self._known:
            return [*events, *self._replay()]
        events += self._commit_supplied()
        self._server_length = agreed
        if welcome.verdict_follows:
            self._outgoing.expect_verdict(agreed)
        if self._keeps_offline_text:
            return [*events, *self._replay()]
        if not self.held:
            self.propose()
        return events

    def _commit_verdict(self, verdict: wire.Verdict) -> list[SessionEvent]:
        flight, known = self._outgoing.in_flight, self._known
        check_verdict(verdict, self._vocab_size)
        logprobs = [] if self.sampling.logprobs is None else parse_logprobs(verdict, self._vocab_size)
        overlap = known - verdict.base_len
        if overlap < 0:
            raise BrokenFrameError(f"the server left out tokens from {known} to {verdict.base_len}")
        new = list(verdict.tokens[overlap:])
        if not new or (overlap and self._supplied):
            return []  # a duplicate
        if overlap and list(verdict.tokens[:overlap]) != self.committed[verdict.base_len :]:
            raise BrokenFrameError("the server decided a position twice, with different tokens")
        end, limit = known + len(new), min(self.limits.max_context, self._max_length or self.limits.max_context)
        if end > limit:
            raise BrokenFrameError(f"the server wrote up to position {end}, but the answer ends at {limit}")
        self._outgoing.in_flight, self._out_of_sync = None, 0
        accepted = max(0, verdict.accepted - overlap)
        compute_s, stamp = verdict.compute_us / 1e6, verdict.draft_stamp
        if verdict.pushed or flight is None:
            decided = Decided(Cause.PUSHED, 0, verdict.drafted, accepted, compute_s, verdict.draft_us / 1e6, stamp)
            accepted_here = accepted if stamp else 0  # the server's own drafts count as the target's text
        else:
            cause = Cause.ASKED if flight.asked else Cause.FETCHED
            drafted = min(verdict.drafted, flight.drafted) if stamp else flight.drafted
            counts = flight.supplied, drafted, accepted
            decided = Decided(cause, *counts, compute_s, draft_stamp=stamp, sent=flight.drafted)
            accepted_here = accepted
        events: list[SessionEvent] = [decided, *self._commit_supplied()]
        events += self._commit(new, accepted_here, logprobs[overlap:])
        self._rows_until = min(verdict.rows_until, len(self.committed))
        self._server_length = len(self.committed)
        if self._supplied:  # the policy KEEP overruled the target's choice
            self._outgoing.begin_epoch(len(self.committed))
            events += self.resume()
        elif verdict.finish in FINISH:
            events += self._drop_tentative()
            self.answering = False
            self._outgoing.end_credit()
            events.append(Finished(FINISH[verdict.finish]))
        return events

    def _store_rows(self, message: wire.MemoryRows) -> list[SessionEvent]:
        end = self._outgoing.rows_valid_until(message.epoch, message.start + message.count)
        rows = parse_rows(message, self.rows, min(end, len(self.committed)))
        if rows is None:
            return []
        self.rows = rows.start + len(rows.keys)
        return [rows]

    def _replay_missing(self, fault: wire.Fault) -> list[SessionEvent]:
        """Send the server the tokens that it reports missing."""
        if not self._known:
            return [parse_fault(fault)]
        self._out_of_sync += 1
        if self._out_of_sync > _MAX_OUT_OF_SYNC:
            raise BrokenFrameError(f"the server still lacks tokens that were replayed: {fault.text}")
        self._server_length = min(fault.committed_length, len(self.committed))
        return self._replay()

    # -- prompts -----------------------------------------------------------------------------------------

    def _answer_supplied(self) -> None:
        """Ask for an answer to the supplied tokens, now or after the link came up."""
        self.answering = True
        self._outgoing.begin_epoch(len(self.committed))
        if self.link is LinkState.UP:
            self._send_prompt()

    def _replay(self) -> list[SessionEvent]:
        """Have a running answer continued by a server that has ``_server_length`` of the committed tokens."""
        if self._keeps_offline_text:
            self._keep_tentative()
        if not self._supplied:
            # A Prompt needs at least one token: send the last committed one again.
            self._server_length = min(self._server_length, len(self.committed) - 1)
        self._outgoing.begin_epoch()
        return self.resume()

    def _send_prompt(self) -> None:
        """Send a Prompt with all tokens that the server lacks: lost committed ones and the supplied ones."""
        base_len = min(self._server_length, len(self.committed))
        prompt = wire.Prompt(
            base_len=base_len,
            tokens=self.committed[base_len:] + self._supplied,
            rows_from=self.rows,
            sampling=sampling_message(self.sampling),
            max_length=self._max_length,
            while_away=self._while_away,
            answer_from=self.answer_start,
        )
        self._outgoing.prompt(prompt)

    # -- tokens ------------------------------------------------------------------------------------------

    @property
    def _keeps_offline_text(self) -> bool:
        """Whether the tentative suffix has offline tokens that the policy keeps."""
        kept = self.policy is Policy.KEEP and Origin.OFFLINE in self._origins
        return kept and (self.sampling.grammar is None or bool(self.keepable(self._tentative, self._known)))

    def _commit_supplied(self) -> list[SessionEvent]:
        """Commit the supplied tokens, which the server has."""
        kept = self._supplied[len(self._supplied) - self._kept :]
        self.committed += self._supplied
        self._supplied, self._kept = [], 0
        if not kept:
            return []
        return [Committed(len(self.committed) - len(kept), tuple(kept), (Origin.KEPT,) * len(kept))]

    def _commit(self, tokens: list[int], accepted: int, logprobs: Sequence[TokenLogprobs | None]) -> list[SessionEvent]:
        """Append a verdict's tokens to the prefix; the suffix stays as far as it agrees.

        Args:
            tokens: the verdict's new tokens.
            accepted: number of tokens that were drafted here, possibly on a branch of the tree beside the suffix.
            logprobs: of each token; empty without any.
        """
        start = len(self.committed)
        agreed = common_length(tokens, self._tentative)
        rest, rest_origins = self._tentative[agreed:], self._origins[agreed:]
        disagrees = bool(rest) and agreed < len(tokens)
        offline = self.policy is Policy.KEEP and Origin.OFFLINE in rest_origins
        # The verdict was so late that the device has continued offline meanwhile.
        keeps = disagrees and offline and bool(self.keepable(rest, start + agreed))
        if keeps:
            tokens = tokens[:agreed]
        origins = [
            *self._origins[:agreed],
            *(Origin.DRAFTED if at < accepted else Origin.CORRECTED for at in range(agreed, len(tokens))),
        ]
        self.committed += tokens
        self._tentative, self._origins = rest, rest_origins
        committed = Committed(start, tuple(tokens), tuple(origins), tuple(logprobs[: len(tokens)]))
        if keeps:
            self._keep_tentative()
        elif disagrees:
            self._tentative, self._origins = [], []
            return [RolledBack(start + agreed, tuple(rest), tuple(rest_origins)), committed]
        return [committed]

    def _keep_tentative(self) -> None:
        """Turn the tentative suffix into supplied tokens."""
        kept = self.keepable(self._tentative, len(self.committed) + len(self._supplied))
        self._supplied += kept
        self._kept += len(kept)
        self._tentative, self._origins = [], []

    def _drop_tentative(self) -> list[SessionEvent]:
        dropped, origins = tuple(self._tentative), tuple(self._origins)
        self._tentative, self._origins = [], []
        if not dropped:
            return []
        return [RolledBack(len(self.committed) + len(self._supplied), dropped, origins)]

    def _truncate(self, length: int) -> None:
        del self.committed[length:]
        self.rows = min(self.rows, length)
        self._server_length = min(self._server_length, length)

    # -- snapshots ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the session as JSON values for :meth:`restore`; allowed at any time, changes nothing.

        The snapshot contains the conversation's tokens and its resume token: keep it as private as the text.
        """
        return Snapshot(
            policy=self.policy,
            limits=self.limits,
            resume_token=self._resume_token,
            epoch=self._outgoing.epoch,
            connection=self._outgoing.connection,
            committed=list(self.committed),
            supplied=list(self._supplied),
            kept=self._kept,
            tentative=list(self._tentative),
            origins=list(self._origins),
            answering=self.answering,
            answer_start=self._answer_start,
            sampling=self.sampling,
            max_length=self._max_length,
            while_away=self._while_away,
        ).to_json(self.fingerprints)

    @classmethod
    def restore(
        cls,
        snapshot: object,
        fingerprints: Fingerprints,
        *,
        stop_tokens: Sequence[int],
        row_encoding: int = wire.ROW_ENCODING_INT8,
        vocab_size: int = 1 << 32,
    ) -> ClientSession:
        """Restore a session from a snapshot, with its link down and without memory rows.

        The snapshot may be older than the end of its process: the next connection names the tokens that it has, and
        the server continues after those that it has too.

        Args:
            snapshot: result of :meth:`snapshot`.
            fingerprints: those of the present bundle. The drafter may differ, because the text is the target's.
            stop_tokens, row_encoding, vocab_size: as for the class.

        Raises:
            SnapshotError: if it is not a snapshot, or has another version, target or tokenizer.
        """
        saved = Snapshot.from_json(snapshot, fingerprints, vocab_size)
        session = cls(
            fingerprints, stop_tokens=stop_tokens, policy=saved.policy, row_encoding=row_encoding, vocab_size=vocab_size
        )
        session.limits = saved.limits
        session.committed = saved.committed
        session.answering = saved.answering
        session._supplied, session._kept = saved.supplied, saved.kept
        session._tentative, session._origins = saved.tentative, saved.origins
        session._answer_start = saved.answer_start
        session.sampling, session._max_length = saved.sampling, saved.max_length
        session._while_away = saved.while_away
        session._resume_token = saved.resume_token
        session._outgoing = OutgoingFrames(saved.epoch, saved.connection, restored=True)
        return session
