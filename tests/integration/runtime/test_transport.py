"""The client's link reads what came before a write failed, and waits ever longer for a server that fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import threading

import pytest
from websockets.asyncio.server import serve
from websockets.protocol import State
from websockets.server import ServerProtocol

from moa_runtime.transport import Endpoint, Timing, Transport, TransportHandlers

TIMEOUT_S = 30
COUNT = 40  # messages: more than websockets reads ahead


class Resetting:
    """A server for one connection that sends its messages when ``go`` is set, and resets the connection."""

    def __init__(self, tls: tuple | None) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.go, self.gone = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(tls,))
        self.thread.start()

    def _serve(self, tls: tuple | None) -> None:
        connected, _ = self.listening.accept()
        connected.settimeout(TIMEOUT_S)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            connected = context.wrap_socket(connected, server_side=True)
        protocol = ServerProtocol()
        while protocol.state is State.CONNECTING:
            protocol.receive_data(connected.recv(65536))
            for request in protocol.events_received():
                protocol.send_response(protocol.accept(request))
        protocol.send_binary(b"ready")
        connected.sendall(b"".join(protocol.data_to_send()))
        assert self.go.wait(TIMEOUT_S)
        for number in range(COUNT):
            protocol.send_binary(b"%d" % number)
        protocol.send_close(1001)
        connected.sendall(b"".join(protocol.data_to_send()))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connected.close()
        self.gone.set()


@pytest.mark.skipif(os.name == "nt", reason="overlapped writes fail elsewhere")
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_what_came_before_a_write_failed_is_read(secure, tls, monkeypatch):
    monkeypatch.setattr("moa_runtime.transport._MOST_WAITING_BYTES", 0)  # one is taken up before the next is read
    server = Resetting(tls if secure else None)
    frames: list[bytes] = []

    async def run() -> None:
        closed = asyncio.Event()

        def frame(data: bytes) -> None:
            frames.append(data)
            asyncio.get_running_loop().call_later(0.001, transport.taken_up, data)
            if data == b"ready":  # the loop stands still until the connection is reset, and writes before it reads
                server.go.set()
                assert server.gone.wait(TIMEOUT_S)
            transport.send(b"a frame")

        handlers = TransportHandlers(lambda: None, lambda: None, lambda: None, frame, lambda *_: closed.set())
        context = ssl.create_default_context(cafile=tls[0])
        context.check_hostname = False
        endpoint = Endpoint(f"{'wss' if secure else 'ws'}://127.0.0.1:{server.port}", tls=context)
        transport = Transport(endpoint, handlers, Timing())
        running = asyncio.create_task(transport.run())
        try:
            await asyncio.wait_for(closed.wait(), TIMEOUT_S)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    asyncio.run(run())
    server.thread.join(TIMEOUT_S)
    server.listening.close()
    assert frames == [b"ready", *(b"%d" % number for number in range(COUNT))]


@pytest.mark.parametrize(("longest", "delays"), [(30.0, [0.02, 0.04, 0.08, 0.16]), (0.0, [0.02, 0.02, 0.02])])
def test_the_delay_doubles_until_a_connection_has_lasted(longest, delays):
    """A verifier that fails after each Hello is left alone; one that served for a while is asked again at once."""
    told: list[float | None] = []

    async def run() -> None:
        done = asyncio.Event()

        async def fail(connection) -> None:
            await connection.recv()
            await connection.close(1011)

        def closed(problem, retry_in_s: float | None) -> None:
            told.append(retry_in_s)
            if len(told) == len(delays):
                done.set()

        async with serve(fail, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            handlers = TransportHandlers(
                lambda: None, lambda: None, lambda: transport.send(b"Hello"), lambda _: None, closed
            )
            timing = Timing(first_backoff=0.02, longest_backoff=longest)
            transport = Transport(Endpoint(f"ws://127.0.0.1:{port}"), handlers, timing)
            running = asyncio.create_task(transport.run())
            await asyncio.wait_for(done.wait(), TIMEOUT_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert told == delays
