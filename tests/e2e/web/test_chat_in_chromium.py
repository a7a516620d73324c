"""A chat in a real browser: its WebSocket and its store, what it hears of the page, and why it cannot connect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moa_runtime.session.events import Sampling
from support.chromium import BrowserPage
from support.server.running import Verifier, serving
from support.system.asking import QUESTION
from support.web.typescript import target_writes

LENGTH, SEED = 120, 7


@pytest.fixture
def page(browser: str, compiled: Path, onnx_bundle: Path) -> Iterator[BrowserPage]:
    folders = {
        "/": Path(__file__).with_name("page"),
        "/dist/": compiled / "dist",
        "/node_modules/": compiled / "node_modules",
        "/bundle/": onnx_bundle,
    }
    with BrowserPage(browser, "/index.html#chat.mjs", folders) as page:
        yield page


@pytest.fixture
def open_verifier(engine) -> Iterator[Verifier]:
    """One that lets web pages in."""
    from moa_server.settings import Settings

    with serving(engine, Settings(token="secret", origins=("*",))) as running:
        yield running


def talk(port: int, token: str = "secret") -> dict[str, object]:
    url = f"ws://127.0.0.1:{port}"
    return {"do": "talk", "url": url, "token": token, "question": QUESTION, "length": LENGTH, "seed": SEED}


def test_a_tab_that_is_reloaded_goes_on_with_its_answer(page, open_verifier, onnx_bundle):
    own = target_writes(onnx_bundle, open_verifier, LENGTH, Sampling(0.8, 0.9, SEED))
    todo = talk(open_verifier.port)
    assert page.ask(todo | {"leaveAt": 4}) == {"pending": False}
    page.tell({"reload": True})
    said = page.ask(todo)
    assert said.get("pending") and said["first"] >= 4, said
    assert [turn["content"] for turn in said["messages"]] == [QUESTION, own]


def test_why_a_page_cannot_connect(page, open_verifier, verifier, unused_port):
    allowed = f"--allow-origin http://127.0.0.1:{page.port}"
    refusing = ((unused_port, "secret", "no verifier"), (open_verifier.port, "wrong", "the token"))
    for port, token, names in (*refusing, (verifier.port, "secret", allowed)):
        said = page.ask(talk(port, token))
        assert said["failed"].startswith("ConnectError: ") and names in said["failed"]
        assert f"ws://127.0.0.1:{port}/v1/session" in said["failed"]


def test_a_chat_is_kept_in_the_browser_and_open_once(page: BrowserPage) -> None:
    assert page.ask({"do": "write", "content": {"a": [1, "\u00e9"]}}) == {}
    said = page.ask({"do": "openAgain"})
    assert said == {"failed": "StoreError: the chat b is open in another tab: close it there, or begin another chat"}
    page.tell({"reload": True})  # with the store open
    assert page.ask({"do": "write", "content": {"a": 2}}) == {"before": {"a": [1, "\u00e9"]}}
    assert page.ask({"do": "setAside"}) == {"moved": {"a": 2}}


def test_a_chat_is_told_what_its_page_hears(page: BrowserPage) -> None:
    said = page.ask({"do": "hints"})
    usual = {"background": False, "lowPower": False, "metered": False}
    assert said["begun"] == usual
    assert said["network"] == ["networkChanged"]  # two events of one change
    assert said["hidden"] == [usual, "save"]  # on a desktop nothing is in the background
    assert said["left"] == ["save", "save"] and said["stopped"] == []
