"""Draws the pictures of docs/page.md: ``PYTHONPATH=tests python tools/page_screenshots.py docs/screenshots``.

The page answers real questions, from a ``moa-serve --web`` of the default target that is started for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from support.chromium import BROWSERS
from support.page.browsing import SERVE, Chromium, Page, Person

_TOKEN = "pictures"
_SCALE = 1.5
_SCHEMES = ("light", "dark")
_SETTLING_MS = 400
_LONGEST = 120  # tokens
_QUESTION = "Name three primary colours."
_OFFLINE_QUESTIONS = (
    "Tell me a short story about a fox.",
    "Tell me about the moon.",
    "Write a letter to a friend.",
    "What makes a good friend?",
)
_CHARACTERS_OFFLINE = """
[...document.querySelectorAll(".assistant .offline.tentative")].reduce((sum, one) => sum + one.textContent.length, 0)
"""
#: Resolves when an answer has confirmed text.
_CONFIRMED = """
(async () => {
  const begun = () => {
    const answer = document.querySelector(".assistant .text");
    const tentative = [...(answer?.querySelectorAll(".tentative") ?? [])];
    return (answer?.textContent.length ?? 0) > tentative.reduce((sum, one) => sum + one.textContent.length, 0);
  };
  while (!begun()) await new Promise((resolve) => setTimeout(resolve, 20));
})()
"""
_WRITTEN_OFFLINE = 160  # characters, in the picture of a tunnel


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the page for the documentation.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", choices=_SCHEMES, nargs="*", default=_SCHEMES)
    parser.add_argument("--bundle", help="folder with a graph for browsers (default: the one that moa-serve makes)")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with _serving(options.bundle) as url, contextlib.closing(Chromium(_browser())) as chromium:
        for scheme in options.scheme:
            person = chromium.person(origins=False, colorScheme=scheme, deviceScaleFactor=_SCALE)
            _draw(person, url, lambda name, scheme=scheme: str(options.out.resolve() / f"web-{name}-{scheme}.png"))
    return 0


def _draw(person: Person, url: str, path: Callable[[str], str]) -> None:
    page = person.open(url)
    page.wait("#banner-actions button", "Download")
    _take(page, path("first"))
    page.do("click", "#banner-actions button:has-text('Download')")
    page.wait("#banner-text", "MB")
    page.do("screenshot", path("fetching"))
    page.hidden_text("#device-words", "The model is here")
    _set_up(page)
    _take(page, path("empty"))
    page.ask(_QUESTION)
    page.answered()
    _take(page, path("chat"))

    for question in _OFFLINE_QUESTIONS:
        if _draw_tunnel(page, question, path):
            break

    page.do("click", "#show-chats")
    _take(page, path("chats"))
    page.do("click", "#chats .close")
    page.do("click", "#show-settings")
    _take(page, path("settings"))
    page.do("close")


def _draw_tunnel(page: Page, question: str, path: Callable[[str], str]) -> bool:
    """The middle of an answer without a network, and its return; whether the verifier corrected anything."""
    page.do("click", "#new-chat")
    page.ask(question)
    page.do("evaluate", _CONFIRMED)
    page.do("click", "#offline")
    while page.do("evaluate", _CHARACTERS_OFFLINE) < _WRITTEN_OFFLINE:
        page.do("evaluate", "new Promise((resolve) => setTimeout(resolve, 50))")
    _take(page, path("offline"))
    page.do("click", "#offline")
    page.gone("#messages .tentative")
    page.answered()
    page.do("evaluate", "document.querySelector('#scroll').scrollTop = 0")
    _take(page, path("return"))
    return "corrected" in "".join(page.do("texts", "#notice-text"))


def _set_up(page: Page) -> None:
    """Greedy answers, the same each time, and this device's drafts to be seen."""
    page.do("click", "#show-settings")
    page.do("fill", "#most", str(_LONGEST))
    page.do("click", "#recommended")
    page.do("fill", "#temperature", "0")
    page.do("click", "[name=forNew]")
    page.do("select", "#drafting", "device")
    page.do("click", "#settings-form button[type=submit]")
    page.link("online")


def _take(page: Page, path: str) -> None:
    page.do("evaluate", f"new Promise((resolve) => setTimeout(resolve, {_SETTLING_MS}))")
    page.do("screenshot", path)


def _browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"none of {', '.join(BROWSERS)} is installed"
    return found


@contextlib.contextmanager
def _serving(bundle: str | None) -> Iterator[str]:
    """The address of the page, with its token."""
    command = [*SERVE, "--web", "--json", "--port", "0"]
    command += ["--bundle", bundle] if bundle else []
    environment = {**os.environ, "MOA_TOKEN": _TOKEN}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            port = json.loads(process.stdout.readline())["port"]
            yield f"http://127.0.0.1:{port}/#token={_TOKEN}"
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
