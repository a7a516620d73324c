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
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from moa_chat.gateway.answers import Ending
from moa_chat.gateway.errors import ApiError, as_api_error
from moa_chat.gateway.guard import Guard
from moa_chat.gateway.log import RequestLog, note
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.reply import Reply, TextReply, event
from moa_chat.gateway.request import AnswerRequest, Defaults, parse_chat, parse_completion
from moa_chat.gateway.writing import Writing
from moa_chat.terminal.status import figures
from moa_runtime.errors import MoaError

#: What a body may have at least and at most, and for each token of the context: JSON is read in one piece, during which
#: all other requests wait.
_LEAST_BYTES, _MOST_BYTES, _BYTES_PER_TOKEN = 1 << 20, 4 << 20, 64
_CLIENT_LEFT = 499
_THERE_IS = "GET /v1/models, GET /v1/models/{name}, POST /v1/chat/completions and POST /v1/completions"

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, str | Ending], None]


@dataclass(frozen=True)
class Access:
    """See :class:`moa_chat.gateway.guard.Guard`."""

    token: str
    origins: Collection[str]
    hosts: Collection[str] | None


def create_app(
    pool: ChatPool, texts: ChatPool, defaults: Defaults, access: Access, say: Callable[[str], None]
) -> Starlette:
    """The app; it closes the pools when it ends.

    Args:
        texts: of chats without the target's template.
        say: shows a line for each request.
    """
    model = {"id": defaults.model, "object": "model", "created": int(time.time()), "owned_by": "moa-edge"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != defaults.model:
            text = f"there is no model {request.path_params['name']!r} here, only {defaults.model!r}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return JSONResponse(model)

    async def chat_completions(request: Request) -> Response:
        asked = parse_chat(await _body(request, defaults.max_context), defaults)
        return await _answered(request, asked, Writing(pool, asked), Reply(defaults.model, asked.count))

    async def completions(request: Request) -> Response:
        asked = parse_completion(await _body(request, defaults.max_context), defaults)
        return await _answered(request, asked, Writing(texts, asked), TextReply(defaults.model, asked.count))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warm(pool, say))
        yield
        warming.cancel()
        for each in (pool, texts):
            await each.close()

    middleware = [
        Middleware(RequestLog, say=say),
        Middleware(Guard, token=access.token, origins=access.origins, hosts=access.hosts),
    ]
    if access.origins:
        origins, methods = list(access.origins), ["GET", "POST"]
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"]))
    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={
            MoaError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnect: _client_left,
        },
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
            raise ApiError(413, f"the body is larger than {most >> 20} MiB")
    return bytes(data)


async def _answered(request: Request, asked: AnswerRequest, writing: Writing, reply: Reply) -> Response:
    pieces = _noted(request, writing.pieces())
    try:
        # The first piece decides between an answer and an error, which have different statuses.
        first = await _unless_gone(request, anext(pieces))
        pieces = _with(first, pieces)
        if asked.stream:
            return StreamingResponse(_stream(writing, reply, asked, pieces), media_type="text/event-stream")
        return await _unless_gone(request, _whole(reply, pieces))
    except BaseException:
        writing.stop()
        raise


async def _with(first: tuple[int, str | Ending], others: Pieces) -> Pieces:
    yield first
    async for piece in others:
        yield piece


async def _whole(reply: Reply, pieces: Pieces) -> Response:
    texts, endings = [""] * reply.choices, {}
    async for index, piece in pieces:
        if isinstance(piece, Ending):
            endings[index] = piece
        else:
            texts[index] += piece
    return JSONResponse(reply.whole(texts, [ending for _, ending in sorted(endings.items())]))


async def _stream(writing: Writing, reply: Reply, asked: AnswerRequest, pieces: Pieces) -> AsyncGenerator[str, None]:
    endings = []
    try:
        yield reply.first_chunks()
        async for index, piece in pieces:
            if isinstance(piece, Ending):
                endings.append(piece)
                yield reply.last_chunk(index, piece)
            else:
                yield reply.chunk(index, piece)
        yield reply.end(endings, include_usage=asked.include_usage)
    except MoaError as error:
        # The status is sent already; clients know an error object in the stream.
        yield event(as_api_error(error, asked.asked_in).body)
    finally:
        writing.stop()


async def _noted(request: Request, pieces: Pieces) -> Pieces:
    """The pieces; how the answers ended goes into the request's line of the log."""
    ends = []
    async with aclosing(pieces):
        async for index, piece in pieces:
            if isinstance(piece, Ending):
                end = f"{'offline, ' if piece.offline else ''}{piece.reason}, {piece.completion_tokens} tokens"
                ends.append(f"{end} | {figures(piece.statistics)}")
                note(request.scope, "; ".join(ends))
            yield index, piece


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientDisconnect: it has left.
    """
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
    note(request.scope, str(error))
    return as_api_error(error).response()


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code in (404, 405):
        text += f"; there is {_THERE_IS}"
    return ApiError(error.status_code, text, headers=error.headers).response()


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)
