"""The device's link to the server as the session sees it, and whose turn it is to speak."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from moa_runtime.session.client_table import AWAITING, CALLS, Call, State
from moa_runtime.session.events import Policy
from moa_runtime.session.handshake import Fingerprints
from moa_runtime.session.outgoing import Outgoing
from moa_runtime.session.state import ConversationState, LocalProtocolError


class LinkState(enum.Enum):
    DOWN = "down"
    HANDSHAKE = "handshake"  # Hello sent, no Welcome yet
    UP = "up"


class Link(ConversationState):
    """A conversation with frames that are to be sent, and what is awaited.

    Attributes:
        link: its state.
        wants_rows: whether the next connection asks for memory rows.
    """

    def __init__(
        self, fingerprints: Fingerprints, stop_tokens: Sequence[int], policy: Policy, row_encoding: int
    ) -> None:
        super().__init__(stop_tokens, policy)
        self.fingerprints = fingerprints
        self.link = LinkState.DOWN
        self.wants_rows = True
        self._row_encoding = row_encoding
        self._rows_until = 0  # rows up to here are under way
        self._outgoing = Outgoing()

    @property
    def state(self) -> State:
        """Where the session is, which follows from what it holds."""
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
        return State.NEEDS_PROMPT if self._owes_prompt else State.DRAFTING

    @property
    def may_propose(self) -> bool:
        """Whether :meth:`propose` would send something."""
        return self._may(Call.PROPOSE)

    @property
    def awaiting_verdict(self) -> bool:
        """Whether the server is to speak next: to answer a frame, within the credit, or once it is withdrawn."""
        return self.state in AWAITING

    @property
    def credit_open(self) -> bool:
        """Whether the server goes on by itself, or will once it has the prompt."""
        return self.link is LinkState.UP and self.answering and self._outgoing.credit > self._known

    @property
    def credit(self) -> int:
        """The position up to which it may; 0 for none."""
        return self._outgoing.credit

    @property
    def server_may_push(self) -> bool:
        """Whether it goes on by itself, or has not heard yet that it may no longer."""
        return self.credit_open or self._outgoing.awaits_revocation

    @property
    def may_grant_credit(self) -> bool:
        """Whether :meth:`grant_credit` is allowed."""
        return self._may(Call.GRANT_CREDIT)

    @property
    def rows_coming(self) -> int:
        """Memory rows that are on their way, with nothing that the server waits for between."""
        return max(0, self._rows_until - self.rows) if self.link is LinkState.UP else 0

    @property
    def stamp(self) -> int:
        """Of the newest frame that has one."""
        return self._outgoing.stamp

    def note_round_trip(self, seconds: float) -> None:
        """What a frame and its answer take on the link: the server hears it with the next credit."""
        self._outgoing.round_trip_us = max(1, min(int(1e6 * seconds), (1 << 32) - 1))

    @property
    def awaiting_prefill(self) -> bool:
        """Whether the verdict awaited is a Prompt's, which takes the target longer."""
        flight = self._outgoing.in_flight
        return flight is not None and flight.supplied > 0

    def frames_to_send(self) -> list[bytes]:
        """Take the frames that are to be sent, in order."""
        return self._outgoing.take()

    def grant_credit(self, position: int) -> None:
        """Let the server go on by itself until ``position`` tokens are committed; its verdicts come unasked.

        Raises:
            LocalProtocolError: not :attr:`may_grant_credit`, or that much is committed.
        """
        if not self.may_grant_credit or position <= self._known:
            raise self._refusal(Call.GRANT_CREDIT, position=position)
        self._outgoing.grant_credit(position)

    def revoke_credit(self) -> None:
        """Withdraw the credit; once the server stands, :meth:`propose` is allowed. Nothing where there is none."""
        if self._may(Call.REVOKE_CREDIT) and self.credit_open:
            self._outgoing.revoke_credit()

    def resend(self) -> bool:
        """Send what is in flight once more; both ends drop the copy that proves needless."""
        return self._may(Call.RESEND) and self._outgoing.resend()

    # -- the table -----------------------------------------------------------------------------

    def _may(self, call: Call) -> bool:
        return self.state in CALLS[call].next_states

    def _refusal(self, call: Call, **said: int) -> LocalProtocolError:
        text = CALLS[call].refusal.format(link=self.link.value, known=self._known, **said)
        return LocalProtocolError(text)

    def _check(self, call: Call) -> None:
        """Raises LocalProtocolError: the state does not allow it."""
        if not self._may(call):
            raise self._refusal(call)

    @property
    def _known(self) -> int:
        """Tokens of the conversation that are no longer tentative: committed and supplied."""
        return len(self.committed) + len(self._supplied)

    @property
    def _owes_prompt(self) -> bool:
        """Whether the server lacks tokens that only a Prompt gives it."""
        return bool(self._supplied) or self._server_length < len(self.committed)
