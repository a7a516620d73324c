"""Turn a chat's events into an answer that only grows: text that was sent cannot be taken back."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate

from moa_chat.gateway.errors import ApiError, verifier_away
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.replies import Ending, Part, ScoredToken
from moa_chat.gateway.requests import AnswerRequest
from moa_runtime.chat import Chat
from moa_runtime.errors import MoaError
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
    TokenLogprobs,
    TokenOrigin,
)
from moa_runtime.options import Offline
from moa_runtime.reasoning import reasoning_end
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.tokens import open_length


class StopFilter:
    """Passes text through, except a stop text and what may still become one.

    The text ends at the stop text that is complete first, as if it came character by character; if several are complete
    with one character, at the longest of them. So the pieces in which the text comes make no difference.

    Example: with the stop text "END", ``feed`` of "the E", "N", "D of" returns "the ", "", "", and ``end`` is 7.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.end: int | None = None  # characters up to the end of the stop text, itself included
        self._stops = stops
        self._held, self._passed_on = "", 0

    def feed(self, text: str, least: float = 0) -> str:
        """Add text; returns what is certain now, perhaps none. A stop text within the first ``least`` characters of all
        is none."""
        if self.end is not None:
            return ""
        self._held += text
        found = []
        for stop in self._stops:
            first = max(0, min(len(self._held), least - self._passed_on) - len(stop) + 1)
            if (at := self._held.find(stop, int(first))) >= 0:
                found.append((at + len(stop), at))
        if not found:
            return self._release(len(self._held) - open_length(self._held, self._stops))
        end, at = min(found)
        self.end = self._passed_on + end
        return self._release(at)

    def finish(self) -> str:
        """Return the text that was held back, after the last piece; empty after a stop text."""
        return self._release(len(self._held)) if self.end is None else ""

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._passed_on += length
        return text


#: Seconds to wait for a verifier that went away in the middle of an answer.
_PATIENCE_S = 60.0
#: Pauses at which an answer waits for the verifier; at others it ends without.
_WAITING = (PauseReason.GRAMMAR, PauseReason.OFF, PauseReason.UNSURE)
#: Why the device did not write, by what it may write with.
_WHY_NOTHING: dict[Offline, str] = {
    "off": "and nothing is to be written without it",
    "drafter": "and the drafter writes no answer that the server did not begin",
    "writer": "and the bundle has no writer to answer in its place (--offline off or drafter fetches none)",
}
_HAS_WRITER = ' ("offline": "writer" has the device answer)'
#: What the device wrote alone. With the policy KEEP it stays.
_OWN = (Origin.OFFLINE, Origin.KEPT)


async def answer(chat: Chat, request: AnswerRequest, index: int = 0) -> AsyncGenerator[Part, None]:
    """Ask for one of the request's answers; yields the text piece by piece, before it tokens that are to have log
    probabilities, and at last how it ended.

    While the verifier is there, only confirmed text is yielded. While it is away, the device's text is yielded too, if
    the request allows it; the chat's policy must be KEEP, so that this text stays when the verifier is back. Such an
    answer ends without the verifier when the device cannot continue; any other answer waits for the verifier.

    Raises:
        ApiError: the verifier is away, and the device may not write or has nothing to write from; or it does not come
            back for a minute; or the chat was closed.
        ChatError: the conversation does not fit, or the verifier refused it.
    """
    stops = StopFilter(request.stops)
    taken = scored = 0  # characters given to the filter, and tokens with their log probabilities
    tokens: Sequence[TokenOrigin] = ()
    latest: AnswerUpdate | AnswerFinished | None = None
    chat.offline, chat.overflow = request.offline, request.overflow
    if not request.raw:
        chat.thinking, chat.tools, chat.shown_tokens = request.thinking, request.tools, request.shown_tokens
    sampling = request.sampling_of(index)
    least = sampling.min_tokens
    sending = chat.send(request.question, max_new_tokens=request.max_new_tokens, sampling=sampling)
    async with aclosing(_patiently(sending)) as events:
        async for event in events:
            if isinstance(event, AnswerUpdate | AnswerFinished):
                latest = event
            elif not isinstance(event, Paused):
                continue
            elif latest is None:
                advice = _HAS_WRITER if request.offline != "writer" and chat.manifest.writer is not None else ""
                raise verifier_away(f"the server is away, {_WHY_NOTHING[request.offline]}{advice}")
            elif event.reason in _WAITING:
                continue
            reason, offline = _reason(event), isinstance(event, Paused)
            # Of a grammar's answer nothing is kept that the target has not confirmed.
            some = _confirmed if request.sampling.grammar is not None else _certain
            text, tokens = _whole(latest) if reason else some(latest)
            free = sum(map(len, latest.pieces[:least])) if len(tokens) >= least else math.inf
            piece, taken = stops.feed(text[taken:], free), max(taken, len(text))
            if stops.end is not None:
                # A verdict may bring more: what is counted depends on the tokens alone, as the text does.
                reason = "stop"
                tokens = tokens[: bisect_left(list(accumulate(map(len, latest.pieces))), stops.end) + 1]
            if sampling.logprobs is not None and len(tokens) > scored:
                yield _scored(chat.tokenizer, tokens, latest.pieces, scored)
                scored = len(tokens)
            if piece:
                yield piece
            if reason:
                if piece := stops.finish():
                    yield piece
                own = sum(token.origin in _OWN or not token.committed for token in tokens)
                thought = _reasoning_tokens(chat, request, text, latest.pieces)
                counts = chat.prompt_tokens, len(tokens), min(thought, len(tokens))
                yield Ending(reason, latest.statistics, *counts, offline, own)
                return
    raise verifier_away("this answer's chat was closed before the answer's end")


async def _patiently(events: AsyncGenerator[ChatEvent, None]) -> AsyncGenerator[ChatEvent, None]:
    """Yield the events. Raises ApiError if the answer waits for the verifier, and it stays away."""
    ends: float | None = None
    loop = asyncio.get_running_loop()
    async with aclosing(events):
        while True:
            try:
                event = await asyncio.wait_for(anext(events), None if ends is None else max(0.0, ends - loop.time()))
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                text = f"the server went away in the middle of the answer and stayed away for {_PATIENCE_S:g} s"
                raise verifier_away(text) from None
            if isinstance(event, AnswerUpdate) or (
                isinstance(event, LinkChanged) and event.status is LinkStatus.ONLINE
            ):
                ends = None
            elif isinstance(event, Paused) and event.reason in _WAITING:
                ends = loop.time() + _PATIENCE_S
            yield event


def _reasoning_tokens(chat: Chat, request: AnswerRequest, text: str, pieces: Sequence[str]) -> int:
    """Return how many tokens of an answer are reasoning, its marks included."""
    if request.raw:
        return 0
    end = reasoning_end(text, begun=chat.tokenizer.begins_reasoning(request.thinking))
    return bisect_left(list(accumulate(map(len, pieces))), end) + 1 if end else 0


def _scored(
    tokenizer: ChatTokenizer, tokens: Sequence[TokenOrigin], pieces: Sequence[str], first: int
) -> list[ScoredToken]:
    """Return the tokens from index ``first`` on with their log probabilities, without one that ends the answer."""
    found, start = [], sum(map(len, pieces[:first]))
    for token, piece in zip(tokens[first:], pieces[first:], strict=False):
        if token.token not in tokenizer.stop_tokens:
            known = token.logprobs or TokenLogprobs(0)
            top = zip(map(tokenizer.token_bytes, known.top_tokens), known.top_logprobs, strict=True)
            logprob = None if token.logprobs is None else known.logprob
            found.append(ScoredToken(tokenizer.token_bytes(token.token), start, logprob, tuple(top)))
        start += len(piece)
    return found


def _reason(event: AnswerUpdate | AnswerFinished | Paused) -> str:
    """Return why the answer ends with this event; empty if it continues."""
    if isinstance(event, AnswerUpdate):
        return ""
    return "stop" if event.reason in (FinishReason.STOP, PauseReason.END) else "length"


def _whole(event: AnswerUpdate | AnswerFinished) -> tuple[str, Sequence[TokenOrigin]]:
    """Return text and tokens, unconfirmed ones included, as no verdict can contradict them any more."""
    return event.text if isinstance(event, AnswerFinished) else event.committed + event.tentative, event.tokens


def _certain(event: AnswerUpdate | AnswerFinished) -> tuple[str, Sequence[TokenOrigin]]:
    """Return text and tokens that will stay."""
    if isinstance(event, AnswerFinished) or any(token.origin in _OWN and not token.committed for token in event.tokens):
        return _whole(event)
    return _confirmed(event)


def _confirmed(event: AnswerUpdate | AnswerFinished) -> tuple[str, Sequence[TokenOrigin]]:
    """Return text and tokens that the target has confirmed."""
    if isinstance(event, AnswerFinished):
        return _whole(event)
    return event.committed, [token for token in event.tokens if token.committed]


class AnswerWriter:
    """Writes a request's answers in parallel, in a task of its own that begins at once; :meth:`stop` ends it early.

    The web framework cancels a response again at each step of its clean-up, which would leave the verifier with an
    answer that was never stopped. A task of our own is cancelled once.
    """

    def __init__(
        self, pool: ChatPool, request: AnswerRequest, compile_grammar: Callable[[AnswerRequest], Awaitable[None]]
    ) -> None:
        self._request, self._compile_grammar = request, compile_grammar
        self._pieces: asyncio.Queue[tuple[int, Part] | ApiError] = asyncio.Queue()
        self._task = asyncio.create_task(self._write(pool))

    async def pieces(self) -> AsyncGenerator[tuple[int, Part], None]:
        """Yield pieces with the index of their answer; see :func:`answer`, also for what is raised."""
        left = self._request.count
        while left:
            piece = await self._pieces.get()
            if isinstance(piece, ApiError):
                raise piece
            yield piece
            left -= isinstance(piece[1], Ending)

    def stop(self) -> None:
        """Stop the answers that have not ended."""
        self._task.cancel()

    async def _write(self, pool: ChatPool) -> None:
        request = self._request
        try:
            needs_verifier = request.offline != "writer"
            lending = pool.lend(
                request.history,
                request.question,
                count=request.count,
                needs_verifier=needs_verifier,
                prepare=partial(self._compile_grammar, request),
            )
            async with lending as chats:
                writing = [asyncio.create_task(self._write_one(chat, index)) for index, chat in enumerate(chats)]
                try:
                    await asyncio.gather(*writing)
                finally:
                    # A chat goes back to the others when its answer has stopped.
                    for task in writing:
                        task.cancel()
                    await asyncio.gather(*writing, return_exceptions=True)
        except MoaError as error:
            self._pieces.put_nowait(request.refusal(error))
        except BaseException as error:  # whatever it is, the reader would wait for ever
            failed = ApiError(500, f"the answer failed: {type(error).__name__}: {error}", code="internal_error")
            self._pieces.put_nowait(failed)
            if not isinstance(error, Exception):
                raise

    async def _write_one(self, chat: Chat, index: int) -> None:
        async for piece in answer(chat, self._request, index):
            self._pieces.put_nowait((index, piece))
