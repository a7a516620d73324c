"""A Chromium that tests drive, through Playwright in Node, and the verifier that serves its page."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from moa_runtime.bundle import Bundle
from moa_runtime.cli_main import own_program
from moa_runtime.tokenizer import ChatTokenizer

_HERE = Path(__file__).parent
PACKAGE = _HERE.parents[2] / "apps/web/package.json"
PLAYWRIGHT = PACKAGE.parent / "node_modules/playwright-core"
_PATIENCE_S, _LOOK_S = 60.0, 0.1
QUESTION = "Name three primary colours."
#: ``moa-serve``, wherever its program is.
SERVE = own_program("moa_server.cli")
TOKEN = "secret+of the tiny/target"
TIMEOUT_S = 60


class Chromium:
    """The program. One call after the other.

    Args:
        command: the browser's.
    """

    def __init__(self, command: str) -> None:
        self._node = subprocess.Popen(
            ["node", str(_HERE / "driver.mjs"), str(PACKAGE), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._names = (f"n{number}" for number in itertools.count())

    def do(self, command: str, *args: object) -> Any:
        """Raises AssertionError with what went wrong, such as an element that never came."""
        assert self._node.stdin and self._node.stdout
        self._node.stdin.write(json.dumps({"do": command, "args": args}) + "\n")
        self._node.stdin.flush()
        line = self._node.stdout.readline()
        assert line, "the browser's driver has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def person(self, *, origins: bool = True, **options: Any) -> Person:
        """A new one, whose browser has kept nothing yet; ``options`` are those of Playwright's contexts.

        With ``origins`` answers are shown as they were written, else as Markdown, which is the page's default.
        """
        name = next(self._names)
        self.do("context", name, {"origins": True} if origins else {}, options)
        return Person(self, name, lambda: next(self._names))

    def close(self) -> None:
        assert self._node.stdin
        self._node.stdin.close()
        self._node.wait(30)


class Person:
    """A browser with storage of its own. Leave it: an open page takes time from others."""

    def __init__(self, chromium: Chromium, name: str, new_name: Callable[[], str]) -> None:
        self._chromium, self._name, self._new_name = chromium, name, new_name

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def open(self, url: str) -> Page:
        """A new tab."""
        name = self._new_name()
        self._chromium.do("open", name, self._name)
        page = Page(self._chromium, name)
        page.do("goto", url)
        return page

    def open_with_model(self, url: str) -> Page:
        """The page, once its device has downloaded and loaded what drafts and writes."""
        page = self.open(url)
        page.wait("#banner-actions button", "Download")
        page.do("click", "#banner-actions button:has-text('Download')")
        page.hidden_text("#device-words", "The model is here")
        return page

    def online(self, url: str, most: int | None = None) -> Page:
        """The page, once it is connected; answers have at most ``most`` tokens, or the default number."""
        page = self.open(url)
        page.link("online")
        if most is not None:
            page.set_up(most)
        return page

    def requests(self) -> list[str]:
        """URLs that were asked for since the last call, by pages, workers and service workers."""
        found: list[str] = self._chromium.do("requests", self._name)
        return found

    def leave(self) -> None:
        """Close all tabs, with their workers."""
        self._chromium.do("leave", self._name)

    def offline(self, offline: bool) -> None:
        """Take the network away, or give it back."""
        self._chromium.do("offline", self._name, offline)


class Page:
    """A tab: a phone's screen of 390 by 844."""

    def __init__(self, chromium: Chromium, name: str) -> None:
        self._chromium, self._name = chromium, name

    def do(self, command: str, *args: object) -> Any:
        """One of the driver's commands, see ``driver.mjs``."""
        return self._chromium.do(command, self._name, *args)

    def wait(self, selector: str, text: str | None = None) -> None:
        """Until an element is seen that has this text in it."""
        self.do("wait", selector, *([] if text is None else [text]))

    def gone(self, selector: str) -> None:
        """Until no such element is seen."""
        self.do("gone", selector)

    def hidden_text(self, selector: str, text: str) -> None:
        """Until an element, seen or not, has this text in it."""
        self.do("wait_hidden", selector, text)

    def reason(self, thinking: str) -> None:
        """Switch reasoning of the open chat: "model", "on" or "off"."""
        self.do("click", "#show-settings")
        self.do("select", "#thinking", thinking)
        self.do("click", "#settings-form button[type=submit]")
        self.wait("#send:enabled")

    def set_up(self, most: int, drafting: str = "auto", *, origins: bool = False) -> None:
        """Limit answers to ``most`` tokens, here and in new chats; ``origins`` ticks that box."""
        self.do("click", "#show-settings")
        self.do("fill", "#most", str(most))
        self.do("click", "[name=forNew]")
        self.do("select", "#drafting", drafting)
        if origins:
            self.do("click", "[name=origins]")
        self.do("click", "#settings-form button[type=submit]")
        self.wait("#send:enabled")

    def tell(self, event: str) -> None:
        """What a system tells a browser when it has lost the network ("offline"), or has one again ("online")."""
        self.do("evaluate", f"dispatchEvent(new Event({event!r}))")

    def uncaught(self) -> list[str]:
        """Errors that nothing caught since the last call."""
        return [line for line in self.do("said") if line.startswith("uncaught")]

    def ask(self, question: str = QUESTION) -> None:
        self.wait("#send:enabled")
        self.do("fill", "#question", question)
        self.do("click", "#send")

    def answer(self, question: str = QUESTION) -> None:
        """Ask, and wait for the whole answer."""
        self.ask(question)
        self.answered()

    def answered(self) -> None:
        """Until nothing is being written any more of what was just asked for."""
        self.do("evaluate", _DRAWN)
        self.wait("#send")

    def link(self, words: str) -> None:
        """Until the link is so."""
        self.wait("#link-words", words)

    @property
    def messages(self) -> list[str]:
        """Texts of the open chat, of questions and answers in turn, as they are seen: without what was taken back."""
        found: list[str] = self.do("evaluate", _MESSAGES)
        return found

    def shows(self, *messages: str) -> None:
        """Until the open chat has these messages, and all of it is confirmed."""
        end = time.monotonic() + _PATIENCE_S
        while (seen := self.messages) != list(messages) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        assert seen == list(messages)
        self.gone("#messages .tentative")
        self.gone(".remarks:has-text('not confirmed yet')")

    def count(self, selector: str) -> int:
        return len(self.do("texts", selector))


_DRAWN = "new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => resolve())))"
_MESSAGES = """
[...document.querySelectorAll("#messages .text")].map((text) => {
  const copy = text.cloneNode(true);
  for (const other of copy.querySelectorAll(".hidden, del")) other.remove();
  return copy.textContent;
})
"""


@dataclass
class Site:
    """A running verifier with its page, on all addresses of this machine."""

    port: int
    bundle: Bundle

    def url(self, host: str = "127.0.0.1", *, port: int | None = None, token: str = TOKEN) -> str:
        """The page's address, with a token as a QR code has it; ``port`` is that of a link in front."""
        fragment = f"#token={quote(token, safe='')}" if token else ""
        return f"http://{host}:{port or self.port}/{fragment}"

    def target_writes(self, question: str, count: int) -> str:
        """What the target alone answers to the first question of a chat, greedily."""
        tokenizer = ChatTokenizer.from_bundle(self.bundle)
        messages = [{"role": "user", "content": question}]
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/v1/decode",
            json={"tokens": tokenizer.encode_chat(messages), "max_new_tokens": count},
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=TIMEOUT_S,
        )
        return tokenizer.decode(answer.json()["tokens"])
