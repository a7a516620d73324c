"""``POST /v1/decode``: the server's own plain decoding, to compare a session's text and speed with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moa_runtime.session.sampling import Sampling
from moa_server.auth import Authenticator, Bearer
from moa_server.edge.frame_reader import CloseReason
from moa_server.edge.rate_limits import Budgets, Kind
from moa_server.engine.base import Engine
from moa_server.engine.baseline import PlainDecoding, Token
from moa_server.metrics import Metrics
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, GivenUpError
from moa_server.scheduling.worker import Worker
from moa_server.settings import Settings

T = TypeVar("T")

_log = logging.getLogger(__name__)

_FIELDS = {"tokens", "max_new_tokens", "temperature", "top_p", "seed", "stream"}


class RequestError(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class LeftError(Exception):
    """The client left before its answer was complete."""


@dataclass(frozen=True)
class _Wanted:
    """A request's body."""

    tokens: list[int]
    sampling: Sampling
    max_new_tokens: int | None
    stream: bool


class _Events(StreamingResponse):
    """Server-sent events that hold what their request has, a place among the running ones, until the last of them."""

    def __init__(self, events: AsyncIterator[str], held: contextlib.AbstractContextManager[Any]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, contextlib.suppress(LeftError, OSError):  # the client is gone
            await _while_there(receive, self.stream_response(send))


class PlainDecodingEndpoint:
    """Answers ``{"tokens": [...], "max_new_tokens", "temperature", "top_p", "seed", "stream"}``, all but the tokens
    optional, with ``{"tokens": [...], "forwards": n, "finish": "stop"}``: the new tokens, the steps they took, and why
    they end there: a stop token, the "length" asked for, or the end of the "context".

    With ``"stream": true`` the answer is a stream of server-sent events: ``{"token": n}`` for each as it is
    chosen, and at the end ``{"done": true, "forwards": n, "finish": "stop"}``; or ``{"error": "..."}``, should the
    verifier fail meanwhile. What is refused is refused before the first event.

    A request is the same kind of work as a session's frames, and is dropped as soon as its client leaves.

    Attributes:
        running: requests that are being answered.
    """

    def __init__(
        self, engine: Engine, worker: Worker, authenticator: Authenticator, settings: Settings, metrics: Metrics
    ) -> None:
        self._engine, self._worker, self._authenticator = engine, worker, authenticator
        self._settings, self._metrics = settings, metrics
        self.running = 0

    async def answer(self, request: Request, bearer: Bearer) -> Response:
        try:
            budgets, withdrawn = self._authenticator.budgets(bearer), asyncio.Event()
            with contextlib.ExitStack() as held:
                held.callback(self._authenticator.watch(bearer, withdrawn.set))
                wanted = await _unless_withdrawn(withdrawn, self._wanted(request, budgets))
                held.enter_context(self._place(budgets))
                plain = PlainDecoding(self._engine, wanted.tokens, wanted.sampling, wanted.max_new_tokens)
                tokens = self._tokens(plain, withdrawn, budgets)
                if wanted.stream:
                    return _Events(_events(plain, tokens), held.pop_all())
                return JSONResponse(await _while_there(request.receive, _whole(plain, tokens)))
        except RequestError as error:
            self._metrics.refused(f"http_{error.status}")
            _log.info("refused: %s", error, extra={"data": {"reason": f"http_{error.status}"}})
            retry = {"Retry-After": str(-(-self._settings.retry_after_ms // 1000))} if error.status == 503 else None
            return JSONResponse({"error": str(error)}, error.status, headers=retry)
        except (LeftError, ClientDisconnect):
            return JSONResponse({"error": "the client left"}, 400)

    @contextlib.contextmanager
    def _place(self, budgets: Budgets) -> Iterator[None]:
        """One of the requests that may run at once, of all and of one token. Raises RequestError: none is left."""
        if self.running >= self._settings.max_sessions:
            raise RequestError(f"this verifier already decodes {self.running} requests; try again later", 503)
        if not budgets.open_session():
            raise RequestError(f"this token may have {budgets.budget.sessions} sessions at once; end one", 503)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            budgets.close_session()

    async def _tokens(
        self, plain: PlainDecoding, withdrawn: asyncio.Event, budgets: Budgets
    ) -> AsyncGenerator[Token, None]:
        """Decode until the end; each token is a job of its own, so that others have their turns in between."""
        try:
            owed_s = budgets.wait_s(Kind.PREFILL_TOKENS, plain.length)
            while (job := plain.next()) is not None:
                running = self._worker.run(job, self._settings.answer_seconds, owed_s)
                await _unless_withdrawn(withdrawn, running)
                owed_s = 0.0
                self._metrics.decided(drafted=0, accepted=0, committed=1)
                yield plain.take(job)
        except ExpiredError:
            seconds = self._settings.answer_seconds
            raise RequestError(f"the verifier is too busy: no token within {seconds:g} seconds", 503) from None
        except GivenUpError:
            raise RequestError("this verifier is shutting down; try again later", 503) from None
        except EngineFailedError:
            raise RequestError("the verifier failed on this request; sending it again may help", 500) from None
        finally:
            self._worker.release(plain.sequence)

    async def _wanted(self, request: Request, budgets: Budgets) -> _Wanted:
        body = await self._body(request)
        await asyncio.sleep(budgets.wait_s(Kind.FRAMES, 1))
        return self._parse(body)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        # So much takes a list of as many ids as the context holds, and not much more.
        most = min(self._settings.max_frame_bytes, 16 * self._engine.max_context + 4096)
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise RequestError(f"the body has more than {most} bytes", 413)
        return bytes(body)

    def _parse(self, body: bytes) -> _Wanted:
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError("the body is no JSON") from error
        if not isinstance(raw, dict) or raw.keys() - _FIELDS:
            optional = ", ".join(sorted(_FIELDS - {"tokens"}))
            raise RequestError(f"expected a JSON object with tokens, a list of token ids, and, if wanted, {optional}")
        tokens, vocabulary, context = raw.get("tokens"), self._engine.vocab_size, self._engine.max_context
        if isinstance(tokens, list) and len(tokens) >= context:  # before a loop over what may be a million
            raise RequestError(f"{len(tokens)} tokens were given, the target's context holds {context}")
        if not isinstance(tokens, list) or not tokens or not all(_is_integer(t, 0, vocabulary - 1) for t in tokens):
            raise RequestError(f"tokens must be a list of at least one token id below {vocabulary}")
        most = raw.get("max_new_tokens")
        if most is not None and not _is_integer(most, 1, context):
            raise RequestError(f"max_new_tokens must lie in 1..{context}")
        temperature, top_p, seed = raw.get("temperature", 0.0), raw.get("top_p", 1.0), raw.get("seed", 0)
        if not _is_number(temperature) or temperature < 0 or not _is_number(top_p) or not 0 < top_p <= 1:
            raise RequestError("temperature must be a number from 0 on, top_p one above 0 and at most 1")
        if not _is_integer(seed, 0, (1 << 64) - 1):
            raise RequestError("seed must be an integer from 0 on, of at most 64 bits")
        stream = raw.get("stream", False)
        if not isinstance(stream, bool):
            raise RequestError("stream must be true or false")
        return _Wanted(tokens, Sampling(float(temperature), float(top_p), seed), most, stream)


async def _whole(plain: PlainDecoding, tokens: AsyncGenerator[Token, None]) -> dict[str, Any]:
    written: list[int] = []
    steps = 0
    async with contextlib.aclosing(tokens):
        async for token in tokens:
            written.append(token.token)
            steps += token.steps
    return {"tokens": written, "forwards": steps, "finish": plain.finish}


async def _events(plain: PlainDecoding, tokens: AsyncGenerator[Token, None]) -> AsyncIterator[str]:
    steps = 0
    async with contextlib.aclosing(tokens):
        try:
            async for token in tokens:
                steps += token.steps
                yield _event({"token": token.token})
            yield _event({"done": True, "forwards": steps, "finish": plain.finish})
        except RequestError as error:
            yield _event({"error": str(error)})


async def _while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the client leaves.

    Raises:
        LeftError: the client left.
    """

    async def until_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return await _unless(until_left(), work, LeftError())


async def _unless_withdrawn(withdrawn: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the token is withdrawn.

    Raises:
        RequestError: the token was withdrawn.
    """
    return await _unless(withdrawn.wait(), work, RequestError(CloseReason.WITHDRAWN.value, 401))


async def _unless(ending: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], error: Exception) -> T:
    """The work's result; if ``ending`` is done first, cancel the work and raise ``error``."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ending)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
