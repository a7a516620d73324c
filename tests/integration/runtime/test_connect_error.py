"""Errors of connecting, with real sockets: each cause has its code, and is final if trying again cannot help."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

import pytest

from moa_runtime.transport import ConnectError, Endpoint, Timing, Transport, TransportHandlers, connect_error, tls_error

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def told(url: str, answer: Answer | None = None) -> ConnectError:
    """Return a transport's error on connecting to ``url``, whose port is that of a server with this ``answer``."""

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
    """Return a server that answers any request with ``data``, and hangs up."""

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
    ("url", "answer", "code", "final"),
    [
        ("wss://127.0.0.1:PORT", HTTP, "no_tls", True),
        ("ws://127.0.0.1:PORT", HTTP, "http_status", True),
        ("ws://127.0.0.1:PORT", refusing("401 Unauthorized"), "unauthorized", True),
        ("ws://127.0.0.1:PORT", refusing("403 Forbidden"), "forbidden", True),
        ("ws://127.0.0.1:PORT", refusing("421 Misdirected Request"), "host_refused", True),
        ("ws://127.0.0.1:PORT", saying(b"220 mail.example ESMTP\r\n\r\n"), "no_websocket", True),
        ("ws://127.0.0.1:PORT", saying(TLS_ALERT), "no_answer", False),
        ("wss://127.0.0.1:PORT", saying(b""), "unreachable no_answer", False),  # reset, or closed before
        ("ws://127.0.0.1:9", None, "unreachable", False),
    ],
)
def test_each_cause_has_its_code(url: str, answer: Answer | None, code: str, final: bool) -> None:
    error = told(url, answer)
    assert error.code in code.split() and error.final is final


def test_an_unknown_name_and_a_defect_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> Callable[..., None]:
        def fail(*_: object, **__: object) -> None:
            raise error

        return fail

    monkeypatch.setattr(socket, "getaddrinfo", fails(socket.gaierror(socket.EAI_NONAME, "unknown")))
    unknown = told("ws://nowhere:8765")
    assert (unknown.code, unknown.final) == ("unknown_host", False) and "ws://nowhere:8765" in str(unknown)
    monkeypatch.setattr("moa_runtime.transport.connect", fails(LookupError("broken")))
    defect = told("ws://127.0.0.1:9")
    assert (defect.code, defect.final) == ("defect", True)
    assert "LookupError('broken')" in str(defect) and isinstance(defect.__cause__, LookupError)


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
        assert found.code == "proxy_failed" and "wss://verifier.example" in str(found)
        for here in ("ws://127.0.0.1:9", "ws://localhost:9", "ws://[::1]:9"):
            assert (await asyncio.to_thread(told, here)).code == "unreachable"
        proxy.close()
        await proxy.wait_closed()
        assert (await asyncio.to_thread(told, "ws://verifier.example:8765")).code == "proxy_failed"
        environment(no_proxy="verifier.example")
        assert Endpoint("ws://verifier.example:8765").proxy is None

    asyncio.run(run())


def test_a_silent_proxy_is_named_too() -> None:
    """It may be at fault as well as the verifier."""
    late, plain = (
        connect_error("ws://verifier.example/v1/session", TimeoutError(), 5.0, proxied=proxied)
        for proxied in (True, False)
    )
    assert late.code == plain.code == "timeout" and not late.final
    assert "no_proxy" in str(late) and "no_proxy" not in str(plain) and "5 s" in str(late)


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
def test_a_malformed_proxy_is_named_without_password(name: str, value: str, environment: Callable[..., None]) -> None:
    environment(**{name: value})
    error = told("ws://verifier.example:8765")
    assert (error.code, error.final) == ("bad_proxy", True) and "cret" not in str(error)
    assert told("ws://127.0.0.1:9").code == "unreachable"


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY", "SOCKS_PROXY"])
def test_a_socks_proxy_names_the_package_that_it_needs(name, environment, monkeypatch):
    async def missing(*_: object, **__: object) -> None:
        raise ImportError("connecting through a SOCKS proxy requires python-socks")

    monkeypatch.setattr("websockets.asyncio.client.connect_socks_proxy", missing)  # what it is without the package
    environment(**{name: "socks5://user:secret@proxy.example:1080"})
    error = told("wss://verifier.example:8765")
    assert (error.code, error.final) == ("missing_package", True)
    assert "python-socks[asyncio]" in str(error) and "secret" not in str(error)


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

    error = asyncio.run(run())
    assert error.code == "http_status" and "ws://verifier.example:8765/v1/session" in str(error)
    assert asked == [b"\x05\x01\x00\x03\x10verifier.example" + (8765).to_bytes(2, "big")]


def test_a_certificate_that_is_not_trusted_comes_with_the_place_of_its_authority() -> None:
    error = ssl.SSLCertVerificationError("bad")
    error.verify_message = "self-signed"
    said = tls_error("wss://verifier.example:8765/v1/session", error)
    assert said is not None and said.code == "untrusted_certificate" and said.final
    assert all(each in str(said) for each in ("self-signed", "--tls-ca", "https://verifier.example:8765/ca.crt"))
