"""The page with a network, against a real verifier."""

from __future__ import annotations

import json

from support.page.browsing import QUESTION, TOKEN, Chromium, Person, Site

COUNT = 24


def test_a_chat_with_the_token_of_the_address(site: Site, person: Person) -> None:
    page = person.online(site.url())
    assert page.do("evaluate", "location.href") == site.url(token="")
    page.set_up(COUNT)
    page.wait("#model", "127.0.0.1")
    page.do("click", "#examples >> text=train")
    assert "train" in page.do("evaluate", "document.querySelector('#question').value")
    page.answer()
    assert page.messages == [QUESTION, site.target_writes(QUESTION, COUNT)]
    assert "Answer: " + page.messages[1] in page.do("texts", "#spoken")[0]  # whole, and once
    page.answer("And why?")
    assert page.messages[3]
    assert not any("secret" in url for url in person.requests())
    assert [line for line in page.do("said") if not line.startswith("log:")] == []  # no violation of the policy

    page.do("reload")
    page.link("online")
    assert len(page.messages) == 4  # the tab's chat is open again
    page.do("click", "#new-chat")
    assert page.count("#empty:visible") == 1
    page.do("click", "#show-chats")
    page.do("click", "#rows .open")
    page.wait("#messages .assistant")
    assert len(page.messages) == 4


def test_without_its_token_the_page_says_so_and_takes_one(site: Site, person: Person) -> None:
    page = person.open(site.url(token=""))
    page.wait("#banner-text", "asks for a token, and none is given")
    page.do("click", "#banner-actions button:has-text('Settings')")
    page.do("fill", "#token", TOKEN + "s")
    page.do("click", "#settings-form button[type=submit]")
    page.wait("#banner-text", "refused")
    page.do("click", "#banner-actions button:has-text('Settings')")
    page.do("fill", "#token", TOKEN)
    page.do("click", "#settings-form button[type=submit]")
    page.link("online")
    page.gone("#banner-text:has-text('refused')")


def test_stop_continue_again_and_edit(site: Site, person: Person) -> None:
    page = person.online(site.url(), 8)
    page.answer()
    page.wait(".remarks", "length limit")
    page.do("click", "text=Continue")
    page.answered()
    assert page.messages[1] == site.target_writes(QUESTION, 16)
    page.do("click", "text=Again")
    page.answered()
    assert page.messages == [QUESTION, site.target_writes(QUESTION, 8)]
    page.do("click", "text=Edit")
    page.do("fill", "#question", "Name two.")
    page.do("click", "#send")
    page.answered()
    assert page.messages == ["Name two.", site.target_writes("Name two.", 8)]
    page.do("click", "text=Figures")
    page.wait(".figures li", "sent")
    page.do("click", "text=Edit")
    page.do("click", "#new-chat")  # the question stays as it was
    page.wait("#empty")
    assert page.do("evaluate", "document.querySelector('#question').value") == ""


def test_reasoning_is_folded_and_switched_off(reasoning_site: Site, person: Person) -> None:
    page = person.online(reasoning_site.url(), 8)
    page.answer()
    page.wait(".reasoning summary", "Reasoning")
    assert page.count(".reasoning[open]") == 0 and page.messages[1].startswith("Reasoning")
    assert page.do("texts", "#spoken")[0].startswith("Answer:  cut off")  # the answer has not begun
    page.do("click", ".reasoning summary")
    page.wait(".reasoning[open]")
    page.reason("off")
    page.answer("And why?")
    assert page.count(".reasoning") == 1 and page.messages[3]
    page.do("click", "#show-settings")
    page.hidden_text("#device-words", "drafter")


_MARKDOWN = """**Red** and `blue`:

1. one <img src="x.png"> &amp; ![two](y.png)
2. [bad](javascript:alert(1)), [good](https://example.org)

| a | b |
| - | - |
| 1 | ~~2~~ |
"""
#: Store a chat with one answer, of which the last 9 characters are not confirmed.
_STORE = """
([content]) => new Promise((resolve, reject) => {
  const request = indexedDB.open("moa-edge chats");
  request.onsuccess = () => {
    const at = content.length - 9;
    const part = (text, committed) => ({ text, origin: committed ? "corrected" : "offline", committed });
    const spans = [part(content.slice(0, at), true), part(content.slice(at), false)];
    const usual = { spans: [], dropped: [], finished: true, remarks: "", figures: [] };
    const common = { ...usual, cutOff: null, unconfirmed: null, target: "" };
    const messages = [{ ...common, role: "user", content: "*Why?*" }, { ...common, role: "assistant", content, spans }];
    const settings = { system: "", maxNewTokens: 8, recommended: true, temperature: 0, topP: 1 };
    const row = { id: "one", title: "One", updated: 1, unconfirmed: false, unfinished: false };
    const open = request.result.transaction(["summaries", "chats"], "readwrite");
    open.objectStore("summaries").put(row);
    open.objectStore("chats").put({ ...row, settings, messages });
    open.oncomplete = resolve;
    open.onabort = reject;
  };
})
"""


def test_an_answer_is_markdown_that_loads_nothing(site: Site, chromium: Chromium) -> None:
    with chromium.person(origins=False) as person:
        page = person.online(site.url())
        page.do("evaluate", f"({_STORE})([{json.dumps(_MARKDOWN)}])")
        person.requests()
        page.do("click", "#show-chats")
        page.do("click", "#rows .open")
        page.wait(".markdown table")
        found = [
            page.count(f".markdown {name}") for name in ("strong", "code", "ol > li", "td", "s", "img", "a[href^=http]")
        ]
        assert found == [1, 1, 2, 2, 1, 0, 1] and page.count(".markdown a[href^=javascript]") == 0
        assert page.do("texts", ".markdown .offline.tentative") == ["2"] and page.count(".user em") == 0
        assert not [url for url in person.requests() if url.endswith("png")]
        page.set_up(8, origins=True)
        page.gone(".markdown")
        assert page.messages == ["*Why?*", _MARKDOWN]


def test_a_full_storage_is_said_and_the_chat_goes_on(site: Site, person: Person) -> None:
    page = person.open(f"{site.url(token='')}icon.svg")
    page.do("quota", site.url(token=""), 1)  # before the first use: Chromium asks for it then
    page.do("goto", site.url())
    page.link("online")
    page.set_up(COUNT)
    page.answer()
    page.wait("#notice-text", "its storage is full")
    assert page.messages == [QUESTION, site.target_writes(QUESTION, COUNT)]
    page.answer("And why?")
    assert page.messages[3]


def test_the_list_of_chats(site: Site, person: Person) -> None:
    page = person.online(site.url(), 4)
    for question in ("One apple", "Two pears"):
        page.do("click", "#new-chat")
        page.answer(question)
    page.do("click", "#show-chats")
    page.wait("#rows .open")
    assert [title[:9] for title in page.do("texts", "#rows .open")] == ["Two pears", "One apple"]
    page.do("fill", "#search", "APPLE")
    page.gone("#rows .open:has-text('Two pears')")
    page.do("click", "[aria-label='Rename One apple']")
    page.do("fill", "[aria-label='New name of the chat']", "Fruit")
    page.do("press", "Enter")
    page.wait("#rows .open", "Fruit")
    page.do("click", "[aria-label='Delete Fruit']")
    page.wait("#notice-text", "was deleted")
    page.do("click", "#notice-actions >> text=Undo")
    page.wait("#title", "Fruit")
    assert page.messages[0] == "One apple"


_TAPPED_TWICE = """
const button = [...document.querySelectorAll("#{box} button")].find((each) => each.textContent === "{label}");
button.click();
button.click();
"""


def test_a_second_tab_says_that_there_is_another(site: Site, person: Person) -> None:
    first = person.open(site.url())
    first.link("online")
    second = person.open(site.url())
    second.wait("#banner-text", "another")
    first.do("close")
    second.do("evaluate", _TAPPED_TWICE.format(box="banner-actions", label="Try again"))
    second.link("online")
    second.gone("#banner-text:has-text('another')")


def test_a_model_that_is_deleted_by_two_taps(site: Site, person: Person) -> None:
    page = person.open_with_model(site.url())
    page.do("click", "#show-settings")
    page.do("evaluate", _TAPPED_TWICE.format(box="device-actions", label="Delete the model"))
    page.hidden_text("#device-words", "once it has a model of")
    page.do("press", "Escape")
    page.link("online")
    assert page.count("#notice:visible") == 0
    assert not page.uncaught()


_STORED = """
new Promise((resolve) => {{
  const asked = indexedDB.open("moa-edge chats"{version});
  asked.onsuccess = () => {{
    const transaction = asked.result.transaction("chats", "readwrite");
    transaction.objectStore("chats").openCursor().onsuccess = ({{ target: {{ result: found }} }}) => {{
      if (found) found.update({{ id: found.key, title: 5, messages: "damaged" }});
    }};
    transaction.oncomplete = () => resolve(asked.result.close());
  }};
}})
"""


def test_a_chat_whose_stored_form_is_damaged_is_said_and_the_page_goes_on(site: Site, person: Person) -> None:
    page = person.online(site.url(), 4)
    page.answer()
    page.do("click", "#new-chat")
    page.do("evaluate", _STORED.format(version=""))
    page.do("click", "#show-chats")
    page.do("click", "#rows .open")
    page.wait("#notice-text", "This chat cannot be read")
    page.do("click", "#show-chats")
    page.do("fill", "#search", "primary")
    page.wait("#no-chats")
    assert not page.uncaught()


_BROKEN_ANSWER = """
new Promise((resolve) => {
  const asked = indexedDB.open("moa-edge-chats", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("chats").put({ version: 1 }, "answer");
  asked.onsuccess = () => resolve(asked.result.close());
})
"""


def test_an_answer_under_way_that_is_damaged_is_said(site: Site, person: Person) -> None:
    person.open(f"{site.url(token='')}icon.svg").do("evaluate", _BROKEN_ANSWER)  # its origin
    page = person.open(site.url())
    page.wait("#notice-text", "The stored chat is broken")
    page.link("online")


_OTHER_TARGET = """
(async () => {
  const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("moa-edge-bundle");
  const file = await folder.getFileHandle("manifest");
  const { url, text } = JSON.parse(await (await file.getFile()).text());
  const manifest = JSON.parse(text);
  manifest.fingerprints.target = "0".repeat(64);
  const writable = await file.createWritable();
  await writable.write(JSON.stringify({ url, text: JSON.stringify(manifest) }));
  await writable.close();
})()
"""


def test_a_page_whose_stored_bundle_is_of_another_target_takes_the_new_one(site: Site, person: Person) -> None:
    page = person.online(site.url())
    page.do("evaluate", _OTHER_TARGET)  # as after the verifier was given another one
    page.do("reload")
    page.wait("#banner-text", "target")
    page.do("click", "#banner-actions >> text=Try again")
    page.link("online")


def test_a_page_that_cannot_start_leaves_no_token_in_the_address(site: Site, person: Person) -> None:
    page = person.open(site.url(token=""))
    page.wait("#banner-text", "asks for a token, and none is given")
    page.do("evaluate", _STORED.format(version=", 99"))  # as of a version to come
    other = person.open(site.url())
    other.wait("#banner-text", "could not open its stored chats")
    assert other.do("evaluate", "location.href") == site.url(token="")


def test_over_plain_http_it_works_online_and_says_what_is_missing(site, person, outer_address):
    page = person.open(site.url(outer_address))
    assert page.do("evaluate", "isSecureContext") is False
    page.link("online")
    page.wait("#banner-text", "plain http")
    page.do("click", "#banner-actions >> text=Understood")
    page.gone("#banner")
    page.set_up(COUNT)
    page.answer()
    assert page.messages == [QUESTION, site.target_writes(QUESTION, COUNT)]
    page.do("reload")
    page.link("online")
    page.do("click", "#show-chats")
    page.wait("#rows .open", QUESTION)  # chats are kept here too
