"""A chat's events as an answer that can only grow: what was sent cannot be taken back."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate

from moa_chat.gateway.errors import verifier_away
from moa_chat.gateway.request import AnswerRequest
from moa_chat.gateway.stops import StopFilter
from moa_runtime.chat import Chat
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    ChatEvent,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Paused,
    PauseReason,
    Statistics,
    TokenOrigin,
)
from moa_runtime.options import Offline

#: A verifier that went away in the middle of an answer is waited for so long, seconds.
_PATIENCE_S = 60.0
#: Pauses at which an answer waits for the verifier; at others it ends without.
_WAITING = (PauseReason.OFF, PauseReason.UNSURE)
#: Why the device did not write, by what it may write with.
_WHY_NOTHING: dict[Offline, str] = {
    "off": 'and nothing is to be written without it ("offline": "writer" has the device answer)',
    "drafter": "and the drafter writes no answer that the verifier did not begin",
    "writer": "and the bundle has no writer to answer in its place",
}
#: What the device wrote alone. With the policy KEEP it stays.
_OWN = (Origin.OFFLINE, Origin.KEPT)


@dataclass(frozen=True)
class Ending:
    """How an answer ended.

    Attributes:
        reason: ``finish_reason``, "stop" or "length".
        completion_tokens: of the answer, up to the one that completes a stop text, those that the target has not seen
            included.
        offline: whether the verifier was away at the end.
        own_tokens: how many of them the device wrote without the target.
    """

    reason: str
    statistics: Statistics
    prompt_tokens: int
    completion_tokens: int
    offline: bool
    own_tokens: int


async def answer(chat: Chat, request: AnswerRequest, index: int = 0) -> AsyncGenerator[str | Ending, None]:
    """Ask for one of the request's answers; yields the text piece by piece, and at last how it ended.

    While the verifier is there, only text that it has confirmed. While it is away, what the device writes too, where
    the request has it so; the chat's policy must be KEEP, so that this text stays when the verifier is back. Such an
    answer ends without the verifier where the device cannot write on; another waits for it.

    Raises:
        ApiError: the verifier is away, and the device may not write or has nothing to write from; or it does not come
            back for a minute.
        ChatError: the conversation does not fit, or the verifier refused it.
    """
    stops = StopFilter(request.stops)
    taken = 0  # characters given to the filter
    tokens: Sequence[TokenOrigin] = ()
    latest: AnswerUpdate | AnswerFinished | None = None
    chat.offline = request.offline
    sampling = request.sampling_of(index)
    sending = chat.send(request.question, max_new_tokens=request.max_new_tokens, sampling=sampling)
    async with aclosing(_patiently(sending)) as events:
        async for event in events:
            if isinstance(event, AnswerUpdate | AnswerFinished):
                latest = event
            elif not isinstance(event, Paused):
                continue
            elif latest is None:
                raise verifier_away(f"the verifier is away, {_WHY_NOTHING[request.offline]}")
            elif event.reason in _WAITING:
                continue
            reason, offline = _reason(event), isinstance(event, Paused)
            text, tokens = _whole(latest) if reason else _certain(latest)
            if piece := stops.feed(text[taken:]):
                yield piece
            taken = max(taken, len(text))
            if stops.end is not None:
                # A verdict may bring more: what is counted depends on the tokens alone, as the text does.
                reason = "stop"
                tokens = tokens[: bisect_left(list(accumulate(map(len, latest.pieces))), stops.end) + 1]
            if reason:
                if piece := stops.finish():
                    yield piece
                own = sum(token.origin in _OWN or not token.committed for token in tokens)
                yield Ending(reason, latest.statistics, chat.prompt_tokens, len(tokens), offline, own)
                return


async def _patiently(events: AsyncGenerator[ChatEvent, None]) -> AsyncGenerator[ChatEvent, None]:
    """The events, unless the verifier is waited for and stays away.

    Raises:
        ApiError: it does.
    """
    ends: float | None = None
    loop = asyncio.get_running_loop()
    async with aclosing(events):
        while True:
            try:
                event = await asyncio.wait_for(anext(events), None if ends is None else max(0.0, ends - loop.time()))
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                text = f"the verifier went away in the middle of the answer and stayed away for {_PATIENCE_S:g} s"
                raise verifier_away(text) from None
            if isinstance(event, AnswerUpdate) or (
                isinstance(event, LinkChanged) and event.status is LinkStatus.ONLINE
            ):
                ends = None
            elif isinstance(event, Paused) and event.reason in _WAITING:
                ends = loop.time() + _PATIENCE_S
            yield event


def _reason(event: AnswerUpdate | AnswerFinished | Paused) -> str:
    """Why the answer ends with this event; empty where it goes on."""
    if isinstance(event, AnswerUpdate):
        return ""
    return "stop" if event.reason in (FinishReason.STOP, PauseReason.END) else "length"


def _whole(event: AnswerUpdate | AnswerFinished) -> tuple[str, Sequence[TokenOrigin]]:
    """Text and tokens, those included that a verdict was awaited for: nothing can contradict them any more."""
    return event.text if isinstance(event, AnswerFinished) else event.committed + event.tentative, event.tokens


def _certain(event: AnswerUpdate | AnswerFinished) -> tuple[str, Sequence[TokenOrigin]]:
    """Text and tokens that will stay."""
    if isinstance(event, AnswerFinished) or any(token.origin in _OWN and not token.committed for token in event.tokens):
        return _whole(event)
    return event.committed, [token for token in event.tokens if token.committed]
