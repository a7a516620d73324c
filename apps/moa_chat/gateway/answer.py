"""A chat's events as an answer that can only grow: what was sent cannot be taken back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from moa_chat.gateway.errors import verifier_away
from moa_chat.gateway.request import ChatRequest
from moa_chat.gateway.stops import StopFilter
from moa_runtime.answer import (
    AnswerFinished,
    AnswerUpdate,
    FinishReason,
    Origin,
    Paused,
    PauseReason,
    Statistics,
    TokenOrigin,
)
from moa_runtime.chat import Chat

#: What the device wrote alone. With the policy KEEP it stays.
_OWN = (Origin.OFFLINE, Origin.KEPT)


@dataclass(frozen=True)
class Ending:
    """How an answer ended.

    Attributes:
        reason: ``finish_reason``, "stop" or "length".
        completion_tokens: of the answer, those that the target has not seen included.
        offline: whether the verifier was away at the end.
        own_tokens: how many tokens the device wrote without the target.
    """

    reason: str
    statistics: Statistics
    prompt_tokens: int
    completion_tokens: int
    offline: bool
    own_tokens: int

    def usage(self) -> dict[str, Any]:
        """OpenAI's figures, and the chat's own as the extension ``moa``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "moa": {**self.statistics.as_dict(), "offline": self.offline, "offline_tokens": self.own_tokens},
        }


async def answer(chat: Chat, request: ChatRequest) -> AsyncGenerator[str | Ending, None]:
    """Ask; yields the text piece by piece, and at last how it ended.

    While the verifier is there, only text that it has confirmed. While it is away, what the device writes too; the
    chat's policy must be KEEP, so that this text stays when the verifier is back. An answer ends without the verifier
    where the device cannot write on.

    Raises:
        ApiError: the verifier is away and the device has nothing to draft from.
        ChatError: the conversation does not fit, or the verifier refused it.
    """
    stops = StopFilter(request.stops)
    taken = 0  # characters given to the filter
    tokens: Sequence[TokenOrigin] = ()
    latest: AnswerUpdate | AnswerFinished | None = None
    sending = chat.send(request.question, max_new_tokens=request.max_new_tokens, sampling=request.sampling)
    async with aclosing(sending) as events:
        async for event in events:
            if isinstance(event, AnswerUpdate | AnswerFinished):
                latest = event
            elif not isinstance(event, Paused):
                continue
            elif latest is None:
                raise verifier_away("the verifier is away, and the device has nothing to draft from yet")
            reason, offline = _reason(event), isinstance(event, Paused)
            text, tokens = _whole(latest) if reason else _certain(latest)
            if piece := stops.feed(text[taken:]):
                yield piece
            taken = max(taken, len(text))
            if stops.stopped:
                reason = "stop"
            if reason:
                if piece := stops.finish():
                    yield piece
                own = sum(token.origin in _OWN or not token.committed for token in tokens)
                yield Ending(reason, latest.statistics, chat.prompt_tokens, len(tokens), offline, own)
                return


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
