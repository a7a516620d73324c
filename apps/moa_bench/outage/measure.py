"""An outage in the middle of an answer, as a chat lives through it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moa_bench.link import LinkProfile
from moa_bench.link.background import BackgroundLink, background_link
from moa_bench.network.ask import through, watched
from moa_bench.prompts import Prompt
from moa_bench.verifier import Verifier
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.events import AnswerFinished, AnswerUpdate, LinkStatus, TokenOrigin
from moa_runtime.session.events import Sampling
from moa_runtime.timeline import Timeline
from moa_runtime.tokens import common_length
from moa_runtime.transport import Timing

#: Beside the outage.
_LONGEST_ANSWER_S = 300.0


@dataclass(frozen=True)
class OutageSettings:
    """
    Attributes:
        after: confirmed tokens of the answer before the link is cut.
        outage_s: how long it stays cut.
        max_new_tokens: of the answer.
    """

    after: int = 40
    outage_s: float = 20.0
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Outage:
    """What one answer was like. Times in seconds.

    Attributes:
        confirmed, tentative: tokens on screen when the link returned: the target's, and the device's behind them.
        kept: of the latter those that the target would have written.
        hello_s: from the link's return to the Hello; None where the outage was so short that the connection lived on.
        token_s: from the Hello, or else the link's return, to the next confirmed token.
        whole_s: from there to the whole answer.
        tokens: of the whole answer.
        identical: whether it is what the target writes alone.
    """

    confirmed: int
    tentative: int
    kept: int
    hello_s: float | None
    token_s: float
    whole_s: float
    tokens: int
    identical: bool


@dataclass
class Results:
    """What was measured so far.

    Attributes:
        outages: of the answers.
        skipped: questions whose answer ends before the cut.
        seconds: wall time, loading not included.
    """

    outages: list[Outage] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0


def measure(
    bundle: Bundle,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    profile: LinkProfile,
    settings: OutageSettings,
    results: Results,
    on_answer: Callable[[], object] = lambda: None,
    timing: Timing | None = None,
) -> None:
    """Ask every question, and take its link away; what was counted stays, whatever is raised.

    Args:
        timing: of the client's connections.

    Raises:
        VerifierGoneError: the verifier died.
        MoaError: it refused, or an answer took too long.
    """
    began = time.monotonic()
    try:
        for prompt in prompts:
            own = verifier.decode(prompt.tokens, settings.max_new_tokens)
            outage, timeline = None, Timeline("device")
            if len(own) > settings.after:
                with background_link(profile, *verifier.host_and_port) as link:
                    chat = Chat.connect(bundle, through(link, verifier.endpoint), timeline=timeline, timing=timing)
                    talk = _outage(chat, link, prompt.text, own, settings, timeline)
                    outage = asyncio.run(watched(talk, verifier, settings.outage_s + _LONGEST_ANSWER_S))
            if outage is None:
                results.skipped.append(prompt.text)
            else:
                results.outages.append(outage)
            on_answer()
    finally:
        results.seconds = time.monotonic() - began


async def _outage(
    connecting: Awaitable[Chat],
    link: BackgroundLink,
    text: str,
    own: Sequence[int],
    settings: OutageSettings,
    timeline: Timeline,
) -> Outage | None:
    """One answer, ``own`` if the target wrote it alone; None where it was whole before the link was back."""
    onlooker = _Onlooker(link, settings)
    chat = await connecting
    try:
        async for event in chat.send(text, max_new_tokens=settings.max_new_tokens, sampling=Sampling()):
            if isinstance(event, AnswerUpdate | AnswerFinished):
                onlooker.see(event.tokens)
    finally:
        onlooker.close()
        await chat.close()
    return onlooker.outage(own, timeline.events)


class _Onlooker:
    """Sees an answer grow, cuts the link when it has so many confirmed tokens, and gives it back."""

    def __init__(self, link: BackgroundLink, settings: OutageSettings) -> None:
        self._link, self._settings = link, settings
        self._tokens: Sequence[TokenOrigin] = ()
        self._then: Sequence[TokenOrigin] = ()  # when the link returned
        self._returned_at = self._token_at = self._last_at = 0.0  # as time.time; 0 for not yet
        self._cutting: asyncio.Task[None] | None = None

    def see(self, tokens: Sequence[TokenOrigin]) -> None:
        """The tokens on screen, by now."""
        self._tokens, self._last_at = tokens, time.time()
        if self._cutting is None and _confirmed(tokens) >= self._settings.after:
            self._cutting = asyncio.create_task(self._cut())
        if self._returned_at and not self._token_at and _confirmed(tokens) > _confirmed(self._then):
            self._token_at = self._last_at

    def close(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()

    def outage(self, own: Sequence[int], events: Sequence[dict[str, Any]]) -> Outage | None:
        """What it was like; None where the link did not return before the end.

        Args:
            own: what the target writes alone.
            events: of the client's timeline.
        """
        if not self._token_at:
            return None
        later = [event for event in events if event.get("ts", 0) >= 1e6 * self._returned_at]
        hello_s, begin_at = None, self._returned_at
        if any(event["name"] == LinkStatus.ONLINE.value for event in later):  # its first frame was its Hello
            begin_at = next(event["ts"] / 1e6 for event in later if event["name"] == "send")
            hello_s = begin_at - self._returned_at
        confirmed = _confirmed(self._then)
        offline = [token.token for token in self._then[confirmed:]]
        kept = common_length(offline, own[confirmed:])
        tokens = [token.token for token in self._tokens]
        times = (hello_s, self._token_at - begin_at, self._last_at - begin_at)
        return Outage(confirmed, len(offline), kept, *times, len(tokens), tokens == list(own))

    async def _cut(self) -> None:
        self._link.cut()
        await asyncio.sleep(self._settings.outage_s)
        self._then, self._returned_at = self._tokens, time.time()
        self._link.restore()


def _confirmed(tokens: Sequence[TokenOrigin]) -> int:
    return sum(token.committed for token in tokens)
