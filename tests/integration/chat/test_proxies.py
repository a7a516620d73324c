"""A proxy that cannot be used is told by every front end, none of which waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("onnxscript")

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
def said(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is told of the proxy in the environment."""

    async def missing(*_: object, **__: object) -> None:
        raise ImportError("connecting through a SOCKS proxy requires python-socks")

    monkeypatch.setattr("websockets.asyncio.client.connect_socks_proxy", missing)  # what it is without the package
    monkeypatch.setenv("HTTPS_PROXY", request.param)
    monkeypatch.setenv("NO_PROXY", "")
    return "no valid address" if request.param == "garbage" else "needs python-socks"


@pytest.mark.parametrize("form", [("--once", "hello"), ("--once", "hello", "--json"), ("--terminal",)])
def test_a_command_line_ends_with_a_sentence(form, said, onnx_bundle: Path, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path))
    assert main([*form, "--server", SERVER, "--bundle", str(onnx_bundle), "--datastore", "off"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("moa-chat: error: the proxy that the environment names ") and said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("offline", ["off", "writer"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway_answers_with_an_error(offline, stream, said, onnx_bundle: Path, tmp_path, monkeypatch):
    monkeypatch.setenv("MOA_EDGE_PROFILE", str(tmp_path))
    config = ChatConfig(Bundle.open(onnx_bundle), Endpoint(SERVER), offline=offline)
    lines: list[str] = []
    app = create_app(*_pools(config), DEFAULTS, Access("", (), None), lines.append)
    with TestClient(app) as http:
        for _ in range(2):
            body = {"messages": [USER], "stream": stream, "offline": offline}
            answered = http.post("/v1/chat/completions", json=body)
            assert answered.status_code == 502 and said in answered.json()["error"]["message"]


def test_the_library_raises_in_a_program_without_asyncio(said, onnx_bundle: Path):
    bundle = Bundle.open(onnx_bundle)
    with pytest.raises(ConnectError, match=said):
        SyncChat(bundle, Endpoint(SERVER))
    with SyncChat(bundle, Endpoint(SERVER), wait=False) as chat, pytest.raises(ChatError, match=said):
        list(chat.send("hello"))
