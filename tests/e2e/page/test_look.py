"""Whether everybody can use the page: small screens, large letters, screen readers, colours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.contrast import contrast
from support.page.browsing import QUESTION, Chromium, Page, Person, Site

#: WCAG 2.2, level AA: of text, and of what shows where a control is.
TEXT, CONTROL = 4.5, 3.0

_TOO_WIDE = """
[...document.querySelectorAll("body *")].filter((element) => {
  const { left, right, width } = element.getBoundingClientRect();
  const seen = element.checkVisibility() && width > 1;
  return seen && (right > innerWidth + 1 || left < -1) && !element.closest(".hidden, .skip");
}).map((element) => element.outerHTML.slice(0, 80))
"""
_SMALL = """
[...document.querySelectorAll("button, input, select, textarea")].filter((element) => {
  const target = element.closest("label") ?? element;
  const { width, height } = target.getBoundingClientRect();
  return element.checkVisibility() && (width < 44 || height < 43.9);
}).map((element) => element.outerHTML.slice(0, 80))
"""
_NAMELESS = """
[...document.querySelectorAll("button, input, select, textarea, dialog, main, [role=note]")].filter((element) => {
  const labelled = (element.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id));
  const labels = [...(element.labels ?? []), ...labelled].map((label) => label?.textContent ?? "").join("");
  const own = element.tagName === "BUTTON" ? element.textContent : "";
  return (element.getAttribute("aria-label") ?? (labels + own)).trim() === "";
}).map((element) => element.outerHTML.slice(0, 80))
"""
_COLOURS = """
Object.fromEntries(["window", "surface", "bubble", "hover", "text", "muted", "accent", "on-accent", "tentative",
  "drafted", "corrected", "offline", "kept", "dropped", "good", "warning"].map((name) =>
  [name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim()]))
"""


@pytest.fixture(scope="module")
def page(site: Site, chromium: Chromium) -> Iterator[Page]:
    """With an answer."""
    with chromium.person() as person:
        page = person.open(site.url())
        page.link("online")
        page.set_up(24)
        page.ask(QUESTION + " Explain whatintheworldisaverylongwordwithoutanyspaceswhichhasnoroominanarrowline.")
        page.answered()
        yield page


def sheets(page: Page) -> Iterator[str]:
    """The conversation, and one sheet after the other over it."""
    yield ""
    for button in ("#show-chats", "#show-settings"):
        page.do("click", button)
        page.wait("dialog[open]")
        yield button
        page.do("press", "Escape")
        page.gone("dialog[open]")


@pytest.mark.parametrize(("width", "height"), [(320, 568), (195, 422), (390, 844), (844, 390)])
def test_nothing_is_wider_than_the_screen(page: Page, width: int, height: int) -> None:
    """195 px is 390 at twice the size of letters."""
    page.do("resize", width, height)
    for _ in sheets(page):
        assert page.do("evaluate", "document.documentElement.scrollWidth <= innerWidth")
        assert page.do("evaluate", _TOO_WIDE) == []
    assert page.do("evaluate", "document.querySelector('#question').getBoundingClientRect().bottom <= innerHeight")
    page.do("resize", 390, 844)


def test_a_finger_hits_every_control(page: Page) -> None:
    for _ in sheets(page):
        assert page.do("evaluate", _SMALL) == []


def test_everything_has_a_name_for_screen_readers(page: Page) -> None:
    assert page.do("evaluate", _NAMELESS) == []
    assert page.do("evaluate", "document.documentElement.lang") == "en"
    assert page.do("evaluate", "document.querySelectorAll('h1').length") == 1
    tree = page.do("aria")
    for part in ('button "Chats"', 'button "Send"', 'switch "Work offline"', 'textbox "Your question"', "status"):
        assert part in tree, tree


def test_what_is_written_is_heard_once_it_is_whole(page: Page) -> None:
    live = "[aria-live], [role=status], [role=log], [role=alert]"
    ids = page.do("evaluate", f"[...document.querySelectorAll('{live}')].map((element) => element.id)")
    assert sorted(ids) == ["link-status", "notice", "spoken"]  # not the messages, which grow token by token


def test_keys_lead_through_the_page_and_back(page: Page) -> None:
    page.do("evaluate", "document.querySelector('#show-settings').focus()")
    page.do("press", "Enter")
    page.wait("dialog[open]")
    assert page.do("evaluate", "document.activeElement.closest('dialog')?.id") == "settings"
    page.do("press", "Escape")
    page.gone("dialog[open]")
    assert page.do("evaluate", "document.activeElement.id") == "show-settings"
    page.do("evaluate", "document.querySelector('.skip').focus()")
    reached = []
    for _ in range(4):
        page.do("press", "Tab")
        reached.append(page.do("evaluate", "document.activeElement.id"))
    assert reached == ["show-chats", "new-chat", "show-settings", "offline"]


def test_origins_differ_without_their_colours(page: Page) -> None:
    looks = """
    [...document.querySelectorAll("#legend > *")].map((one) => {
      const { fontStyle, textDecorationLine, textDecorationStyle } = getComputedStyle(one);
      return [fontStyle, textDecorationLine, textDecorationStyle].join(" ");
    })
    """
    seen = page.do("evaluate", looks)
    assert len(seen) == len(set(seen)) == 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(site: Site, chromium: Chromium, scheme: str) -> None:
    with chromium.person(colorScheme=scheme) as person:
        colours = person.open(site.url()).do("evaluate", _COLOURS)
    origins = ("drafted", "corrected", "offline", "kept", "tentative", "dropped")
    grounds = ("window", "surface")
    pairs = [(text, ground) for text in ("text", "muted", "accent", *origins) for ground in grounds]
    pairs += [("text", "bubble"), ("text", "hover"), ("muted", "hover"), ("on-accent", "accent")]
    low = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < TEXT} == {}
    shapes = {name: contrast(colours[name], colours["window"]) for name in ("good", "warning", "muted", "offline")}
    assert {name: ratio for name, ratio in shapes.items() if ratio < CONTROL} == {}


def test_who_wants_little_motion_gets_none(site: Site, chromium: Chromium) -> None:
    moved = "getComputedStyle(document.querySelector('#offline'), '::before').transitionDuration"
    with chromium.person(reducedMotion="reduce") as person, chromium.person() as other:
        assert person.open(site.url()).do("evaluate", moved) == "0s" != other.open(site.url()).do("evaluate", moved)


def test_it_can_be_installed(site: Site, person: Person) -> None:
    """What browsers ask of an app: a manifest with names, a start within its scope, and icons of these sizes."""
    page = person.open(site.url())
    manifest = page.do("evaluate", "fetch('manifest.webmanifest').then((answer) => answer.json())")
    assert manifest["display"] == "standalone" and manifest["name"] and manifest["start_url"] == "./"
    for icon in manifest["icons"]:
        measured = page.do(
            "evaluate",
            f"fetch({icon['src']!r}).then((answer) => answer.ok && answer.headers.get('content-type'))",
        )
        assert measured == icon["type"], icon
    assert {icon["sizes"] for icon in manifest["icons"]} >= {"192x192", "512x512"}
    assert any(icon.get("purpose") == "maskable" for icon in manifest["icons"])
    assert page.do("evaluate", "navigator.serviceWorker.ready.then((ready) => ready.scope)") == site.url(token="")
