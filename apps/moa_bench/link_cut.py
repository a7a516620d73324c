"""An answer whose link is cut in the middle: its state at the link's return, and the time until it is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moa_bench.link import LinkProfile
from moa_bench.link.background import BackgroundLink, background_link
from moa_bench.result import ratio
from moa_bench.serving import AnswerSettings, Turn, through, watched
from moa_bench.verifier import Verifier
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafting.draft_controllers import controller_for
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.events import AnswerFinished, AnswerUpdate, LinkStatus, TokenOrigin
from moa_runtime.options import Drafting
from moa_runtime.timeline import Timeline
from moa_runtime.tokens import common_length
from moa_runtime.transport import Timing


@dataclass(frozen=True)
class CutSettings:
    """When the link is cut.

    Attributes:
        after: confirmed tokens of the answer before the cut.
        seconds: duration of the cut.
    """

    after: int
    seconds: float


@dataclass(frozen=True)
class CutAnswer:
    """One answer. Times in seconds.

    Attributes:
        confirmed, tentative: tokens on screen when the link returned: the target's, and the device's after them.
        kept: of the tentative ones, leading tokens that the target would have written.
        hello_s: from the link's return to the client's Hello; None if the connection survived the cut.
        token_s: from the Hello, or else the link's return, to the next confirmed token.
        whole_s: from there to the complete answer.
        tokens: of the complete answer.
        identical: whether it is the answer that the target writes alone.
    """

    confirmed: int
    tentative: int
    kept: int
    hello_s: float | None
    token_s: float
    whole_s: float
    tokens: int
    identical: bool


def figures_of(answers: Sequence[CutAnswer]) -> dict[str, Any]:
    """Return means (None without answers) and every answer, for JSON."""

    def mean(name: str, *, times: int = 1) -> float | None:
        figures = [times * figure for figure in (getattr(answer, name) for answer in answers) if figure is not None]
        return ratio(sum(figures), len(figures), 1)

    counts = {name: mean(name) for name in ("confirmed", "tentative", "kept", "tokens")}
    spans = {f"{name}_ms": mean(f"{name}_s", times=1000) for name in ("hello", "token", "whole")}
    identical = all(answer.identical for answer in answers) if answers else None
    return {
        "answers": len(answers),
        **counts,
        **spans,
        "identical": identical,
        "every": [asdict(answer) for answer in answers],
    }


def ask_and_cut(
    bundle: Bundle,
    verifier: Verifier,
    profile: LinkProfile,
    drafting: Drafting,
    turn: Turn,
    cut: CutSettings,
    settings: AnswerSettings,
    timing: Timing | None = None,
) -> CutAnswer | None:
    """Ask with the runtime's chat through an emulated link that is cut in the middle of the answer.

    Nothing passes during the cut, and sockets hang, as in a tunnel. The device writes on with the bundle's offline
    writer, and the verifier finishes the answer meanwhile.

    Args:
        settings: of the answer, which may take ``answer_timeout_s`` besides the cut.
        timing: of the client's connections.

    Returns:
        None if the answer ended before the cut, or before the link was back.

    Raises:
        VerifierGoneError: the verifier died.
        MoaError: it refused, or the answer took too long.
    """
    if len(turn.reference) <= cut.after:
        return None
    timeline = Timeline("device")
    with background_link(profile, *verifier.host_and_port) as link:
        chat = Chat.connect(
            bundle,
            through(link, verifier.endpoint),
            threads=settings.threads,
            controller=controller_for(settings.draft_length),
            settings=LoopSettings(drafting=drafting),
            timeline=timeline,
            timing=timing,
        )
        observer = CutObserver(link, cut)
        following = _follow(chat, observer, turn.text, settings)
        asyncio.run(watched(following, verifier, cut.seconds + settings.answer_timeout_s))
    return observer.answer(turn.reference, timeline.events)


async def _follow(connecting: Awaitable[Chat], observer: CutObserver, text: str, settings: AnswerSettings) -> None:
    chat = await connecting
    try:
        async for event in chat.send(text, max_new_tokens=settings.max_new_tokens, sampling=settings.sampling):
            if isinstance(event, AnswerUpdate | AnswerFinished):
                observer.see(event.tokens)
    finally:
        observer.close()
        await chat.close()


class CutObserver:
    """Follows an answer, cuts its link after the set number of confirmed tokens, and restores it."""

    def __init__(self, link: BackgroundLink, settings: CutSettings) -> None:
        self._link, self._settings = link, settings
        self._tokens: Sequence[TokenOrigin] = ()
        self._at_return: Sequence[TokenOrigin] = ()
        self._returned_at = self._token_at = self._last_at = 0.0  # as time.time; 0 before it happens
        self._cutting: asyncio.Task[None] | None = None

    def see(self, tokens: Sequence[TokenOrigin]) -> None:
        """Take the tokens that are on screen now."""
        self._tokens, self._last_at = tokens, time.time()
        if self._cutting is None and _confirmed(tokens) >= self._settings.after:
            self._cutting = asyncio.create_task(self._cut())
        if self._returned_at and not self._token_at and _confirmed(tokens) > _confirmed(self._at_return):
            self._token_at = self._last_at

    def close(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()

    def answer(self, reference: Sequence[int], events: Sequence[dict[str, Any]]) -> CutAnswer | None:
        """Return the observed answer; None if the link did not return before its end.

        Args:
            reference: the answer that the target writes alone.
            events: of the client's timeline.
        """
        if not self._token_at:
            return None
        later = [event for event in events if event.get("ts", 0) >= 1e6 * self._returned_at]
        hello_s, begin_at = None, self._returned_at
        if any(event["name"] == LinkStatus.ONLINE.value for event in later):  # its first frame was its Hello
            begin_at = next(event["ts"] / 1e6 for event in later if event["name"] == "send")
            hello_s = begin_at - self._returned_at
        confirmed = _confirmed(self._at_return)
        offline = [token.token for token in self._at_return[confirmed:]]
        kept = common_length(offline, reference[confirmed:])
        tokens = [token.token for token in self._tokens]
        times = (hello_s, self._token_at - begin_at, self._last_at - begin_at)
        return CutAnswer(confirmed, len(offline), kept, *times, len(tokens), tokens == list(reference))

    async def _cut(self) -> None:
        self._link.cut()
        await asyncio.sleep(self._settings.seconds)
        self._at_return, self._returned_at = self._tokens, time.time()
        self._link.restore()


def _confirmed(tokens: Sequence[TokenOrigin]) -> int:
    return sum(token.committed for token in tokens)
