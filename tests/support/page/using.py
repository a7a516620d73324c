"""What a person does with the page, in a few calls."""

from __future__ import annotations

from support.page.browsing import Page, Person

QUESTION = "Name three primary colours."


def open_with_model(person: Person, url: str) -> Page:
    """The page, once its device has downloaded and loaded what drafts and writes."""
    page = person.open(url)
    page.wait("#banner-actions button", "Download")
    page.do("click", "#banner-actions button:has-text('Download')")
    page.hidden_text("#device-words", "The model is here")
    return page


def set_up(page: Page, *, most: int, drafting: str = "auto") -> None:
    """Have answers of at most so many tokens, here and in new chats."""
    page.do("click", "#show-settings")
    page.do("fill", "#most", str(most))
    page.do("click", "[name=forNew]")
    page.do("select", "#drafting", drafting)
    page.do("click", "#settings-form button[type=submit]")
    page.wait("#send:enabled")


def lose_network(page: Page) -> None:
    """What a system tells a browser when it has lost the network."""
    page.do("evaluate", "dispatchEvent(new Event('offline'))")


def find_network(page: Page) -> None:
    """What it tells it when there is one again."""
    page.do("evaluate", "dispatchEvent(new Event('online'))")
