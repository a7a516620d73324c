"""Every front end reports a proxy that cannot be used, and none waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from moa_chat.chat_config import ChatConfig
from moa_chat.cli import main
from moa_chat.gateway.app import Access, create_app
from moa_chat.gateway.serve import _pools
from moa_runtime.bundle import Bundle
from moa_runtime.errors import ChatError
from moa_runtime.sync import SyncChat
from moa_runtime.transport import ConnectError, Endpoint
from support.chat.pooled_chat import DEFAULTS, USER

SERVER = "ws://verifier.example:8765"


@pytest.fixture(params=["socks5://proxy.example:1080", "garbage"])
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A word of the sentence about the proxy in the environment."""

    async def missing(*_: object, **__: object) -> None:
        raise ImportError("connecting through a SOCKS proxy requires python-socks")

    monkeypatch.setattr("websockets.asyncio.client.connect_socks_proxy", missing)  # as without the package
    monkeypatch.setenv("HTTPS_PROXY", request.param)
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path))
    return "valid address" if request.param == "garbage" else "python-socks"


@pytest.mark.parametrize("form", [("--once", "hello"), ("--once", "hello", "--json"), ("--terminal",)])
def test_a_command_line_ends_with_a_sentence(form, named, onnx_bundle: Path, capsys):
    assert main([*form, "--server", SERVER, "--bundle", str(onnx_bundle)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-chat: error: ") and named in err and err.count("\n") == 1


@pytest.mark.parametrize("offline", ["off", "writer"])
def test_the_gateway_answers_with_an_error(offline, named, onnx_bundle: Path):
    config = ChatConfig(Bundle.open(onnx_bundle), Endpoint(SERVER), offline=offline)
    with TestClient(create_app(*_pools(config), DEFAULTS, Access("", loopback=False), lambda line: None)) as http:
        for stream in (False, True):
            body = {"messages": [USER], "stream": stream, "offline": offline}
            answered = http.post("/v1/chat/completions", json=body)
            assert answered.status_code == 502 and named in answered.json()["error"]["message"]


def test_the_library_raises_in_a_program_without_asyncio(named, onnx_bundle: Path):
    bundle = Bundle.open(onnx_bundle)
    with pytest.raises(ConnectError, match=named):
        SyncChat(bundle, Endpoint(SERVER))
    with SyncChat(bundle, Endpoint(SERVER), wait=False) as chat, pytest.raises(ChatError, match=named):
        list(chat.send("hello"))
