"""The conversation as the device has it, whatever the link does."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.session.events import Committed, FinishReason, Origin, Policy, RolledBack, SessionEvent
from moa_runtime.session.handshake import Limits
from moa_runtime.session.sampling import Sampling
from moa_runtime.tokens import common_length


class LocalProtocolError(Exception):
    """The application called something that the session's state does not allow."""


class ConversationState:
    """Committed prefix, supplied tokens of a prompt under way, tentative suffix; and how the answer may go on.

    Nothing in it knows of frames: :class:`~moa_runtime.session.client.ClientSession` sends and receives them, and is
    the class to use.

    Attributes:
        policy: what becomes of text written offline; may be set at any time.
        limits: the verifier's, as it said last.
        committed: tokens that the target has confirmed.
        answering: whether an answer runs.
        rows: memory rows that the device holds, of the first so many committed tokens.
    """

    def __init__(self, stop_tokens: Sequence[int], policy: Policy) -> None:
        self.policy = policy
        self.limits = Limits()
        self.committed: list[int] = []
        self.answering = False
        self.rows = 0
        self._stop_tokens = frozenset(stop_tokens)
        self._supplied: list[int] = []
        self._kept = 0  # how many of the supplied, at their end, are offline tokens kept by policy
        self._tentative: list[int] = []
        self._origins: list[Origin] = []
        self._answer_start: int | None = None  # committed length at which the last answer began
        self._sampling = Sampling()
        self._max_length = 0
        self._while_away = True
        self._server_length = 0  # how much of the committed prefix the server has

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
    def sampling(self) -> Sampling:
        """How the target chooses in the last answer."""
        return self._sampling

    @property
    def answer_start(self) -> int:
        """Position at which the last answer began; 0 where there is none."""
        return self._answer_start or 0

    @property
    def length(self) -> int:
        """How many tokens that is."""
        return len(self.committed) + len(self._supplied) + len(self._tentative)

    @property
    def supplied(self) -> int:
        """Tokens of a prompt under way."""
        return len(self._supplied)

    @property
    def unconfirmed(self) -> tuple[tuple[int, Origin], ...]:
        """Answer tokens behind the committed prefix with their origins: kept ones, then tentative ones."""
        kept = self._supplied[len(self._supplied) - self._kept :]
        return (*((token, Origin.KEPT) for token in kept), *zip(self._tentative, self._origins, strict=True))

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
    def max_new_tokens(self) -> int:
        """What the last answer may have; 0 for no limit."""
        return self._max_length - self.answer_start if self._max_length else 0

    @property
    def tentatively_finished(self) -> bool:
        """Whether the device has nothing more to write."""
        return self.tentative_finish is not None

    # -- a call that sends nothing ---------------------------------------------------------------

    def declare_offline(self, after: int) -> bool:
        """All tentative tokens behind the first ``after`` were written during an outage; says whether there are any."""
        found = len(self._tentative) > after
        self._origins[after:] = [Origin.OFFLINE] * len(self._origins[after:])
        return found

    # -- what a session does with the tokens -----------------------------------------------------

    def _commit_supplied(self) -> list[SessionEvent]:
        """The server took the supplied tokens."""
        kept = self._supplied[len(self._supplied) - self._kept :]
        self.committed += self._supplied
        self._supplied, self._kept = [], 0
        if not kept:
            return []
        return [Committed(len(self.committed) - len(kept), tuple(kept), (Origin.KEPT,) * len(kept))]

    def _commit(self, tokens: list[int], accepted: int) -> list[SessionEvent]:
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
        keeps = disagrees and offline and bool(self.keepable(rest, start + agreed))
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

    def _cut(self, length: int) -> None:
        del self.committed[length:]
        self.rows = min(self.rows, length)
        self._server_length = min(self._server_length, length)

    def keepable(self, tokens: Sequence[int], start: int) -> list[int]:
        """Those that can be supplied at position ``start``: context and answer have room for what the target says."""
        without_stops = [token for token in tokens if token not in self._stop_tokens]
        end = min(self.limits.max_context, self._max_length or self.limits.max_context)
        return without_stops[: max(0, end - 1 - start)]
