"""Why there is no connection: one true sentence for each cause, with real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from moa_runtime.transport import ConnectError, Endpoint, Timing, Transport, TransportHandlers, connect_error

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


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets variables of an environment that names no proxy otherwise."""
    for name in ("ws", "wss", "socks", "http", "https", "all", "no"):
        for each in (f"{name}_proxy", f"{name}_proxy".upper()):
            monkeypatch.delenv(each, raising=False)

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("names", [("http_proxy", "https_proxy"), ("all_proxy",), ("ALL_PROXY",)])
def test_a_proxy_is_used_but_for_this_machine(names: tuple[str, ...], environment: Callable[..., None]) -> None:
    async def run() -> None:
        proxy = await asyncio.start_server(refusing("407 Proxy Authentication Required"), "127.0.0.1", 0)
        address = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        environment(**dict.fromkeys(names, address))
        found = await asyncio.to_thread(told, "wss://verifier.example:8765")
        assert "the proxy that the environment names does not lead to wss://verifier.example" in str(found)
        for here in ("ws://127.0.0.1:9", "ws://localhost:9", "ws://[::1]:9"):
            assert "no verifier answers" in str(await asyncio.to_thread(told, here))
        proxy.close()
        await proxy.wait_closed()
        gone = str(await asyncio.to_thread(told, "ws://verifier.example:8765"))
        assert "the proxy that the environment names does not lead to ws://verifier.example" in gone
        environment(no_proxy="verifier.example")
        assert Endpoint("ws://verifier.example:8765").proxy is None

    asyncio.run(run())


def test_a_proxy_that_says_nothing_is_told_of() -> None:
    """It may be at fault as well as the verifier."""
    late = connect_error("ws://verifier.example/v1/session", TimeoutError(), 5.0, proxied=True)
    assert "within 5 s through the proxy that the environment names: set no_proxy" in str(late) and not late.final


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "garbage"),
        ("https_proxy", "proxy.example:3128"),
        ("all_proxy", "quic://proxy.example:3128"),
        ("http_proxy", "http://user:secret@proxy.example:99999"),
        ("https_proxy", "http://user:se/cret@proxy.example:3128"),
        ("https_proxy", "http://secret@proxy.example:3128"),
        ("https_proxy", "http://user:%ffsecret@proxy.example:3128"),
        ("https_proxy", "http://[::1"),
        ("https_proxy", "http://proxy..example:é"),
    ],
)
def test_a_malformed_proxy_is_told_without_its_password(
    name: str, value: str, environment: Callable[..., None]
) -> None:
    environment(**{name: value})
    with pytest.raises(ConnectError, match="the proxy that the environment names has no valid address") as caught:
        raise told("ws://verifier.example:8765")
    assert caught.value.final and "cret" not in str(caught.value)
    assert "no verifier answers" in str(told("ws://127.0.0.1:9"))


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY", "SOCKS_PROXY"])
def test_a_socks_proxy_names_the_package_that_it_needs(
    name: str, environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(*_: object, **__: object) -> None:
        raise ImportError("connecting through a SOCKS proxy requires python-socks")

    monkeypatch.setattr("websockets.asyncio.client.connect_socks_proxy", missing)  # what it is without the package
    environment(**{name: "socks5://user:secret@proxy.example:1080"})
    with pytest.raises(ConnectError, match=r"needs python-socks: pip install 'python-socks\[asyncio\]'") as caught:
        raise told("wss://verifier.example:8765")
    assert caught.value.final and "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["https_proxy", "all_proxy"])
def test_a_socks_proxy_leads_to_the_verifier(name: str, environment: Callable[..., None]) -> None:
    pytest.importorskip("python_socks")
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """SOCKS5 without authentication (RFC 1928), to a server that refuses the WebSocket."""
        await reader.readexactly(3)
        writer.write(b"\x05\x00")
        asked.append(await reader.readexactly(5 + len("verifier.example") + 2))
        writer.write(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        await HTTP(reader, writer)

    async def run() -> ConnectError:
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        environment(**{name: f"socks5h://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
        try:
            return await asyncio.to_thread(told, "ws://verifier.example:8765")
        finally:
            server.close()

    assert "ws://verifier.example:8765/v1/session answered HTTP 400" in str(asyncio.run(run()))
    assert asked == [b"\x05\x01\x00\x03\x10verifier.example" + (8765).to_bytes(2, "big")]


def test_what_nobody_expects_is_told_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr("moa_runtime.transport.connect", breaks)
    with pytest.raises(ConnectError, match=r"failed unexpectedly: LookupError\('a defect'\)") as caught:
        raise told("ws://127.0.0.1:9")
    assert caught.value.final and isinstance(caught.value.__cause__, LookupError)
