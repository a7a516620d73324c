"""Run the endpoint: its address, its HTTP protocol, its process."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from starlette.applications import Starlette

from moa_chat.chat_config import ChatConfig, open_datastore
from moa_chat.gateway.app import Access, create_app
from moa_chat.gateway.grammar_queue import GrammarQueue
from moa_chat.gateway.pool import ChatPool
from moa_chat.gateway.requests import Defaults
from moa_chat.gateway.tool_formats.choice import tool_format
from moa_chat.gateway.tool_formats.tool_format import ToolFormat
from moa_chat.local_verifier import LocalVerifier
from moa_chat.options import DEFAULT_GATEWAY
from moa_runtime.backends.load import SharedBackend, load_writer
from moa_runtime.chat import Chat
from moa_runtime.drafters.factory import backend_for
from moa_runtime.errors import MoaError, printable
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.options import LoopSettings
from moa_runtime.session.events import Policy
from moa_runtime.sockets import check_hosts, check_origins, check_token, is_loopback, url_of
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.edge.process_exit import ProcessExit
from moa_server.edge.rate_limits import TokenBucket
from moa_server.edge.server import EdgeServer, freeze_loaded_objects
from moa_server.logging import handle_loop_error

_HIGHEST_PORT = 65535
# Sent text cannot be taken back, so only a lost connection makes the device continue alone; a verdict may be late.
_PATIENCE_S = 3600.0
_OUTAGE_AFTER_S = 0.0  # but then at once, as the answer may have to end there


@dataclass(frozen=True)
class Address:
    """The address to listen on, and the clients that are admitted."""

    host: str
    port: int  # 0 for any free one
    token: str = ""  # bearer token that requests must carry; empty for none
    origins: Sequence[str] = ()  # of web pages that may send requests
    hosts: Sequence[str] = ()  # further names under which a loopback address may be reached


def address_for(options: argparse.Namespace) -> Address:
    """Read the address from the options. Raises MoaError if it is invalid, or open to others without a token."""
    check_origins(options.allow_origin)
    check_hosts(options.allow_host)
    host, port = _host_and_port(options.serve)
    token = os.environ.get("MOA_GATEWAY_TOKEN", "") if options.gateway_token is None else options.gateway_token
    check_token(token, "--gateway-token", "MOA_GATEWAY_TOKEN")
    if not is_loopback(host) and not token:
        text = f"--serve {host} is open to other machines: set a token with --gateway-token or MOA_GATEWAY_TOKEN"
        raise MoaError(text, code="token_missing")
    return Address(host, port, token, options.allow_origin, options.allow_host)


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > _HIGHEST_PORT:
        sentence = f"--serve {text!r} is not an address: expected HOST:PORT, such as {DEFAULT_GATEWAY}"
        raise MoaError(sentence, code="bad_address")
    return host, int(port)


def run_gateway(
    config: ChatConfig, address: Address, listening: socket.socket, verifier: LocalVerifier | None, *, as_json: bool
) -> int:
    """Run the endpoint until SIGINT or SIGTERM; ``as_json`` is the form of its ready line. Raises MoaError if the
    drafter cannot be loaded, or a ``verifier`` that was started for it ended."""
    names = ("max_new_tokens", "temperature", "top_p", "seed", "system", "offline", "thinking", "overflow")
    given = {name: getattr(config, name) for name in names}
    manifest = config.bundle.manifest
    defaults = Defaults(config.target, **given, max_context=manifest.max_context, vocab_size=manifest.vocab_size)
    access = Access(address.token, address.origins, is_loopback(address.host), address.hosts)
    end = ProcessExit()
    chats, texts = _pools(config)

    @lru_cache
    def tokenizer() -> ChatTokenizer:
        return ChatTokenizer.from_bundle(config.bundle)

    @lru_cache
    def begins_reasoning(thinking: bool | None) -> bool:
        return tokenizer().begins_reasoning(thinking)

    @lru_cache
    def calls() -> ToolFormat:
        return tool_format(tokenizer())

    compiling = []
    if (compiler := GrammarCompiler.of_bundle(config.bundle)) is not None:
        compiler.distrust()
        compiler.load()
        compiling = [GrammarQueue(compiler, tokenizer).compile]
    app = create_app(chats, texts, defaults, access, RequestLines(), begins_reasoning, calls, *compiling)
    _serve(app, listening, config.target, verifier, as_json)
    end.served = True
    return 0


def _pools(config: ChatConfig) -> tuple[ChatPool, ChatPool]:
    """Return pools of chats with and without the target's template, which share the drafter and the writer."""
    graph = backend_for(config.bundle, config.drafter, config.backend, threads=config.threads)
    backend = None if graph is None else SharedBackend(graph)
    loaded = load_writer(config.bundle, graph, threads=config.threads)
    writer = None if loaded is None else SharedBackend(loaded)
    datastore = open_datastore(config.datastore, config.bundle)
    settings = LoopSettings(
        offline_limit=config.offline_limit,
        drafting=config.drafting,
        offline=config.offline,
        late_after_s=_PATIENCE_S,
        prefill_late_after_s=_PATIENCE_S,
        outage_after_s=_OUTAGE_AFTER_S,
    )

    async def connect(needs_verifier: bool, *, raw: bool) -> Chat:
        return await config.connect(
            backend=backend,
            writer=writer,
            datastore=datastore,
            policy=Policy.KEEP,
            settings=settings,
            system=None,
            raw=raw,
            wait=needs_verifier,
        )

    return ChatPool(partial(connect, raw=False)), ChatPool(partial(connect, raw=True))


def _serve(app: Starlette, listening: socket.socket, model: str, verifier: LocalVerifier | None, as_json: bool) -> None:
    url = url_of("http", listening, "/v1")

    class Server(EdgeServer):
        async def startup(self) -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(handle_loop_error)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._end)
            freeze_loaded_objects()
            await super().startup()
            self._watching = asyncio.create_task(self._watch_verifier())
            host, port = listening.getsockname()[:2]
            ready = {"event": "ready", "url": url, "host": host, "port": port, "model": model}
            print(json.dumps(ready) if as_json else f"moa-chat: serving {model} on {url}", flush=True)

        def _end(self, *_: object) -> None:
            self.should_exit = True

        async def _watch_verifier(self) -> None:
            while verifier is None or verifier.problem is None:
                await asyncio.sleep(0.1)
            self.should_exit = True

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of writes to a client that has gone
    # Twice as many requests as answers that are written at once (pool.py): others are refused in either case.
    Server(app, EdgeLimits(requests=16)).run(listening)
    if verifier is not None and (problem := verifier.problem) is not None:
        raise problem


class RequestLines:
    """Writes lines to stderr, of many 50 a second: a flood would fill a disk, and all requests wait for a terminal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket, self._left_out = TokenBucket(50.0, 400.0, clock), 0

    def __call__(self, line: str) -> None:
        if not self._bucket.take_spare(1):
            self._left_out += 1
            return
        more, self._left_out = f" (and {self._left_out} more, left out)" if self._left_out else "", 0
        print(f"moa-chat: {printable(line)}{more}", file=sys.stderr, flush=True)
