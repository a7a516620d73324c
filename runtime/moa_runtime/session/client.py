"""The device's end of a conversation."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from moa_runtime.sequences import common_length
from moa_runtime.session.events import (
    Committed,
    Decided,
    Event,
    Faulted,
    Finished,
    FinishReason,
    Origin,
    Policy,
    Resumed,
    RolledBack,
    RowsReceived,
    Sampling,
    Welcomed,
)
from moa_runtime.session.handshake import PROTOCOL_VERSION, Fingerprints, Limits
from moa_runtime.session.rows import RowsError, decode_rows
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire


class LocalProtocolError(Exception):
    """The application called something that the session's state does not allow."""


class LinkState(enum.Enum):
    DOWN = "down"
    GREETING = "greeting"  # Hello sent, no Welcome yet
    UP = "up"


@dataclass(frozen=True)
class _InFlight:
    """The one frame awaiting a verdict, and where that verdict must begin."""

    frame: bytes
    verdict_at: int
    drafted: int
    supplied: int


_FINISH = {
    wire.FINISH_STOP: FinishReason.STOP,
    wire.FINISH_LENGTH: FinishReason.LENGTH,
    wire.FINISH_CONTEXT: FinishReason.CONTEXT,
}


class ClientSession:
    """Committed prefix, supplied tokens of a prompt under way, tentative suffix; and the link's state.

    The application adds tentative tokens with :meth:`extend` whenever its drafter has some, calls
    :meth:`propose` when it wants them verified, hands in what arrives (:meth:`receive`) and sends what
    :meth:`frames_to_send` holds. Going offline changes nothing but that nothing is sent: the suffix grows.

    ==========================  =====================  ====================================================
    call                        allowed                effect
    ==========================  =====================  ====================================================
    ``connect``                 link DOWN              Hello; link GREETING
    ``disconnected``            always                 link DOWN; what was in flight is sent again later
    ``prompt``                  no answer runs         supplied = tokens; Prompt when the link is UP
    ``extend``                  an answer runs         tentative grows
    ``declare_offline``         always                 tentative tokens drafted until now count as offline text
    ``propose``                 always                 Draft, if the link is UP and nothing is in flight
    ``cancel``                  always                 supplied and tentative dropped; Cancel
    ``rewind``                  no answer runs         committed cut back; the next Prompt says so
    ``keep``                    an answer was begun    its end replaced by supplied tokens; Prompt as above
    ==========================  =====================  ====================================================
    """

    def __init__(
        self,
        fingerprints: Fingerprints,
        *,
        stop_tokens: Sequence[int],
        policy: Policy = Policy.ROLLBACK,
        row_encoding: int = wire.ROW_ENCODING_INT8,
    ) -> None:
        self.fingerprints = fingerprints
        self.policy = policy
        self.link = LinkState.DOWN
        self.limits = Limits()
        self.committed: list[int] = []
        self.answering = False
        self.rows = 0
        self._stop_tokens = frozenset(stop_tokens)
        self._row_encoding = row_encoding
        self._resume_token = ""
        self._epoch = 0
        self._supplied: list[int] = []
        self._kept = 0  # how many of the supplied, at their end, are offline tokens kept by policy
        self._tentative: list[int] = []
        self._origins: list[Origin] = []
        self._server_length = 0  # how much of the committed prefix the server has
        self._answer_start: int | None = None  # committed length at which the last answer began
        self._sampling = Sampling()
        self._max_length = 0
        self._in_flight: _InFlight | None = None
        self._outbox: list[bytes] = []

    # -- what is known -------------------------------------------------------------------------

    @property
    def tentative(self) -> tuple[int, ...]:
        """Tokens the target has not seen or not answered yet."""
        return tuple(self._tentative)

    @property
    def tokens(self) -> list[int]:
        """The whole conversation as the device sees it: what a drafter continues."""
        return [*self.committed, *self._supplied, *self._tentative]

    @property
    def length(self) -> int:
        """How many tokens that is."""
        return len(self.committed) + len(self._supplied) + len(self._tentative)

    @property
    def unconfirmed(self) -> tuple[tuple[int, Origin], ...]:
        """Answer tokens behind the committed prefix with their origins: kept ones, then tentative ones."""
        kept = self._supplied[len(self._supplied) - self._kept :]
        return (*((token, Origin.KEPT) for token in kept), *zip(self._tentative, self._origins, strict=True))

    @property
    def may_propose(self) -> bool:
        """Whether :meth:`propose` would send something."""
        return self.link is LinkState.UP and self.answering and not self._in_flight and not self._supplied

    @property
    def awaiting_verdict(self) -> bool:
        return self._in_flight is not None

    @property
    def awaiting_prefill(self) -> bool:
        """Whether the verdict awaited is a Prompt's, which takes the target longer."""
        return self._in_flight is not None and self._in_flight.supplied > 0

    @property
    def in_flight_drafted(self) -> int:
        """Drafted tokens in the frame that awaits its verdict."""
        return self._in_flight.drafted if self._in_flight else 0

    @property
    def tentative_finish(self) -> FinishReason | None:
        """Why the device stopped writing: an end-of-turn token, or as much as was asked for; None to go on."""
        if self._tentative and self._tentative[-1] in self._stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.room == 0 else None

    @property
    def room(self) -> int | None:
        """Tokens that the answer may still have behind the tentative ones; None without a limit."""
        if not self._max_length:
            return None
        return max(0, self._max_length - self.length)

    @property
    def tentatively_finished(self) -> bool:
        """Whether the device has nothing more to write."""
        return self.tentative_finish is not None

    def frames_to_send(self) -> list[bytes]:
        """Take the frames that are to be sent, in order."""
        frames, self._outbox = self._outbox, []
        return frames

    # -- calls ---------------------------------------------------------------------------------

    def connect(self) -> None:
        """A new connection is open: greet the server.

        Raises:
            LocalProtocolError: the link is not down.
        """
        if self.link is not LinkState.DOWN:
            raise LocalProtocolError(f"can't connect while the link is {self.link.value}")
        self.link = LinkState.GREETING
        self._epoch += 1
        hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            fingerprints=wire.Fingerprints(
                target=self.fingerprints.target,
                tokenizer=self.fingerprints.tokenizer,
                drafter=self.fingerprints.drafter,
            ),
            resume_token=self._resume_token,
            row_encoding=wire.RowEncoding.Name(self._row_encoding),
        )
        self._send(wire.ClientMessage(hello=hello))

    def disconnected(self) -> None:
        """The connection is gone. Committed and tentative tokens stay."""
        self.link = LinkState.DOWN
        self._in_flight = None
        self._outbox.clear()

    def prompt(self, tokens: Sequence[int], sampling: Sampling, max_new_tokens: int = 0) -> None:
        """Add the client's own tokens (the user's turn) and ask for an answer; works offline too.

        Args:
            max_new_tokens: the answer's length limit, 0 for none.

        Raises:
            LocalProtocolError: an answer still runs, or there are no tokens.
        """
        if self.answering:
            raise LocalProtocolError("can't take a prompt while an answer runs; cancel it first")
        if not tokens:
            raise LocalProtocolError("a prompt needs at least one token")
        self._epoch += 1
        self._supplied = list(tokens)
        self._kept = 0
        self._sampling = sampling
        end = len(self.committed) + len(tokens)
        self._max_length = end + max_new_tokens if max_new_tokens else 0
        self._answer_start = end
        self.answering = True
        if self.link is LinkState.UP:
            self._send_prompt()

    def extend(self, tokens: Sequence[int], origin: Origin) -> None:
        """Append what the drafter wrote; ``origin`` is DRAFTED or OFFLINE.

        Raises:
            LocalProtocolError: no answer runs.
        """
        if not self.answering:
            raise LocalProtocolError("can't extend: no answer runs")
        self._tentative += tokens
        self._origins += [origin] * len(tokens)

    def declare_offline(self, after: int) -> bool:
        """All tentative tokens behind the first ``after`` were written during an outage; says whether there are any."""
        found = len(self._tentative) > after
        self._origins[after:] = [Origin.OFFLINE] * len(self._origins[after:])
        return found

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
        if not self.limits.trees:
            tree = None
        tokens = self._tentative if tree is None else tree.tokens
        draft = wire.Draft(
            epoch=self._epoch,
            base_len=len(self.committed),
            tokens=tokens[:allowed],
            parents=() if tree is None else tree.parents[:allowed],
            rows_from=self.rows,
        )
        self._launch(wire.ClientMessage(draft=draft), len(self.committed), drafted=len(draft.tokens))
        return True

    def resend(self) -> bool:
        """Send what is in flight once more; both ends drop the copy that proves needless."""
        if self.link is not LinkState.UP or self._in_flight is None:
            return False
        self._outbox.append(self._in_flight.frame)
        return True

    def cancel(self) -> list[Event]:
        """End the answer where the target has confirmed it; a prompt the server has not answered is
        taken back."""
        events = self._drop_tentative()
        self._supplied = []
        self._in_flight = None
        self.answering = False
        self._epoch += 1
        if self.link is LinkState.UP:
            self._send(wire.ClientMessage(cancel=wire.Cancel(epoch=self._epoch, base_len=len(self.committed))))
            self._server_length = min(self._server_length, len(self.committed))
        return events

    def rewind(self, length: int) -> None:
        """Forget committed tokens from position ``length`` on: the next prompt continues from there.

        Nothing is sent: a Prompt names the position that it continues from.

        Raises:
            LocalProtocolError: an answer runs, or fewer tokens are committed.
        """
        if self.answering:
            raise LocalProtocolError("can't rewind while an answer runs; cancel it first")
        if not 0 <= length <= len(self.committed):
            raise LocalProtocolError(f"can't rewind to {length}: {len(self.committed)} tokens are committed")
        self._answer_start = None
        self._cut(length)

    def keep(self, start: int, tokens: Sequence[int]) -> list[Event]:
        """Take the last answer, running or ended, back to position ``start`` and have the target go on behind
        ``tokens``, which become kept ones. End-of-turn tokens among them are left out: where the turn ends is
        the target's. So are those for which its context has no room.

        Raises:
            LocalProtocolError: ``start`` lies outside the answer, or there are no tokens to keep.
        """
        kept = self._keepable(tokens, start)
        if self._answer_start is None or not self._answer_start <= start <= len(self.committed):
            raise LocalProtocolError(f"can't keep tokens from {start} on: no answer of the target has that position")
        if not kept:
            raise LocalProtocolError("can't keep an empty text")
        events = self._drop_tentative()
        self._cut(start)
        self._supplied, self._kept = kept, len(kept)
        self._in_flight = None
        self._epoch += 1
        self.answering = True
        if self.link is LinkState.UP:
            self._send_prompt()
        return events

    # -- frames from the server ----------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """Take one frame; never raises on its content."""
        try:
            message = wire.ServerMessage.FromString(data)
        except DecodeError:
            return [Faulted("PROTOCOL", "the server sent a frame that is no ServerMessage", 0)]
        event = message.WhichOneof("event")
        if event == "welcome":
            return self._welcomed(message.welcome)
        if event == "verdict":
            return self._verdict(message.verdict)
        if event == "fault":
            return self._faulted(message.fault)
        return [Faulted("PROTOCOL", "the server sent an event this version does not know", 0)]

    def _welcomed(self, welcome: wire.Welcome) -> list[Event]:
        if self.link is not LinkState.GREETING:
            return []
        if welcome.protocol_version != PROTOCOL_VERSION:
            text = f"the verifier speaks protocol version {welcome.protocol_version}, this client {PROTOCOL_VERSION}"
            return [Faulted("VERSION_MISMATCH", text, 0)]
        self.link = LinkState.UP
        limits = welcome.limits
        self.limits = Limits(
            limits.max_context,
            limits.max_draft_tokens,
            limits.max_frame_bytes,
            limits.idle_seconds,
            trees=not limits.chains_only,
        )
        resumed = bool(self._resume_token) and welcome.resume_token == self._resume_token
        self._resume_token = welcome.resume_token
        self._server_length = min(welcome.committed_length, len(self.committed))
        return [Welcomed(resumed), *self._resume_answer()]

    def _resume_answer(self) -> list[Event]:
        """Continue a running answer with a server that has ``_server_length`` of the committed tokens."""
        if not self.answering:
            return []
        if self.policy is Policy.KEEP and Origin.OFFLINE in self._origins:
            self._keep_tentative()
        missing = len(self.committed) - self._server_length
        if self._supplied or missing:
            self._send_prompt()
            return [Resumed(missing)] if missing else []
        self.propose()
        return []

    def _keep_tentative(self) -> None:
        """Turn the tentative suffix into supplied tokens."""
        kept = self._keepable(self._tentative, len(self.committed) + len(self._supplied))
        self._supplied += kept
        self._kept += len(kept)
        self._tentative, self._origins = [], []

    def _verdict(self, verdict: wire.Verdict) -> list[Event]:
        flight = self._in_flight
        if flight is None or verdict.epoch != self._epoch or verdict.base_len != flight.verdict_at:
            return []
        if not verdict.tokens or verdict.accepted > len(verdict.tokens):
            return [Faulted("PROTOCOL", "the server sent a verdict without tokens", 0)]
        events: list[Event] = []
        if verdict.HasField("rows") and verdict.rows.count:
            try:
                keys, values = decode_rows(verdict.rows)
            except RowsError as error:
                return [Faulted("PROTOCOL", f"the server sent broken memory rows: {error}", 0)]
            if verdict.rows.start > self.rows:
                return [Faulted("PROTOCOL", "the server left out memory rows", 0)]
            self.rows = verdict.rows.start + verdict.rows.count
            events.append(RowsReceived(verdict.rows.start, keys, values))
        self._in_flight = None
        events.append(Decided(flight.supplied, flight.drafted, verdict.accepted, verdict.compute_us / 1e6))
        events += self._commit_supplied()
        events += self._commit(list(verdict.tokens), verdict.accepted)
        self._server_length = len(self.committed)
        if self._supplied:  # by the policy, in place of the target's choice
            self._epoch += 1
            self._send_prompt()
        elif verdict.finish in _FINISH:
            events += self._drop_tentative()
            self.answering = False
            events.append(Finished(_FINISH[verdict.finish]))
        return events

    def _commit_supplied(self) -> list[Event]:
        kept = self._supplied[len(self._supplied) - self._kept :]
        self.committed += self._supplied
        self._supplied, self._kept = [], 0
        if not kept:
            return []
        return [Committed(len(self.committed) - len(kept), tuple(kept), (Origin.KEPT,) * len(kept))]

    def _commit(self, tokens: list[int], accepted: int) -> list[Event]:
        """Extend the prefix by a verdict's tokens; the suffix stays as far as it agrees.

        Args:
            accepted: how many of the tokens were in the draft: of a tree perhaps on another path than the suffix.
        """
        start = len(self.committed)
        agreed = common_length(tokens, self._tentative)
        rest, rest_origins = self._tentative[agreed:], self._origins[agreed:]
        disagrees = bool(rest) and agreed < len(tokens)
        offline = self.policy is Policy.KEEP and Origin.OFFLINE in rest_origins
        # Such a verdict was so late that the device has written on meanwhile.
        keeps = disagrees and offline and bool(self._keepable(rest, start + agreed))
        if keeps:
            tokens = tokens[:agreed]
        origins = [
            *self._origins[:agreed],
            *(Origin.DRAFTED if at < accepted else Origin.CORRECTED for at in range(agreed, len(tokens))),
        ]
        self.committed += tokens
        self._tentative, self._origins = rest, rest_origins
        committed = Committed(start, tuple(tokens), tuple(origins))
        if keeps:
            self._keep_tentative()
        elif disagrees:
            self._tentative, self._origins = [], []
            return [RolledBack(start + agreed, tuple(rest), tuple(rest_origins)), committed]
        return [committed]

    def _faulted(self, fault: wire.Fault) -> list[Event]:
        code = (
            wire.FaultCode.Name(fault.code).removeprefix("FAULT_CODE_")
            if fault.code in wire.FaultCode.values()
            else "UNKNOWN"
        )
        if fault.code == wire.FAULT_CODE_OUT_OF_SYNC and self._in_flight and self.committed:
            # At least one token is replayed, so that the server has a prompt to answer.
            self._in_flight = None
            self._server_length = min(fault.committed_length, len(self.committed) - 1)
            self._epoch += 1
            return self._resume_answer()
        return [Faulted(code, fault.text, fault.retry_after_ms)]

    # -- helpers -------------------------------------------------------------------------------

    def _drop_tentative(self) -> list[Event]:
        dropped, origins = tuple(self._tentative), tuple(self._origins)
        self._tentative, self._origins = [], []
        if not dropped:
            return []
        return [RolledBack(len(self.committed) + len(self._supplied), dropped, origins)]

    def _cut(self, length: int) -> None:
        del self.committed[length:]
        self.rows = min(self.rows, length)
        self._server_length = min(self._server_length, length)

    def _keepable(self, tokens: Sequence[int], start: int) -> list[int]:
        """Those that can be supplied at position ``start``: the server must have room to answer."""
        return self._without_stops(tokens)[: max(0, self.limits.max_context - 1 - start)]

    def _without_stops(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self._stop_tokens]

    def _send_prompt(self) -> None:
        """Give the server every token it lacks: lost committed ones and the supplied ones."""
        base_len = min(self._server_length, len(self.committed))
        tokens = self.committed[base_len:] + self._supplied
        prompt = wire.Prompt(
            epoch=self._epoch,
            base_len=base_len,
            tokens=tokens,
            rows_from=self.rows,
            sampling=wire.Sampling(
                temperature=self._sampling.temperature, top_p=self._sampling.top_p, seed=self._sampling.seed
            ),
            max_length=self._max_length,
        )
        self._launch(wire.ClientMessage(prompt=prompt), base_len + len(tokens), supplied=len(tokens))

    def _launch(self, message: wire.ClientMessage, verdict_at: int, *, drafted: int = 0, supplied: int = 0) -> None:
        self._in_flight = _InFlight(message.SerializeToString(), verdict_at, drafted, supplied)
        self._outbox.append(self._in_flight.frame)

    def _send(self, message: wire.ClientMessage) -> None:
        self._outbox.append(message.SerializeToString())
