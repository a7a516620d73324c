"""Events of a chat for its application."""

from __future__ import annotations

import asyncio
import enum
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, fields, replace
from types import AsyncGeneratorType

from moa_runtime.errors import ChatError
from moa_runtime.session.events import FinishReason as FinishReason
from moa_runtime.session.events import Origin as Origin
from moa_runtime.session.events import TokenLogprobs as TokenLogprobs
from moa_runtime.tokens import common_length


class LinkStatus(enum.Enum):
    """The link as a user should see it."""

    ONLINE = "online"
    RECONNECTING = "reconnecting"  # a connection is being made
    OFFLINE = "offline"  # no connection


@dataclass(frozen=True)
class TokenOrigin:
    """One token of the answer, its origin, and whether the target has confirmed it.

    Attributes:
        logprobs: log-probabilities, if the question's sampling asks for them and the target has computed the token for
            this program; else None, as for tokens that were kept unconfirmed or are of an earlier program.
    """

    token: int
    origin: Origin
    committed: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class TextSpan:
    """A part of the answer's text of one origin. A character of several tokens belongs to the last of them."""

    text: str
    origin: Origin
    committed: bool


@dataclass
class Statistics:
    """Figures of one answer. Times in seconds, sizes in bytes.

    Attributes:
        rounds: verdicts received.
        drafted, accepted: tokens of the device's drafts that were sent, unsolicited ones too, and those of them that
            the target accepted.
        pushed: committed tokens of pushed verdicts, while the server streamed.
        server_drafted, server_accepted: tokens that the server drafted, and those of them that the target accepted.
        streamed: whether the last verdict was pushed.
        fetched: committed tokens that the verifier wrote while the device was away.
        offline: committed tokens that the device wrote while the verifier was away.
        kept: those of them that stayed by the user's policy, unconfirmed by the target.
        rolled_back: tentative tokens dropped.
        taken_back: tokens of verdicts that the user replaced with the device's own text.
        draft_seconds, wait_seconds: time spent drafting, and waiting for verdicts.
        verified: for each verified draft of the device or the server, the number of its tokens, and the number of those
            that the target accepted.
        dropped_turns: oldest turns that the target did not read, because its context has no room for them (see
            :data:`moa_runtime.options.Overflow`).
        round_trips: for each verdict, seconds since its frame was sent; for a pushed one, since the verdict before.
        first_token_seconds: from the question to the first committed token.
        dtype: type of the target's numbers, such as "int4"; several, as in "int4, float32", if a verifier of another
            type continued the answer; empty if it is unknown.
    """

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    pushed: int = 0
    server_drafted: int = 0
    server_accepted: int = 0
    streamed: bool = False
    fetched: int = 0
    offline: int = 0
    kept: int = 0
    rolled_back: int = 0
    taken_back: int = 0
    reconnects: int = 0
    dropped_turns: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None
    draft_seconds: float = 0.0
    wait_seconds: float = 0.0
    round_trips: list[float] = field(default_factory=list)
    verified: list[tuple[int, int]] = field(default_factory=list)
    dtype: str = ""

    @property
    def wasted(self) -> int:
        """Drafted tokens that were sent in vain: wrong, too late, or not verified."""
        return self.drafted - self.accepted

    @property
    def tau(self) -> float:
        """Tokens committed by verdicts per round, bonus included."""
        return (self.tokens - self.kept - self.fetched + self.taken_back) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def snapshot(self) -> Statistics:
        """Return a copy that later rounds do not change."""
        return replace(self, round_trips=list(self.round_trips), verified=list(self.verified))

    def as_dict(self) -> dict[str, float | int | str | None]:
        """Return plain figures for JSON."""
        trips = sorted(self.round_trips)
        plain = [each.name for each in fields(self) if each.name not in ("streamed", "round_trips", "verified")]
        figures = {name: getattr(self, name) for name in plain} | {
            "wasted": self.wasted,
            "tau": self.tau,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "round_trip_ms": round(1000 * trips[len(trips) // 2], 1) if trips else None,
        }
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}


@dataclass(frozen=True)
class WholeAnswer:
    """An answer as it was at an update.

    Attributes:
        tokens: all of them, the tentative ones last.
        spans: the text cut wherever the origin or the confirmation changes.
        pieces: the text cut by tokens, one piece each, perhaps an empty one; they depend on the tokens alone.
    """

    tokens: tuple[TokenOrigin, ...] = ()
    spans: tuple[TextSpan, ...] = ()
    pieces: tuple[str, ...] = ()
    statistics: Statistics = field(default_factory=Statistics)

    def text(self, *, committed: bool) -> str:
        """Return the text that the target has confirmed, or the text that it has not."""
        return "".join(span.text for span in self.spans if span.committed is committed)


@dataclass(frozen=True)
class AnswerUpdate:
    """What is new in the answer. ``committed``, ``spans``, ``tokens``, ``pieces`` and ``statistics`` are those of the
    whole answer at this update.

    Attributes:
        text: text that the target has confirmed since the previous update. The texts of all updates make the answer.
        tentative: text after it that may still change. An incomplete character is in neither.
        start: index of the first character of ``text`` in the answer. It is less than the length of the text so far
            only if the user has replaced confirmed text (:meth:`moa_runtime.chat.Chat.keep_mine`).
        dropped: tentative text of the previous update that was rolled back; mostly empty.
        whole: see :class:`WholeAnswer`.
    """

    text: str
    tentative: str
    start: int = 0
    dropped: str = ""
    whole: WholeAnswer = field(default_factory=WholeAnswer, repr=False)

    @classmethod
    def of(cls, whole: WholeAnswer, dropped: str = "") -> AnswerUpdate:
        """Return the first update of an answer: all of its text is new."""
        return cls(whole.text(committed=True), whole.text(committed=False), 0, dropped, whole)

    def since(self, committed: str) -> AnswerUpdate:
        """Return this update of the whole text as the one after the confirmed text ``committed``."""
        grown = self.text.startswith(committed)  # nearly always; no loop over all of a long answer
        same = len(committed) if grown else common_length(committed, self.text)
        return replace(self, text=self.text[same:], start=same)

    @property
    def committed(self) -> str:
        """All text that the target has confirmed."""
        return self.whole.text(committed=True)

    @property
    def tokens(self) -> tuple[TokenOrigin, ...]:
        return self.whole.tokens

    @property
    def spans(self) -> tuple[TextSpan, ...]:
        return self.whole.spans

    @property
    def pieces(self) -> tuple[str, ...]:
        return self.whole.pieces

    @property
    def statistics(self) -> Statistics:
        return self.whole.statistics


@dataclass(frozen=True)
class LinkChanged:
    """The link changed.

    Attributes:
        detail: what has happened, a clause for the user.
        retry_in_s: seconds from the change to the next attempt to connect, if one is planned.
        late: whether the link is up, but a verdict is late, so that the device writes on.
    """

    status: LinkStatus
    detail: str = ""
    retry_in_s: float | None = None
    late: bool = False


@dataclass(frozen=True)
class Disagreement:
    """The target's answer differs from the text that the device wrote offline, by some words at least (policy ``ASK``).

    The answer continues with the target's version; :meth:`moa_runtime.chat.Chat.keep_mine` restores the device's.

    Attributes:
        position: index of the first token of the answer that differs.
        offset: index of the first character of the first word that differs.
        dropped_text: the device's text from that word on.
        replacement_text: the target's text from there on, as far as it is known.
    """

    position: int
    offset: int
    dropped_text: str
    replacement_text: str


class PauseReason(enum.Enum):
    """Reason for a pause of the device."""

    END = "end"  # it has ended the turn
    LENGTH = "length"  # the answer has its greatest length
    LIMIT = "limit"  # the offline limit is reached, or the context is full
    UNSURE = "unsure"  # the drafter is too unsure to write alone
    UNPREPARED = "unprepared"  # no drafter, or the target has not sent it anything to draft from
    GRAMMAR = "grammar"  # the device cannot follow the answer's grammar, or knows no next word that it allows
    OFF = "off"  # the host chose that nothing is written offline
    LOW_POWER = "low power"  # the verifier is away, and the host asked to save power
    BACKGROUND = "background"  # the host said that the application is in the background


@dataclass(frozen=True)
class Paused:
    """The device pauses, mostly because the verifier is away; the answer continues when the reason is gone."""

    reason: PauseReason


@dataclass(frozen=True)
class AnswerFinished:
    """An answer's last event. ``text`` is the whole answer; ``spans`` and ``pieces`` as in :class:`WholeAnswer`."""

    text: str
    tokens: tuple[TokenOrigin, ...]
    reason: FinishReason
    statistics: Statistics
    spans: tuple[TextSpan, ...] = ()
    pieces: tuple[str, ...] = ()


ChatEvent = AnswerUpdate | LinkChanged | Disagreement | Paused | AnswerFinished


class Follower:
    """The application's iteration of an answer's events.

    Attributes:
        events: the asynchronous generator that is iterated.
        closed: set when it has ended.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` wakes the generator if it waits for an event."""
        self.events: weakref.ref[AsyncGenerator[ChatEvent, None]] | None = None
        self.closed = asyncio.Event()
        self._wake, self._left = wake, False

    @property
    def left(self) -> bool:
        """Whether the application has left, or dropped the generator."""
        return self._left or self.events is None or self.events() is None

    def leave(self) -> None:
        """Have the generator end when its next event is asked for, or at once if it waits for an event."""
        self._left = True
        self._wake()

    async def end(self) -> None:
        """Leave; done when the generator has ended."""
        self.leave()
        events = self.events() if self.events is not None else None
        if isinstance(events, AsyncGeneratorType) and not events.ag_running:
            await events.aclose()
        await self.closed.wait()  # otherwise it runs, or is dropped and the event loop closes it


class EventQueue:
    """A queue from the drafting loop to the application, its only reader.

    The reader may take back a part of the answer while events about it are still queued. So each event carries the
    *edition* of the answer that it is about, and the reader gets only those of the edition that it asked for last.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, ChatEvent | ChatError | None]] = deque()
        self._changed = asyncio.Event()
        self._edition = self._edition_asked = 0
        self._published: tuple[TokenOrigin, ...] = ()
        self._ended = False

    def clear(self) -> None:
        """Drop all events: another answer begins."""
        self._published = ()
        self._queue.clear()
        if self._ended:
            self.end()

    def ask_for_edition(self) -> int:
        """Take back a part of the answer, or all of it; return the edition without it."""
        self._edition_asked += 1
        return self._edition_asked

    def begin_edition(self, edition: int) -> None:
        """Note that the loop has taken this part back; later events belong to ``edition``."""
        self._edition, self._published = edition, ()

    def put(self, event: ChatEvent | ChatError | None) -> None:
        """Queue an event, or an error for :meth:`get` to raise."""
        self._queue.append((self._edition, event))
        self.wake()

    def publish(self, update: AnswerUpdate, *, even_without_tokens: bool = False) -> None:
        """Queue an update of the whole text, unless the last one had the same tokens: a draft may be empty."""
        if update.tokens != self._published or (even_without_tokens and not update.tokens):
            self._published = update.tokens
            self.put(update)

    def end(self) -> None:
        """Queue the end: the chat is closed."""
        self._ended = True
        self.put(None)

    def wake(self) -> None:
        """Wake the waiting reader."""
        self._changed.set()

    async def get(self, follower: Follower) -> ChatEvent | None:
        """Return the next event of the edition, None at the end or if the follower has left; raise a queued
        ChatError."""
        while not follower.left:
            if not self._queue:
                self._changed.clear()
                await self._changed.wait()
                continue
            edition, event = self._queue.popleft()
            if isinstance(event, ChatError):
                raise event
            if event is None or edition == self._edition_asked or isinstance(event, LinkChanged):
                return event
        return None
