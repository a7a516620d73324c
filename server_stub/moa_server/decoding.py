"""``POST /v1/decode``: the server's own plain decoding, to compare a session's text and speed with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moa_runtime.session.server import Sampling
from moa_server.engine import Engine
from moa_server.plain import Step, decode
from moa_server.scheduler import Scheduler
from moa_server.settings import Settings

_FIELDS = {"tokens", "max_new_tokens", "temperature", "top_p", "seed", "stream"}


class RequestError(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class _Wanted:
    """A request's body."""

    tokens: list[int]
    sampling: Sampling
    max_new_tokens: int | None
    stream: bool


class _Events(StreamingResponse):
    """Server-sent events that occupy a place among the running requests until the last of them."""

    def __init__(self, events: AsyncIterator[str], place: contextlib.AbstractContextManager[Any]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            # Not the whole of the base: that cancels when the client leaves, also in the middle of a step.
            await self.stream_response(send)


class PlainDecoding:
    """Answers ``{"tokens": [...], "max_new_tokens", "temperature", "top_p", "seed", "stream"}``, all but the tokens
    optional, with ``{"tokens": [...], "forwards": n}``: the new tokens, and the forwards they took.

    With ``"stream": true`` the answer is a stream of server-sent events: ``{"token": n}`` for each as it is
    chosen, and at the end ``{"done": true, "forwards": n}``. What is refused is refused before the first event.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, settings: Settings) -> None:
        self._engine, self._scheduler, self._settings = engine, scheduler, settings
        self._running = 0

    async def answer(self, request: Request) -> Response:
        try:
            with contextlib.ExitStack() as place:
                place.enter_context(self._place())
                wanted = self._parse(await self._body(request))
                steps = self._steps(request, wanted)
                if wanted.stream:
                    return _Events(_events(steps), place.pop_all())
                return JSONResponse(await _whole(steps))
        except RequestError as error:
            return JSONResponse({"error": str(error)}, error.status)
        except ClientDisconnect:
            return JSONResponse({"error": "the client left"}, 400)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """One of the requests that may run at once. Raises RequestError when all are taken."""
        if self._running >= self._settings.max_sessions:
            raise RequestError(f"this verifier already decodes {self._running} requests; try again later", 503)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _steps(self, request: Request, wanted: _Wanted) -> AsyncIterator[Step]:
        """Decode until the end, or until the client has left."""
        steps = decode(self._engine, wanted.tokens, wanted.sampling, wanted.max_new_tokens)
        # Step by step, so that sessions have their turns in between.
        while not await request.is_disconnected():
            step = await self._scheduler.run(lambda: next(steps, None))
            if step is None:
                return
            yield step

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._settings.max_frame_bytes:
                raise RequestError(f"the body has more than {self._settings.max_frame_bytes} bytes", 413)
        return bytes(body)

    def _parse(self, body: bytes) -> _Wanted:
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError("the body is no JSON") from error
        if not isinstance(raw, dict) or raw.keys() - _FIELDS:
            raise RequestError(f"expected a JSON object with the fields {', '.join(sorted(_FIELDS))}")
        tokens, vocabulary, context = raw.get("tokens"), self._engine.vocab_size, self._engine.max_context
        if not isinstance(tokens, list) or not tokens or not all(_is_integer(t, 0, vocabulary - 1) for t in tokens):
            raise RequestError(f"tokens must be a list of at least one token id below {vocabulary}")
        if len(tokens) >= context:
            raise RequestError(f"{len(tokens)} tokens were given, the target's context holds {context}")
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


async def _whole(steps: AsyncIterator[Step]) -> dict[str, Any]:
    written: list[int] = []
    forwards = 0
    async for step in steps:
        written.append(step.token)
        forwards += step.forwards
    return {"tokens": written, "forwards": forwards}


async def _events(steps: AsyncIterator[Step]) -> AsyncIterator[str]:
    forwards = 0
    async for step in steps:
        forwards += step.forwards
        yield _event({"token": step.token})
    yield _event({"done": True, "forwards": forwards})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
