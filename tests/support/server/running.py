"""A verifier on a loopback port in a thread, and a blocking client around the session's state machine."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.sync.client import connect

from moa_runtime.cli_main import own_program
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Faulted, Finished, Origin, RowsReceived, Sampling, SessionEvent
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.app import SESSION_PATH
from moa_server.app import Verifier as Served
from moa_server.edge.server import EdgeServer
from moa_server.process import VerifierServer

TIMEOUT_S = 30


@dataclass
class Verifier:
    """A running verifier, and its server; ``tls`` is what its clients check."""

    server: VerifierServer
    port: int
    token: str
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None

    @property
    def parts(self) -> Served:
        """What is served; only for looking at."""
        served: Served = self.server.verifier
        return served

    @property
    def url(self) -> str:
        return f"{'wss' if self.tls else 'ws'}://{self.host}:{self.port}{SESSION_PATH}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def connect(self, **options: Any):
        options = {"open_timeout": TIMEOUT_S, "close_timeout": 1, "ssl": self.tls, **options}
        return connect(self.url, additional_headers=self.headers, compression=None, max_size=None, **options)

    def http(self, method: str, path: str, **options: Any) -> httpx.Response:
        options.setdefault("headers", self.headers)
        options.setdefault("verify", self.tls or False)  # without TLS, authorities would only take time to load
        url = f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{path}"
        return httpx.request(method, url, timeout=TIMEOUT_S, **options)

    def decode(self, tokens: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        body = {"tokens": list(tokens), "max_new_tokens": count, "temperature": sampling.temperature}
        body |= {"top_p": sampling.top_p, "seed": sampling.seed}
        return self.http("POST", "/v1/decode", json=body).json()["tokens"]


def trusting() -> ssl.SSLContext:
    """What a client checks that takes any server for the right one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@contextlib.contextmanager
def serving(engine, settings, *, host: str = "127.0.0.1", **options: Any) -> Iterator[Verifier]:
    """Serve until the block ends; ``options`` are those of ``Served`` and :class:`VerifierServer`."""
    started = threading.Event()
    parts = {name: options.pop(name) for name in ("timeline", "drafts", "files", "bundles") if name in options}
    server = VerifierServer(Served(engine, settings, **parts), on_ready=started.set, **options)
    with in_thread(server, started, host) as (port, _):
        yield Verifier(server, port, settings.token, host)


@contextlib.contextmanager
def in_thread(server: EdgeServer, started: threading.Event, host: str = "127.0.0.1"):
    """Run a server until the block ends; its port and its thread."""
    with socket.create_server((host, 0)) as listening:
        thread = threading.Thread(target=server.run, args=(listening,))
        thread.start()
        try:
            assert started.wait(TIMEOUT_S)
            yield listening.getsockname()[1], thread
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)


@contextlib.contextmanager
def moa_serve(*options: Any, program: str = "", **popen: Any) -> Iterator[tuple[subprocess.Popen, dict]]:
    """A process of ``moa-serve``, or of another program, on a free port, and its ready line; killed after the block."""
    command = [sys.executable, "-c", program] if program else own_program("moa_server.cli")
    command += ["--json", "--port", "0", "--threads", "1", *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
    with subprocess.Popen(command, **pipes) as running:
        try:
            yield running, json.loads(running.stdout.readline() or "{}")
        finally:
            running.kill()


def after_steps(err: str) -> str:
    """What a start says on stderr, without its steps."""
    return re.sub(r"(?m)^moa-serve: [\w ]+ \(\d+ s gone\)\n", "", err)


class Client:
    """A ClientSession on a blocking WebSocket. ``writer`` proposes the tokens after a list of tokens."""

    def __init__(self, verifier: Verifier, engine, **options: Any) -> None:
        self.verifier = verifier
        options.setdefault("row_encoding", wire.ROW_ENCODING_FLOAT16)
        self.session = ClientSession(engine.fingerprints, stop_tokens=engine.stop_tokens, **options)
        self.events: list[SessionEvent] = []

    def connect(self, verifier: Verifier | None = None) -> None:
        self.verifier = verifier or self.verifier
        self.socket = self.verifier.connect().__enter__()  # websockets 17 wants a context; tests close the socket
        self.session.connect()
        while self.session.link is not LinkState.UP and not self.faults:
            self.exchange()

    def drop(self) -> None:
        """Lose the connection."""
        self.socket.socket.close()
        self.session.disconnected()

    def exchange(self) -> None:
        """Send what waits, take one frame."""
        for frame in self.session.frames_to_send():
            self.socket.send(frame)
        self.events += self.session.receive(self.socket.recv(TIMEOUT_S))
        for frame in self.session.frames_to_send():
            self.socket.send(frame)

    def rounds(self, writer, most: int = 1000) -> None:
        """Run at most this number of rounds of the current answer."""
        for _ in range(most):
            while self.session.answering and self.session.awaiting_verdict and not self.faults:
                self.exchange()
            if not self.session.answering or self.faults:
                return
            drafted = [] if self.session.tentative else writer(self.session.tokens)
            self.session.extend(drafted, Origin.DRAFTED)
            assert self.session.propose()
            for frame in self.session.frames_to_send():
                self.socket.send(frame)

    def settle(self) -> None:
        """Take what is under way: the verdict that is awaited, and the memory rows behind it."""
        while (self.session.awaiting_verdict or self.session.rows_coming) and not self.faults:
            self.exchange()

    @property
    def faults(self) -> list[Faulted]:
        return [event for event in self.events if isinstance(event, Faulted)]

    @property
    def finished(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    @property
    def rows(self) -> list[RowsReceived]:
        return [event for event in self.events if isinstance(event, RowsReceived)]
