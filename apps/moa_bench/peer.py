"""Another engine as a peer of the verifier: a process of its own, which streams as the verifier does when it decodes
alone (``POST /v1/decode``), so that client, link and messages are the same."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from moa_bench.server_clients import receive
from moa_bench.verifier import Verifier, split_cpus
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import available_cpus
from moa_runtime.paths import expanded
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint


class Decoder(Protocol):
    """An engine that writes answers alone, one at a time. ``forwards``: its passes so far."""

    forwards: int

    def decode(self, tokens: Sequence[int], count: int, sampling: Sampling) -> Iterator[list[int]]:
        """Write at most ``count`` tokens after ``tokens``; yields those of each pass."""


@contextlib.contextmanager
def running_peer(load: Callable[[], Decoder], cpus: set[int] | None) -> Iterator[Verifier]:
    """Run the decoder that ``load`` makes, in a process on ``cpus``, while the context is open. Raises MoaError: it
    cannot be loaded."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, load, cpus), daemon=True)
    process.start()
    theirs.close()  # while it is open here, the process could end unnoticed
    try:
        port = receive(ours, process, "the peer")
        yield Verifier(Endpoint(f"ws://127.0.0.1:{port}"), process.pid, pinned=cpus is not None)
    finally:
        process.terminate()
        process.join()


def serve(connection: Connection, load: Callable[[], Decoder], cpus: set[int] | None) -> None:
    """Load a decoder and send the port at which it is served, or a MoaError. Ends when the other end of ``connection``
    is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent alone
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        decoder = load()
    except MoaError as error:
        connection.send(MoaError(str(error), code=error.code))
        return
    with _Server(decoder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection.send(server.server_address[1])
        with contextlib.suppress(EOFError, OSError):
            connection.recv()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.decoder, self.decoding = decoder, threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer ``/healthz`` and ``/v1/status`` alike."""
        self._begin("application/json")
        self._send(json.dumps({"forwards": self.server.decoder.forwards}))
        self._end()

    def do_POST(self) -> None:
        """Stream an answer, see docs/serving.md."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sampling = Sampling(asked["temperature"], asked["top_p"], asked["seed"])
        self._begin("text/event-stream")
        with self.server.decoding:
            before = self.server.decoder.forwards
            try:
                for tokens in self.server.decoder.decode(asked["tokens"], asked["max_new_tokens"], sampling):
                    self._send("".join(_event(token=token) for token in tokens))
                self._send(_event(done=True, forwards=self.server.decoder.forwards - before))
            except MoaError as error:
                self._send(_event(error=str(error)))
        self._end()

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


def _event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


# -- llama.cpp ---------------------------------------------------------------------------------------------

#: All modes of llama.cpp; this word stands for them in ``--modes``.
LLAMACPP = "llamacpp"
#: llama.cpp on the verifier's processors: on the same file, on that file in Q4_0, and drafting from n-grams.
PEERS = ("llamacpp-same", "llamacpp-q4_0", "llamacpp-lookup")
#: The same with the processors of verifier and device together.
PEERS_ON_ALL = tuple(f"{name}-all" for name in PEERS)


@contextlib.contextmanager
def open_llamacpp(names: Sequence[str], model: str | None, **settings: Any) -> Iterator[dict[str, Verifier]]:
    """Run llama.cpp for each of ``names`` of :data:`PEERS` and :data:`PEERS_ON_ALL`, and yield them by name.

    Call it before :func:`moa_bench.verifier.open_verifier`, which leaves this process fewer processors.

    Args:
        model: target, see :func:`gguf_of`.
        settings: ``context`` and ``stop_tokens`` of :class:`moa_bench.llamacpp.LlamaCpp`.

    Raises:
        MoaError: llama.cpp is not installed, or does not run the target.
    """
    with contextlib.ExitStack() as stack:
        peers = {}
        if names:
            require_extra("llamacpp", f"--modes {LLAMACPP}")
            file, cpus = gguf_of(model), split_cpus()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moa-llamacpp-")))
        for name in names:
            here = None if cpus is None else cpus[1] | (cpus[0] if name in PEERS_ON_ALL else set())
            made = folder / "q4_0.gguf" if "q4_0" in name else None
            threads = available_cpus() if here is None else len(here)
            how = {"threads": threads, "lookup": "lookup" in name, **settings}
            peers[name] = stack.enter_context(running_peer(partial(load_llamacpp, file, made, **how), here))
        yield peers


def load_llamacpp(file: Path, made: Path | None, **settings: Any) -> Decoder:
    """Load ``file``; with ``made`` the same model in Q4_0, which is written there if it is not there yet."""
    from moa_bench.llamacpp import LlamaCpp, requantise

    if made is not None and not made.exists():
        requantise(file, made)
    return LlamaCpp(made or file, **settings)


def gguf_of(model: str | None) -> Path:
    """Return the GGUF file of a target, by default the built-in one. Raises MoaError: it has none."""
    from moa_decoder.gguf_file import is_gguf
    from moa_drafter import target_folder
    from moa_drafter.target_source import DEFAULT_TARGET, resolve_target

    name = model or DEFAULT_TARGET
    if is_gguf(expanded(name)):
        return expanded(name)
    files = target_folder.gguf_of(resolve_target(name))
    if not files:
        text = f"--modes {LLAMACPP} needs a target's GGUF file, and {name} has none: pass --model FILE.gguf"
        raise MoaError(text, code="no_gguf")
    return files[0]
