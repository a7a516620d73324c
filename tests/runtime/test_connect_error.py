"""Why there is no connection: one true sentence for each cause, with real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from moa_runtime.connect_error import ConnectError
from moa_runtime.transport import Endpoint, Timing, Transport, TransportHandlers

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def told(url: str, answer: Answer | None = None) -> ConnectError:
    """Why a transport has no connection to ``url``, whose port is that of a server which answers so."""

    async def run() -> ConnectError:
        heard: asyncio.Future[ConnectError] = asyncio.get_running_loop().create_future()

        def closed(error: ConnectError, _: float | None) -> None:
            if not heard.done():
                heard.set_result(error)

        port = 9
        if answer is not None:
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
        handlers = TransportHandlers(lambda: None, lambda: None, lambda: None, lambda frame: None, closed)
        transport = Transport(Endpoint(url.replace("PORT", str(port))), handlers, Timing(open_timeout=10.0))
        running = asyncio.create_task(transport.run())
        try:
            return await asyncio.wait_for(heard, 30)
        finally:
            running.cancel()
            if answer is not None:
                server.close()

    return asyncio.run(run())


def saying(data: bytes) -> Answer:
    """A server that answers whatever comes with ``data``, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(data)
        writer.close()

    return answer


def refusing(status: str) -> Answer:
    return saying(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())


HTTP = refusing("400 Bad Request")
TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x16"  # as a server with TLS answers plain text


@pytest.mark.parametrize(
    ("url", "answer", "said", "final"),
    [
        ("wss://127.0.0.1:PORT", HTTP, "does not speak TLS: use ws://", True),
        ("ws://127.0.0.1:PORT", HTTP, "answered HTTP 400: is it a moa-edge verifier", True),
        ("ws://127.0.0.1:PORT", saying(b"220 mail.example ESMTP\r\n\r\n"), "does not speak WebSocket: is it", True),
        ("ws://127.0.0.1:PORT", saying(TLS_ALERT), "without an answer; if it speaks TLS, use wss://", False),
        ("wss://127.0.0.1:PORT", saying(b""), "no verifier answers|closed the connection", False),
        ("ws://127.0.0.1:9", None, "no verifier answers at .*; start one with moa-serve", False),
    ],
)
def test_each_cause_has_its_sentence(url: str, answer: Answer | None, said: str, final: bool) -> None:
    with pytest.raises(ConnectError, match=said) as caught:
        raise told(url, answer)
    assert caught.value.final is final


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConnectError, match="host of ws://nowhere:8765/v1/session is not known") as caught:
        raise told("ws://nowhere:8765")
    assert not caught.value.final


def test_a_proxy_is_used_but_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        proxy = await asyncio.start_server(refusing("407 Proxy Authentication Required"), "127.0.0.1", 0)
        address = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, address)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        found = await asyncio.to_thread(told, "wss://verifier.example:8765")
        assert "the proxy that the environment names does not lead to wss://verifier.example" in str(found)
        for here in ("ws://127.0.0.1:9", "ws://localhost:9", "ws://[::1]:9"):
            assert "no verifier answers" in str(await asyncio.to_thread(told, here))
        proxy.close()

    asyncio.run(run())
