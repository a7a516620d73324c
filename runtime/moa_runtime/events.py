"""What a chat tells its application while an answer is written."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field, replace

from moa_runtime.errors import ChatError
from moa_runtime.session.events import FinishReason, Origin

__all__ = [
    "AnswerFinished",
    "AnswerUpdate",
    "ChatEvent",
    "Disagreement",
    "FinishReason",
    "LinkChanged",
    "LinkStatus",
    "Origin",
    "PauseReason",
    "Paused",
    "Statistics",
    "TextSpan",
    "TokenOrigin",
]


class LinkStatus(enum.Enum):
    """The link as a user should see it."""

    ONLINE = "online"
    RECONNECTING = "reconnecting"  # a connection is being made
    OFFLINE = "offline"  # no connection


@dataclass(frozen=True)
class TokenOrigin:
    """One token of the answer, where it came from, and whether the target has confirmed it."""

    token: int
    origin: Origin
    committed: bool


@dataclass(frozen=True)
class TextSpan:
    """A stretch of the answer's text of one origin. A character of several tokens belongs to its last one."""

    text: str
    origin: Origin
    committed: bool


@dataclass
class Statistics:
    """Figures of one answer. Times in seconds, sizes in bytes.

    Attributes:
        rounds: verdicts received.
        drafted, accepted: tokens sent to be verified, and those of them the target accepted.
        pushed: committed tokens that the server wrote by itself, while it was the one to draft.
        server_drafted, server_accepted: tokens that it drafted for that, and those of them the target accepted.
        server_drafts: whether the last verdict came from a server that went on by itself.
        fetched: committed tokens that the verifier wrote on while the device was away: they came with a connection.
        offline: committed tokens that were written while the verifier was away.
        kept: those of them that stayed by the user's policy, without asking the target.
        rolled_back: tentative tokens dropped.
        taken_back: tokens of verdicts that the user replaced by what the device had written.
        draft_seconds, wait_seconds: time spent drafting, and waiting for verdicts.
        round_trips: seconds from sending to each verdict; to one that was pushed, from the verdict before.
        first_token_seconds: from the question to the first committed token.
    """

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    pushed: int = 0
    server_drafted: int = 0
    server_accepted: int = 0
    server_drafts: bool = False
    fetched: int = 0
    offline: int = 0
    kept: int = 0
    rolled_back: int = 0
    taken_back: int = 0
    reconnects: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None
    draft_seconds: float = 0.0
    wait_seconds: float = 0.0
    round_trips: list[float] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens committed by verdicts per round, bonus included."""
        return (self.tokens - self.kept - self.fetched + self.taken_back) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def snapshot(self) -> Statistics:
        """A copy that later rounds do not change."""
        return replace(self, round_trips=list(self.round_trips))

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain figures for JSON."""
        trips = sorted(self.round_trips)
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "tau": round(self.tau, 3),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "pushed": self.pushed,
            "server_drafted": self.server_drafted,
            "server_accepted": self.server_accepted,
            "fetched": self.fetched,
            "offline": self.offline,
            "kept": self.kept,
            "rolled_back": self.rolled_back,
            "taken_back": self.taken_back,
            "reconnects": self.reconnects,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "first_token_seconds": None if self.first_token_seconds is None else round(self.first_token_seconds, 3),
            "draft_seconds": round(self.draft_seconds, 3),
            "wait_seconds": round(self.wait_seconds, 3),
            "round_trip_ms": round(1000 * trips[len(trips) // 2], 1) if trips else None,
        }


@dataclass(frozen=True)
class AnswerUpdate:
    """The answer as it stands.

    Attributes:
        committed: text the target has confirmed.
        tentative: text after it that may still change. A character of which tokens are missing is in neither.
        tokens: all of its tokens, the tentative ones last.
        spans: the text cut wherever the origin or the confirmation changes; joined it is committed + tentative.
        dropped: tentative text that was there at the update before and was rolled back; mostly empty.
        pieces: the text cut by tokens, one piece each, perhaps an empty one; they depend on the tokens alone.
    """

    committed: str
    tentative: str
    tokens: tuple[TokenOrigin, ...]
    statistics: Statistics
    spans: tuple[TextSpan, ...] = ()
    dropped: str = ""
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinkChanged:
    """The link changed.

    Attributes:
        detail: a sentence for the user, perhaps empty.
        retry_in_s: seconds from the change to the next attempt to connect; None when none is planned.
    """

    status: LinkStatus
    detail: str = ""
    retry_in_s: float | None = None


@dataclass(frozen=True)
class Disagreement:
    """The target writes something else than the device wrote offline, some words at least (policy ``ASK``).

    The answer goes on with the target's version; :meth:`moa_runtime.chat.Chat.keep_mine` takes it back.

    Attributes:
        position: index of the first token of the answer that differs.
        offset: where in its text the word begins in which they differ, in characters.
        dropped_text: what the device had written from that word on.
        replacement_text: what of the target's version is known by now.
    """

    position: int
    offset: int
    dropped_text: str
    replacement_text: str


class PauseReason(enum.Enum):
    """Why the device does not write on."""

    END = "end"  # it has ended the turn
    LENGTH = "length"  # the answer has its greatest length
    LIMIT = "limit"  # so much may be written offline, or the context is full
    UNSURE = "unsure"  # what the drafter would write alone is worth no more
    UNPREPARED = "unprepared"  # no drafter, or the target has not sent it anything to draft from
    OFF = "off"  # nothing is written without the verifier, as the host chose
    LOW_POWER = "low power"  # the verifier is away, and the host asked to save power
    BACKGROUND = "background"  # nobody looks, as the host said; it goes on when somebody does


@dataclass(frozen=True)
class Paused:
    """The device does not write on, mostly since the verifier is away; the answer goes on when that has changed."""

    reason: PauseReason


@dataclass(frozen=True)
class AnswerFinished:
    """The last event of an answer. ``text`` is all of it; ``spans`` and ``pieces`` as in :class:`AnswerUpdate`."""

    text: str
    tokens: tuple[TokenOrigin, ...]
    reason: FinishReason
    statistics: Statistics
    spans: tuple[TextSpan, ...] = ()
    pieces: tuple[str, ...] = ()


ChatEvent = AnswerUpdate | LinkChanged | Disagreement | Paused | AnswerFinished


class EventQueue:
    """A queue with one reader.

    The reader may take back a part of the answer while events about it are still queued. So each event carries the
    *edition* of the answer that it is about, and the reader gets only those of the edition that it asked for last.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, ChatEvent | ChatError | None]] = asyncio.Queue()
        self._edition = self._edition_asked = 0
        self._published: tuple[TokenOrigin, ...] = ()
        self._ended = False

    def clear(self) -> None:
        """Drop all events: another answer begins."""
        self._queue, self._published = asyncio.Queue(), ()
        if self._ended:
            self.end()

    def ask_for_edition(self) -> int:
        """Take back a part of the answer, or all of it; return the edition without it."""
        self._edition_asked += 1
        return self._edition_asked

    def begin_edition(self, edition: int) -> None:
        """Note that the loop has taken it back; later events are of ``edition``."""
        self._edition, self._published = edition, ()

    def put(self, event: ChatEvent | ChatError) -> None:
        """Queue an event, or an error for :meth:`get` to raise."""
        self._queue.put_nowait((self._edition, event))

    def publish(self, update: AnswerUpdate, *, even_without_tokens: bool = False) -> None:
        """Queue an update, unless the last one had the same tokens: a draft may be empty."""
        if update.tokens != self._published or (even_without_tokens and not update.tokens):
            self._published = update.tokens
            self.put(update)

    def end(self) -> None:
        """Queue the end: the chat is closed."""
        self._ended = True
        self._queue.put_nowait((self._edition, None))

    async def get(self) -> ChatEvent | None:
        """Return the next event of the edition; None at the end.

        Raises:
            ChatError: one that was queued.
        """
        while True:
            edition, event = await self._queue.get()
            if isinstance(event, ChatError):
                raise event
            if event is None or edition == self._edition_asked or isinstance(event, LinkChanged):
                return event
