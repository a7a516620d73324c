"""The verifier as an ASGI app: sessions over WebSocket, plain decoding, health and a page over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from moa_runtime.bundle_download import BUNDLES_PATH
from moa_runtime.errors import json_problem
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.grammar.matcher import has_llguidance
from moa_runtime.session.events import Sampling
from moa_runtime.sockets import host_allowed, host_name, names_address, origin_allowed, own_origin
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.auth import SESSION_SUBPROTOCOL, Authenticator, Bearer, SubprotocolError, authorization_of
from moa_server.connection import CloseReason, Connection
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.edge.rate_limits import Budgets, Kind
from moa_server.engine.base import Engine
from moa_server.engine.baseline import PlainDecoding
from moa_server.logging import add_log_fields, log_fields, log_unexpected
from moa_server.metrics import Metrics
from moa_server.offered_bundles import OfferedBundles
from moa_server.scheduling.step_drafts import prepare_drafts
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, GivenUpError
from moa_server.scheduling.worker import Worker
from moa_server.sessions import BackgroundAnswers, SessionStore
from moa_server.settings import Settings
from moa_server.unless import LeftError, unless
from moa_server.web.site import WebFile, Website

SESSION_PATH, DECODE_PATH, STATUS_PATH = "/v1/session", "/v1/decode", "/v1/status"
HEALTH_PATH, READY_PATH, METRICS_PATH = "/healthz", "/readyz", "/metrics"

LEAVING = "this verifier is shutting down; try again later"

_SWEEP_SECONDS = 5.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Verifier:
    """A loaded engine, which must have no other user, with everything its connections share, as an ASGI app.

    Args:
        timeline: records the activity of every session, see :class:`moa_server.connection.Connection`.
        drafts: drafts for clients that grant credit; None for no drafts. Closed with the app.
        files: files of the page by URL path; None for no page. Its sessions need no origin in the settings.
        bundles: those that clients may fetch; None for none.
        clock: seconds, monotonic.

    Attributes:
        app: the ASGI app.
        store: the conversations.
        worker: runs the jobs of all connections.
        website: the files of the page, and of bundles.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        timeline: Timeline = NO_TIMELINE,
        drafts: ServerDrafting | None = None,
        files: Mapping[str, WebFile] | None = None,
        bundles: OfferedBundles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.engine, self.timeline, self.drafts, self.clock = settings, engine, timeline, drafts, clock
        self.metrics = Metrics()
        self.grammars: GrammarCompiler | None = None
        if (file := engine.tokenizer_file) is not None and has_llguidance():
            self.grammars = GrammarCompiler(file, engine.vocab_size, engine.stop_tokens)
            self.grammars.distrust()
        prepare = None if drafts is None else partial(prepare_drafts, drafts)
        self.worker = Worker(engine, self.metrics, settings.step_tokens, prepare, clock)
        self.authenticator = Authenticator(settings.token, settings.token_file, clock)
        self.background_answers = BackgroundAnswers(self)
        self.store = SessionStore(self)
        self.plain = PlainDecodingEndpoint(self)
        self._began = clock()
        self._connections: set[Connection] = set()
        self._leaving = False
        self._watch()
        self._page_served = files is not None
        self._bundles = bundles or OfferedBundles([], {})
        served = {**(files or {}), **self._bundles.files}
        self.website = Website(served, self.metrics, lambda asked: self._misdirected(asked.headers), self._unauthorized)
        routes: list[BaseRoute] = [
            WebSocketRoute(SESSION_PATH, self._session),
            Route(DECODE_PATH, self._decode, methods=["POST"]),
            Route(STATUS_PATH, self._status),
            Route(METRICS_PATH, self._metrics_text),
            Route(HEALTH_PATH, self._health),
            Route(READY_PATH, self._ready),
            Route(BUNDLES_PATH, self._offers),
            self.website,
        ]
        middleware = [Middleware(ErrorMiddleware)]
        if settings.origins:
            origins, methods = list(settings.origins), ["GET", "POST"]
            cross_origin = Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=methods,
                allow_headers=["*"],
                allow_private_network=True,
            )
            middleware.insert(0, cross_origin)
        self.app = Starlette(routes=routes, middleware=middleware, lifespan=self._lifespan)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Refuse new sessions and requests, answer the received frames, and close all connections.

        Args:
            seconds: time for that; unanswered frames are then given up, or as soon as ``hurry`` is set.
        """
        self._leaving = True
        for connection in self._connections:
            connection.leave()
        deadline = time.monotonic() + seconds
        while (self._connections or self.plain.running) and time.monotonic() < deadline and not hurry.is_set():
            await asyncio.sleep(0.02)
        self.worker.give_up()

    # -- requests ----------------------------------------------------------------------------------

    async def _session(self, websocket: WebSocket) -> None:
        bearer = self._bearer(websocket)
        if isinstance(bearer, Response):
            if "websocket.http.response" in websocket.scope.get("extensions", {}):
                await websocket.send_denial_response(bearer)
            else:  # the ASGI server then answers 403
                await websocket.close()
            return
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept(SESSION_SUBPROTOCOL if SESSION_SUBPROTOCOL in offered else None)
        connection = Connection(websocket, self, bearer)
        self._connections.add(connection)
        if self._leaving:  # since the upgrade was allowed
            connection.leave()
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)

    async def _decode(self, request: Request) -> Response:
        bearer = self._bearer(request)
        return bearer if isinstance(bearer, Response) else await self.plain.answer(request, bearer)

    async def _status(self, request: Request) -> Response:
        if isinstance(refusal := self._bearer(request), Response):
            return refusal
        return JSONResponse(
            {
                "version": version("moa-edge"),
                "fingerprints": asdict(self.engine.fingerprints),
                "dtype": self.engine.facts.dtype,
                "target_pass": self.engine.facts.target_pass,
                "capabilities": asdict(self.engine.capabilities),
                "sessions": len(self.store),
                "forwards": self.engine.forwards,
                "uptime_s": round(self.clock() - self._began, 3),
                "step_cost": self.worker.step_cost(),
                "acceptance": self.metrics.acceptance.message(),
            }
        )

    async def _offers(self, request: Request) -> Response:
        return self._unauthorized(request) or JSONResponse(self._bundles.message())

    async def _metrics_text(self, request: Request) -> Response:
        if isinstance(refusal := self._bearer(request), Response):
            return refusal
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        return JSONResponse({"status": "shutting down"}, 503) if self._leaving else JSONResponse({"status": "ready"})

    def _unauthorized(self, connection: HTTPConnection) -> Response | None:
        """Return the refusal of a request that needs a token; None if it is allowed."""
        bearer = self._bearer(connection)
        return bearer if isinstance(bearer, Response) else None

    def _bearer(self, connection: HTTPConnection) -> Bearer | JSONResponse:
        """Authenticate a request: return its bearer, or the response that refuses it."""
        headers, settings = connection.headers, self.settings
        if misdirected := self._misdirected(headers):
            return misdirected
        origin = headers.get("origin")
        if not (origin_allowed(origin, settings.origins) or self._own_page(connection)):
            page = str(origin)[:100]
            text = f"web pages of {page} may not use this verifier; moa-serve --allow-origin {page} would let them"
            return self._refused("origin", 403, text)
        try:
            offered = connection.scope.get("subprotocols", [])
            bearer = self.authenticator.authenticate(authorization_of(headers.get("authorization"), offered))
        except SubprotocolError as error:
            return self._refused("token", 400, str(error))
        if bearer is None:
            text = "the bearer token is missing or wrong"
            return self._refused("token", 401, text, {"WWW-Authenticate": "Bearer"})
        if self._leaving:
            return self._refused("leaving", 503, LEAVING, _retry_after(settings))
        add_log_fields(bearer=bearer.name)
        return bearer

    def _misdirected(self, headers: Headers) -> JSONResponse | None:
        """Return the refusal of a request for another host; None if the host is allowed."""
        host = headers.get("host")
        if host is None or host_allowed(host, self.settings.loopback, self.settings.hosts):
            return None
        text = f"this verifier listens on this machine alone and answers for localhost, not for {host[:100]}"
        if name := host_name(host):
            text += f"; moa-serve --allow-host {name[:100]} would let it"
        return self._refused("host", 421, text)

    def _own_page(self, connection: HTTPConnection) -> bool:
        """Whether a request comes from the page that is served here."""
        host = connection.headers.get("host")
        secure = connection.scope["scheme"] in ("https", "wss")
        if not self._page_served or host is None or not own_origin(connection.headers["origin"], host, secure):
            return False
        # The same holds for a page whose name is made to resolve to this machine (DNS rebinding). Such a page has no
        # token, for a browser's storage belongs to an origin. If no token is required, the name must be one that no
        # other page can have.
        settings = self.settings
        return (
            not self.authenticator.open
            or settings.loopback
            or names_address(host)
            or host_allowed(host, True, settings.hosts)
        )

    def _refused(self, reason: str, status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
        self.metrics.refused(reason)
        _log.info("refused: %s", text, extra={"data": {"reason": reason}})
        return JSONResponse({"error": text}, status, headers=headers)

    # -- upkeep ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        watch, engine = self.metrics.watch, self.engine
        self.metrics.tell_dtype(engine.facts.dtype)
        watch("moa_sessions", "Conversations held.", lambda: len(self.store))
        watch("moa_sessions_connected", "Conversations with a connection.", lambda: self.store.connected)
        away = "Conversations whose answer continues without a connection."
        watch("moa_sessions_away", away, lambda: len(self.background_answers))
        watch("moa_jobs", "Frames and requests that wait or are being worked on.", lambda: len(self.worker))
        watch("moa_cache_tokens", "Tokens that caches take up.", lambda: engine.cache_use[0])
        watch("moa_cache_limit_tokens", "Tokens that caches may take up.", lambda: engine.cache_use[1])
        self.metrics.watch_count("moa_forwards", "Forward passes of the target.", lambda: engine.forwards)
        if engine.tokens_reused is not None:
            reused = "Tokens that were not computed, because an earlier conversation began with them."
            self.metrics.watch_count("moa_tokens_reused", reused, lambda: engine.tokens_reused or 0)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await self.background_answers.close()
            await self.worker.close()
            if self.drafts is not None:
                self.drafts.close()
            if self.grammars is not None:
                self.grammars.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.store.sweep()


_INTERNAL_ERROR = 1011  # WebSocket close code (RFC 6455)


class ErrorMiddleware:
    """Answers an exception of the app with status 500 or close code 1011, if that is still possible, and stops it.

    Exceptions about disconnected clients are left to the server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        with log_fields():
            try:
                await self._app(scope, receive, watched)
            except (ClientDisconnect, WebSocketDisconnect):
                raise
            except Exception as error:
                log_unexpected(_log, scope.get("path", scope["type"]), error)
                refusal = JSONResponse({"error": "the verifier failed on this request"}, 500)
                with contextlib.suppress(Exception):  # the same failure may recur here
                    if scope["type"] == "websocket" and begun:
                        await send({"type": "websocket.close", "code": _INTERNAL_ERROR})
                    elif scope["type"] == "websocket":
                        await WebSocket(scope, receive, send).send_denial_response(refusal)
                    elif not begun:  # the server aborts an answer that has begun
                        await refusal(scope, receive, send)


def _retry_after(settings: Settings) -> dict[str, str]:
    return {"Retry-After": str(-(-settings.retry_after_ms // 1000))}


_FIELDS = {"tokens", "max_new_tokens", "temperature", "top_p", "seed", "stream"}


class RequestError(Exception):
    """A request that cannot be answered; ``status`` is the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class _Events(StreamingResponse):
    """Server-sent events that hold their request's place among the running ones until the last event."""

    def __init__(self, events: AsyncIterator[str], held: contextlib.AbstractContextManager[Any]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held, contextlib.suppress(LeftError, OSError):  # the client is gone
            await _while_there(receive, self.stream_response(send))


class PlainDecodingEndpoint:
    """``POST /v1/decode``: the server's own plain decoding, to compare a session's text and speed with.

    Its fields and events stand in docs/serving.md. A request is the same kind of work as a session's frames, and is
    dropped as soon as its client leaves. Refusals come before the first event of a stream.

    Attributes:
        running: requests that are being answered.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._engine, self._worker, self._authenticator = verifier.engine, verifier.worker, verifier.authenticator
        self._settings, self._metrics = verifier.settings, verifier.metrics
        self.running = 0

    async def answer(self, request: Request, bearer: Bearer) -> Response:
        """Answer one request of an authenticated bearer."""
        try:
            budgets, withdrawn = self._authenticator.budgets(bearer), asyncio.Event()
            with contextlib.ExitStack() as held:
                held.callback(self._authenticator.watch(bearer, withdrawn.set))
                plain, stream = await _unless_withdrawn(withdrawn, self._requested(request, budgets))
                most = self._authenticator.most_sessions(bearer, self._settings.max_sessions)
                held.enter_context(self._place(budgets, most))
                events = self._events(plain, withdrawn, budgets)
                if stream:
                    return _Events(_sent(events), held.pop_all())
                return JSONResponse(await _while_there(request.receive, _whole(events)))
        except RequestError as error:
            self._metrics.refused(f"http_{error.status}")
            _log.info("refused: %s", error, extra={"data": {"reason": f"http_{error.status}"}})
            retry = _retry_after(self._settings) if error.status == 503 else None
            return JSONResponse({"error": str(error)}, error.status, headers=retry)
        except (LeftError, ClientDisconnect):
            return JSONResponse({"error": "the client left"}, 400)

    @contextlib.contextmanager
    def _place(self, budgets: Budgets, most: int | None) -> Iterator[None]:
        """Take one of the places for requests that run at once, of all and of the ``most`` of one token.

        Raises:
            RequestError: none is left.
        """
        if self.running >= self._settings.max_sessions:
            raise RequestError(f"this verifier already decodes {self.running} requests; try again later", 503)
        if not budgets.open_session(most):
            raise RequestError(f"this token may have {most} sessions at once; end one", 503)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            budgets.close_session()

    async def _events(
        self, plain: PlainDecoding, withdrawn: asyncio.Event, budgets: Budgets
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Decode until the end; each token is a job of its own, so that others have their turns in between.

        Raises:
            RequestError: the verifier is too busy, failed or shuts down, or the token was withdrawn.
        """
        steps, owed_s, seconds = 0, budgets.wait_s(Kind.PREFILL_TOKENS, plain.length), self._settings.answer_seconds
        try:
            while (job := plain.next()) is not None:
                await _unless_withdrawn(withdrawn, self._worker.run(job, seconds, owed_s))
                owed_s = 0.0
                self._metrics.decided(drafted=0, accepted=0, committed=1)
                token = plain.take(job)
                steps += token.steps
                yield {"token": token.token}
            yield {"done": True, "forwards": steps, "finish": plain.finish}
        except ExpiredError:
            raise RequestError(f"the verifier is too busy: no token within {seconds:g} seconds", 503) from None
        except GivenUpError:
            raise RequestError(LEAVING, 503) from None
        except EngineFailedError:
            raise RequestError("the verifier failed on this request; sending it again may help", 500) from None
        finally:
            self._worker.release(plain.sequence)

    async def _requested(self, request: Request, budgets: Budgets) -> tuple[PlainDecoding, bool]:
        """Read a request; return its decoding, and whether to stream it."""
        body = bytearray()
        # A list of as many ids as the context holds takes this much, and not much more.
        most = min(self._settings.max_frame_bytes, 16 * self._engine.max_context + 4096)
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise RequestError(f"the body has more than {most} bytes", 413)
        await asyncio.sleep(budgets.wait_s(Kind.FRAMES, 1))
        return self._parse(bytes(body))

    def _parse(self, body: bytes) -> tuple[PlainDecoding, bool]:
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is no JSON: {json_problem(error)}") from error
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
        return PlainDecoding(self._engine, tokens, Sampling(float(temperature), float(top_p), seed), most), stream


async def _whole(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    """Gather the events of a decoding into one answer."""
    answer: dict[str, Any] = {"tokens": []}
    async with contextlib.aclosing(events):
        async for event in events:
            if "token" in event:
                answer["tokens"].append(event["token"])
            else:
                answer |= {"forwards": event["forwards"], "finish": event["finish"]}
    return answer


async def _sent(events: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    """Turn the events of a decoding into server-sent events."""
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n"
        except RequestError as error:
            yield f"data: {json.dumps({'error': str(error)})}\n\n"


async def _while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the client leaves.

    Raises:
        LeftError: the client left.
    """

    async def until_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return await unless(until_left(), work, LeftError())


async def _unless_withdrawn(withdrawn: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the token is withdrawn.

    Raises:
        RequestError: the token was withdrawn.
    """
    return await unless(withdrawn.wait(), work, RequestError(CloseReason.WITHDRAWN.value, 401))


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
