"""The device's link to the server: what goes over it, and what comes of that."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.session.client_frames import (
    FINISH,
    BrokenFrameError,
    check_verdict,
    classify,
    echo_of,
    fault_of,
    limits_of,
    parse_server_message,
    rows_of,
)
from moa_runtime.session.client_table import Action, Call, transition
from moa_runtime.session.events import Cause, Decided, Finished, Origin, Policy, Resumed, SessionEvent, Welcomed
from moa_runtime.session.handshake import Fingerprints, digest
from moa_runtime.session.link import Link, LinkState
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: The server lacks what a frame builds on; after so many times without a verdict it will never have it.
_MOST_OUT_OF_SYNC = 8


class Exchange(Link):
    """A conversation and its frames: drafts go out, verdicts come in, and what a link lost is made good.

    :class:`~moa_runtime.session.client.ClientSession` is the class to use.

    Attributes:
        held: nothing but a new question is asked for by itself, for now; :meth:`resume` makes up for it.
    """

    def __init__(
        self,
        fingerprints: Fingerprints,
        stop_tokens: Sequence[int],
        policy: Policy,
        row_encoding: int,
        vocab_size: int,
    ) -> None:
        super().__init__(fingerprints, stop_tokens, policy, row_encoding)
        self.held = False
        self._resume_token = ""
        self._vocab_size = vocab_size
        self._out_of_sync = 0  # faults since the last verdict

    def connect(self) -> None:
        """A new connection is open: greet the server. Whoever keeps snapshots makes one before the Hello is sent.

        Raises:
            LocalProtocolError: the link is not down.
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
        """The connection is gone. Committed and tentative tokens stay."""
        self.link = LinkState.DOWN
        self._outgoing.clear()

    def propose(self, most: int | None = None, *, tree: DraftTree | None = None) -> bool:
        """Send the tentative suffix, at most ``most`` tokens of it, to be verified.

        An empty suffix asks the target for one token. Returns whether a frame was made: not while
        the link is not up, another verdict is awaited, or no answer runs.

        Args:
            tree: sent in place of the suffix, which should be its likeliest path. Should the frame be lost with
                its link, or the verifier take chains only, the suffix is proposed in its stead.
        """
        if not self.may_propose:
            return False
        allowed = self.limits.max_draft_tokens if most is None else min(most, self.limits.max_draft_tokens)
        if tree is not None and self.limits.trees:
            tokens, parents = tree.tokens[:allowed], tree.parents[:allowed]
        else:
            tokens, parents = tuple(self._tentative[:allowed]), ()
        self._outgoing.draft(len(self.committed), tokens, parents)
        return True

    def resume(self) -> list[SessionEvent]:
        """Give the server what a running answer lacks there, unless that is :attr:`held` back."""
        if not self._may(Call.RESUME) or (self.held and len(self._supplied) == self._kept):
            return []
        missing = len(self.committed) - self._server_length
        self._send_prompt()
        return [Resumed(missing)] if missing else []

    # -- frames from the server ----------------------------------------------------------------

    def receive(self, data: bytes) -> list[SessionEvent]:
        """Take one frame; never raises on its content."""
        try:
            message = parse_server_message(data)
            action = transition(classify(message, self._outgoing.epoch), self.state).action
            return [*echo_of(message), *self._do(action, message)]
        except BrokenFrameError as error:
            return [error.event]

    def _do(self, action: Action, message: wire.ServerMessage) -> list[SessionEvent]:
        """What the table says."""
        match action:
            case Action.CANCEL_STALE_ANSWER:
                return self._settle(message.welcome)
            case Action.RECONCILE:
                return self._reconcile(message.welcome)
            case Action.COMMIT:
                return self._verdict(message.verdict)
            case Action.COMMIT_IF_RESENT:
                # What was sent twice may be answered twice, and the second answer say more; it is not said again.
                return self._verdict(message.verdict) if self._outgoing.repeated else []
            case Action.END_REVOCATION:
                return self._stand(message.standing)
            case Action.STORE_ROWS:
                return self._store(message.rows)
            case Action.REPLAY:
                return self._catch_up(message.fault)
            case Action.REPORT:
                return [fault_of(message.fault)]
            case Action.DROP | Action.PASS_ECHO:
                return []

    def _greeted(self, welcome: wire.Welcome) -> tuple[list[SessionEvent], bool]:
        """The link is up; also says whether the server is in the client's epoch."""
        self.limits = limits_of(welcome)
        self.link = LinkState.UP
        resumed = bool(self._resume_token) and welcome.resume_token == self._resume_token
        self._resume_token = welcome.resume_token
        same_epoch = welcome.epoch == self._outgoing.epoch
        self._server_length = min(welcome.committed_length, len(self.committed))
        self._outgoing.catch_up(welcome.epoch, welcome.connection)
        self._rows_until = 0
        return [Welcomed(resumed, wire.CAPABILITY_DRAFTS in welcome.capabilities)], same_epoch

    def _settle(self, welcome: wire.Welcome) -> list[SessionEvent]:
        events, same_epoch = self._greeted(welcome)
        if welcome.epoch and not same_epoch:  # an answer that was stopped meanwhile may run there
            self._outgoing.begin_epoch()
            self._outgoing.cancel(self._server_length)
        return events

    def _reconcile(self, welcome: wire.Welcome) -> list[SessionEvent]:
        (events, same_epoch), agreed = self._greeted(welcome), welcome.committed_length
        if not same_epoch or agreed != self._known:
            return [*events, *self._replay()]
        events += self._commit_supplied()
        self._server_length = agreed
        if welcome.verdict_follows:
            self._outgoing.expect(agreed)
        return [*events, *self._resume_answer()]

    def _verdict(self, verdict: wire.Verdict) -> list[SessionEvent]:
        flight, known = self._outgoing.in_flight, self._known
        check_verdict(verdict, self._vocab_size)
        behind = known - verdict.base_len
        if behind < 0:
            raise BrokenFrameError(f"the server left out tokens from {known} to {verdict.base_len}")
        new = list(verdict.tokens[behind:])
        if not new or (behind and self._supplied):
            return []  # said before
        if behind and list(verdict.tokens[:behind]) != self.committed[verdict.base_len :]:
            raise BrokenFrameError("the server decided a position twice, and differently")
        most = min(self.limits.max_context, self._max_length or self.limits.max_context)
        if known + len(new) > most:
            raise BrokenFrameError(f"the server wrote up to position {known + len(new)}, and the answer ends at {most}")
        self._outgoing.in_flight, self._out_of_sync = None, 0
        accepted = max(0, verdict.accepted - behind)
        compute_s, sharing = verdict.compute_us / 1e6, max(1, verdict.sharing)
        if verdict.pushed or flight is None:
            spent, wanted = (compute_s, verdict.draft_us / 1e6), verdict.drafts_wanted
            decided = Decided(Cause.PUSHED, 0, verdict.drafted, accepted, *spent, wanted, sharing)
            ours = 0  # the server's own drafts are the target's text here
        else:
            cause = Cause.ASKED if flight.asked else Cause.FETCHED
            decided = Decided(cause, flight.supplied, flight.drafted, accepted, compute_s, sharing=sharing)
            ours = accepted
        events: list[SessionEvent] = [decided, *self._commit_supplied(), *self._commit(new, ours)]
        self._rows_until = min(verdict.rows_until, len(self.committed))
        self._server_length = len(self.committed)
        if self._supplied:  # by the policy, in place of the target's choice
            self._outgoing.begin_epoch(len(self.committed))
            events += self.resume()
        elif verdict.finish in FINISH:
            events += self._drop_tentative()
            self.answering = False
            self._outgoing.end_credit()
            events.append(Finished(FINISH[verdict.finish]))
        return events

    def _store(self, message: wire.MemoryRows) -> list[SessionEvent]:
        end = self._outgoing.rows_hold_until(message.epoch, message.start + message.count)
        rows = rows_of(message, self.rows, min(end, len(self.committed)))
        if rows is None:
            return []
        self.rows = rows.start + len(rows.keys)
        return [rows]

    def _stand(self, standing: wire.CreditRevoked) -> list[SessionEvent]:
        if standing.serial == self._outgoing.serial:
            self._outgoing.awaits_revocation = False
        return []

    def _catch_up(self, fault: wire.Fault) -> list[SessionEvent]:
        """Give the server what it says it lacks."""
        if not self._known:
            return [fault_of(fault)]
        self._out_of_sync += 1
        if self._out_of_sync > _MOST_OUT_OF_SYNC:
            raise BrokenFrameError(f"the server does not take what it says it lacks: {fault.text}")
        self._server_length = min(fault.committed_length, len(self.committed))
        return self._replay()

    # -- answers -------------------------------------------------------------------------------

    def _resume_answer(self) -> list[SessionEvent]:
        """Continue a running answer with a server that has all of what it is the answer to."""
        if self.policy is Policy.KEEP and Origin.OFFLINE in self._origins:
            return self._replay()
        if not self.held:
            self.propose()
        return []

    def _replay(self) -> list[SessionEvent]:
        """Have a running answer continued by a server that has ``_server_length`` of the committed tokens."""
        if self.policy is Policy.KEEP and Origin.OFFLINE in self._origins:
            self._keep_tentative()
        if not self._supplied:
            # At least one token is replayed, so that the server has a prompt to answer.
            self._server_length = min(self._server_length, len(self.committed) - 1)
        self._outgoing.begin_epoch()
        return self.resume()

    def _send_prompt(self) -> None:
        """Give the server every token it lacks: lost committed ones and the supplied ones."""
        base_len = min(self._server_length, len(self.committed))
        self._outgoing.prompt(
            base_len,
            self.committed[base_len:] + self._supplied,
            rows_from=self.rows,
            sampling=self._sampling,
            max_length=self._max_length,
            while_away=self._while_away,
            answer_from=self.answer_start,
        )
