"""The endpoint as an ASGI app."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moa_chat.gateway.answers import AnswerWriter
from moa_chat.gateway.errors import ApiError, as_api_error
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.replies import Ending, Part, Reply, TextReply
from moa_chat.gateway.requests import AnswerRequest, Defaults, no_model, parse_chat, parse_completion, prompted
from moa_chat.gateway.responses import ResponseReply, parse_response
from moa_chat.gateway.tool_formats.tool_format import ToolFormat
from moa_chat.terminal.answer_state import figures
from moa_runtime.errors import MoaError
from moa_runtime.sockets import bearer_matches, host_allowed, origin_allowed

_NOTE = "moa_chat.note"  # key of what the request's line in the log says more
#: The limit of a body in bytes: its least and greatest value, and bytes for each token of the context. All other
#: requests wait while JSON is parsed.
_LEAST_BYTES, _MOST_BYTES, _BYTES_PER_TOKEN = 1 << 20, 4 << 20, 64
_CLIENT_LEFT = 499
_THERE_IS = "GET /v1/models, GET /v1/models/{name}, and POST /v1/chat/completions, /v1/completions and /v1/responses"

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, Part], None]


async def _nothing(request: AnswerRequest) -> None:
    """Compile no grammar."""


@dataclass(frozen=True)
class Access:
    """Rules by which requests are admitted."""

    token: str  # that requests must carry; empty for none
    origins: Collection[str] = ()  # of web pages that may send requests; ``*`` for all
    loopback: bool = True  # whether it listens on this machine only: requests for other hosts are then refused
    hosts: Collection[str] = ()  # further names that requests may have if ``loopback`` is set


class AccessMiddleware:
    """Refuses requests before they reach the app.

    A page whose server answers for its own name with this machine's address (DNS rebinding) gives itself away in
    ``Host``, also in requests that name no ``Origin``.
    """

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not host_allowed(host, self._access.loopback, self._access.hosts):
            text = f"the host {host[:100]!r} is none of this endpoint's names; --allow-host NAME would let it"
            return ApiError(403, text, code="host_not_allowed")
        origin = headers.get("origin")
        if not origin_allowed(origin, self._access.origins):
            text = f"web pages of {origin} may not use this endpoint; --allow-origin {origin} would let them"
            return ApiError(403, text, code="origin_not_allowed")
        # A browser asks without the token whether it may send a request with it.
        asks_first = scope["method"] == "OPTIONS" and origin is not None
        if asks_first or bearer_matches(headers.get("authorization", ""), self._access.token):
            return None
        challenge = {"WWW-Authenticate": "Bearer"}
        return ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key", headers=challenge)


class RequestLog:
    """Logs each request: method and path, status, duration, and what was noted."""

    def __init__(self, app: ASGIApp, *, say: Callable[[str], None]) -> None:
        self._app, self._say = app, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        began = time.monotonic()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            seconds = time.monotonic() - began
            line = f"{scope['method']} {scope['path']} {status or 'broken off'} in {seconds:.2f} s"
            # Paths come from outside: nothing in them may talk to the terminal.
            self._say(ascii(f"{line}: {scope[_NOTE]}" if _NOTE in scope else line)[1:-1])


def create_app(
    pool: ChatPool,
    texts: ChatPool,
    defaults: Defaults,
    access: Access,
    say: Callable[[str], None],
    begins_reasoning: Callable[[bool | None], bool] = lambda thinking: False,
    tool_format: Callable[[], ToolFormat] = prompted,
    compile_grammar: Callable[[AnswerRequest], Awaitable[None]] = _nothing,
) -> Starlette:
    """Return the app, which closes its pools at the end.

    Args:
        texts: has chats without template.
        say: logs.
        begins_reasoning: see :meth:`moa_runtime.tokenizer.ChatTokenizer.begins_reasoning`.
        tool_format: returns the format in which the target writes calls of tools.
        compile_grammar: see :meth:`moa_chat.gateway.grammar_queue.GrammarQueue.compile`.
    """
    model = {"id": defaults.model, "object": "model", "created": int(time.time()), "owned_by": "moa-edge"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != defaults.model:
            raise no_model(request.path_params["name"], defaults)
        return JSONResponse(model)

    async def body(request: Request, pool: ChatPool) -> bytes:
        data = await _body(request, defaults.max_context)
        pool.check_room()  # before any work on the request
        return data

    def writing(pool: ChatPool, asked: AnswerRequest) -> AnswerWriter:
        return AnswerWriter(pool, asked, compile_grammar)

    async def chat_completions(request: Request) -> Response:
        asked = parse_chat(await body(request, pool), defaults, tool_format)
        begun = begins_reasoning(asked.thinking)
        reply = Reply(defaults.model, asked.count, begun=begun, calls=asked.call_splitter if asked.calls else None)
        return await _answered(request, asked, writing(pool, asked), reply)

    async def responses(request: Request) -> Response:
        asked, about = parse_response(await body(request, pool), defaults, tool_format)
        calls = asked.call_splitter if asked.calls else None
        reply = ResponseReply(defaults.model, about, begun=begins_reasoning(asked.thinking), calls=calls)
        return await _answered(request, asked, writing(pool, asked), reply)

    async def completions(request: Request) -> Response:
        asked = parse_completion(await body(request, texts), defaults)
        return await _answered(request, asked, writing(texts, asked), TextReply(defaults.model, asked.count))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warm(pool, say))
        yield
        warming.cancel()
        for each in (pool, texts):
            await each.close()

    middleware = [Middleware(RequestLog, say=say), Middleware(AccessMiddleware, access=access)]
    if access.origins:
        origins, methods = list(access.origins), ["GET", "POST"]
        allowed = {"allow_origins": origins, "allow_methods": methods, "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **allowed, allow_private_network=True))
    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={MoaError: _refuse, HTTPException: _refuse_http, ClientDisconnect: _client_left},
        lifespan=lifespan,
    )


async def _warm(pool: ChatPool, say: Callable[[str], None]) -> None:
    try:
        await pool.warm()
    except MoaError as error:
        say(f"warning: {error}; requests that need it are refused meanwhile")


async def _body(request: Request, max_context: int) -> bytes:
    most = min(_MOST_BYTES, max(_LEAST_BYTES, _BYTES_PER_TOKEN * max_context))
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise ApiError(413, f"the body is larger than {most >> 20} MiB", code="body_too_large")
    return bytes(data)


async def _answered(request: Request, asked: AnswerRequest, writing: AnswerWriter, reply: Reply) -> Response:
    pieces = _noted(request, writing.pieces())
    try:
        # The first piece decides between an answer and an error, which have different statuses.
        first = await _unless_gone(request, anext(pieces))
        pieces = _with(first, pieces)
        if asked.stream:
            return AnswerStream(writing, _stream(reply, asked, pieces))
        return await _unless_gone(request, _whole(reply, pieces))
    except BaseException:
        writing.stop()
        raise


async def _with(first: tuple[int, Part], others: Pieces) -> Pieces:
    yield first
    async for piece in others:
        yield piece


async def _whole(reply: Reply, pieces: Pieces) -> Response:
    texts, endings = [""] * reply.choices, {}
    async for index, piece in pieces:
        if isinstance(piece, Ending):
            endings[index] = piece
        elif isinstance(piece, list):
            reply.score(index, piece)
        else:
            texts[index] += piece
    return JSONResponse(reply.whole(texts, [ending for _, ending in sorted(endings.items())]))


class AnswerStream(StreamingResponse):
    """A stream of events; the answer stops with it, also when the client leaves while it takes no more events. One that
    is broken off says so in the request's line of the log."""

    def __init__(self, writing: AnswerWriter, events: AsyncGenerator[str, None]) -> None:
        super().__init__(self._watched(events), media_type="text/event-stream")
        self._writing, self._latest, self._ended = writing, time.monotonic(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._writing.stop()
            if not self._ended:
                silent_s = time.monotonic() - self._latest
                broken = f"not finished: the stream was broken off {silent_s:.1f} s after its latest event"
                scope[_NOTE] = "; ".join([*([scope[_NOTE]] if _NOTE in scope else []), broken])

    async def _watched(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async for event in events:
            self._latest = time.monotonic()
            yield event
        self._ended = True


async def _stream(reply: Reply, asked: AnswerRequest, pieces: Pieces) -> AsyncGenerator[str, None]:
    endings = []
    try:
        yield reply.first_chunks()
        async for index, piece in pieces:
            if isinstance(piece, Ending):
                endings.append(piece)
                yield reply.last_chunk(index, piece)
            elif isinstance(piece, list):
                reply.score(index, piece)
            else:
                yield reply.chunk(index, piece)
        yield reply.end(endings, include_usage=asked.include_usage)
    except MoaError as error:
        yield reply.failure(asked.refusal(error))


async def _noted(request: Request, pieces: Pieces) -> Pieces:
    """The pieces; how the answers ended, or why they did not, goes into the request's line of the log."""
    ends: list[str] = []
    try:
        async with aclosing(pieces):
            async for index, piece in pieces:
                if isinstance(piece, Ending):
                    end = f"{'offline, ' if piece.offline else ''}{piece.reason}, {piece.completion_tokens} tokens"
                    ends.append(f"{end} | {figures(piece.statistics)}")
                    request.scope[_NOTE] = "; ".join(ends)
                yield index, piece
    except MoaError as error:
        request.scope[_NOTE] = "; ".join([*ends, str(error)])
        raise


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves. Raises ClientDisconnect if it has left."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_leaving(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _leaving(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, MoaError)
    request.scope[_NOTE] = str(error)
    return as_api_error(error).response()


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code in (404, 405):
        text += f"; there is {_THERE_IS}"
    return ApiError(error.status_code, text, code="no_such_route", headers=error.headers).response()


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)
