"""The page when the network goes away, and when its process does."""

from __future__ import annotations

import pytest

from moa_bench.link.proxy import BackgroundLink
from support.page.browsing import QUESTION, Person, Site

#: Tokens of an answer, and of one that is far from its end when the link is cut, however late that happens.
COUNT, LONG = 90, 150
_WRITTEN_ON = """
new Promise((resolve) => {
  const words = () => [...document.querySelectorAll(".assistant .offline.tentative")].map((each) => each.textContent);
  const look = () => (words().join("").length > 40 ? resolve() : setTimeout(look, 50));
  look();
})
"""


def test_the_link_is_cut_in_the_middle_of_an_answer(site: Site, link: BackgroundLink, person: Person) -> None:
    page = person.open_with_model(site.url(port=link.port))
    page.set_up(LONG, "device")
    page.ask()
    page.wait(".assistant .origin:not(.tentative)")
    link.cut()
    page.tell("offline")
    page.wait(".assistant .offline.tentative")
    page.do("evaluate", _WRITTEN_ON)  # more than the server can have had in flight
    link.restore()
    page.tell("online")
    page.shows(QUESTION, site.target_writes(QUESTION, LONG))
    page.link("online")
    if page.count(".assistant .origin.offline"):  # words of this device that the server confirmed: not in each run
        page.wait(".remarks", "partly written")


def test_what_was_written_offline_is_checked_and_can_be_had_back(site: Site, person: Person) -> None:
    page = person.open_with_model(site.url())
    page.set_up(COUNT)
    page.do("click", "#offline")
    page.link("working offline")
    page.ask()
    page.wait(".remarks", "confirmed yet")
    alone = page.messages
    assert alone[1]
    page.do("click", "#offline")
    page.wait("#notice-text", "device wrote")
    assert page.messages == [QUESTION, site.target_writes(QUESTION, COUNT)] != alone  # the tiny writer is rounded
    assert not page.count(".remarks:has-text('not confirmed yet')")
    page.do("click", "#notice-actions >> text=Undo")
    page.wait(".remarks", "as this")
    assert page.messages == alone


def test_at_the_limit_of_what_is_written_alone_another_question_can_be_asked(site: Site, person: Person) -> None:
    page = person.open_with_model(site.url())
    page.set_up(400)
    page.do("click", "#offline")
    page.ask()
    page.wait(".waiting", "Offline limit")
    page.ask("And why?")
    page.wait(".remarks", "confirmed yet")
    assert page.messages[2] == "And why?"


def test_a_second_start_asks_for_nothing_and_works_without_a_network(site: Site, person: Person) -> None:
    page = person.open_with_model(site.url())
    page.set_up(COUNT)
    page.do("evaluate", "navigator.serviceWorker.ready.then(() => undefined)")
    page.do("close")
    person.requests()

    page = person.open(site.url(token=""))
    page.hidden_text("#device-words", "The model is here")
    page.link("online")
    assert not [url for url in person.requests() if "/bundle/" in url]
    page.do("close")

    person.offline(True)
    page = person.open(site.url(token=""))
    page.link("reconnecting in")
    page.ask()
    page.wait(".remarks", "confirmed yet")
    assert page.messages[1]
    person.offline(False)
    page.tell("online")
    page.shows(QUESTION, site.target_writes(QUESTION, COUNT))


@pytest.mark.parametrize("end", ["reload", "kill"])
def test_an_answer_under_way_outlives_its_page(site: Site, link: BackgroundLink, person: Person, end: str) -> None:
    page = person.open(site.url(port=link.port))
    page.link("online")
    page.set_up(COUNT, "device")
    page.ask()
    page.wait(".assistant .origin:not(.tentative)")
    page.do(end)
    if end == "kill":
        page = person.open(site.url(port=link.port, token=""))
    page.wait(".assistant .origin")  # the chat continues without being opened
    page.shows(QUESTION, site.target_writes(QUESTION, COUNT))


def test_a_download_is_cancelled_and_goes_on(site: Site, link: BackgroundLink, person: Person) -> None:
    page = person.open(site.url(port=link.port))
    page.wait("#banner-actions button", "Download")
    link.cut()
    page.do("click", "#banner-actions button:has-text('Download')")
    page.wait("#banner-text", "Downloading the model: 0.0 MB of")
    page.do("click", "#banner-actions >> text=Cancel")
    page.wait("#banner-text", "the download continues from there")
    link.restore()
    page.do("click", "#banner-actions >> text=Go on")
    page.hidden_text("#device-words", "The model is here")
