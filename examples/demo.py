"""``make demo``: the whole path on the default target, over a slow link that then goes away.

Exit status 0 only if the answers equal the target's own decoding and the device wrote on while offline.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import BackgroundLink, background_link
from moa_bench.verifier import Verifier, open_verifier
from moa_chat.local_verifier import ensure_bundle
from moa_runtime import (
    AnswerFinished,
    AnswerUpdate,
    Bundle,
    ChatEvent,
    Endpoint,
    LinkChanged,
    LoopSettings,
    MoaError,
    Origin,
    SyncChat,
)
from moa_runtime.paths import default_bundle

ROUND_TRIP_MS = 60
FIRST = "Name three primary colours and say in one sentence what happens when they are mixed."
SECOND = "Tell me a short story about a fox who lives near a river."
ANSWER_TOKENS = 160
CUT_AFTER = 16  # committed tokens of the second answer
OFFLINE_TOKENS = 48  # that the device is to write before the link comes back
LEAST_OFFLINE = 32
LONGEST_CUT_S = 30.0


def show(event: ChatEvent) -> None:
    """Print an answer as it is committed."""
    if isinstance(event, AnswerUpdate):
        print(event.text, end="", flush=True)
    elif isinstance(event, AnswerFinished):
        print("\n")


def main() -> int:
    try:
        return _demo()
    except MoaError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1


def _demo() -> int:
    _title("1. The model for this device: made once, then from the cache")
    ensure_bundle()
    bundle = Bundle.open(default_bundle())
    print(f"{bundle.folder}: {sum(file.bytes for file in bundle.manifest.files.values()) / 1e6:.0f} MB")

    _title("2. Start the verifier on this machine")
    with open_verifier() as server, background_link(with_round_trip(ROUND_TRIP_MS), *server.host_and_port) as link:
        endpoint = Endpoint(f"ws://127.0.0.1:{link.port}", server.endpoint.token)
        with SyncChat(bundle, endpoint, settings=LoopSettings(offline_limit=2 * OFFLINE_TOKENS), threads=1) as chat:
            first = _first_answer(chat, server, link)
            second = _second_answer(chat, server, link)
    _title("Result")
    good = first and second
    print("everything as it should be" if good else "NOT as it should be: see above")
    return 0 if good else 1


def _first_answer(chat: SyncChat, server: Verifier, link: BackgroundLink) -> bool:
    _title(f"3. An answer over a link with {ROUND_TRIP_MS} ms round trip")
    before = server.forwards(), link.bytes_up, link.bytes_down
    finished, prompt = _ask(chat, FIRST, lambda event: None)
    passes = server.forwards() - before[0]
    up, down = link.bytes_up - before[1], link.bytes_down - before[2]
    own = chat.chat.tokens[len(prompt) :]
    began = time.monotonic()
    alone = server.decode(prompt, ANSWER_TOKENS)
    alone_seconds = time.monotonic() - began
    statistics = finished.statistics
    identical = own == alone
    _table(
        ("tokens", f"{len(own)}"),
        ("server passes", f"{passes}, where the server alone takes {len(alone)}"),
        ("tau", f"{statistics.tau:.2f} tokens a round"),
        ("bytes", f"{up} up, {down} down ({down / len(own):.0f} down a token)"),
        ("wall time", f"{statistics.seconds:.2f} s, first token after {statistics.first_token_seconds or 0:.2f} s"),
        (
            "one request a token",
            f"{alone_seconds + len(alone) * ROUND_TRIP_MS / 1000:.2f} s (computed: decoding + round trips)",
        ),
        ("identical to the server's own decoding", "yes" if identical else "NO"),
    )
    return identical


def _second_answer(chat: SyncChat, server: Verifier, link: BackgroundLink) -> bool:
    _title("4. A second answer, and the network goes away")
    state = {"cut": False, "restored": False, "written": 0}
    # Were the device to fall silent, the demo should end and say so.
    giving_up = threading.Timer(LONGEST_CUT_S, link.restore)
    giving_up.daemon = True

    def watch(event: ChatEvent) -> None:
        if isinstance(event, LinkChanged):
            print(f"\n[{event.status.value}: {event.detail}]", flush=True)
        if not isinstance(event, AnswerUpdate):
            return
        committed = sum(token.committed for token in event.tokens)
        if not state["cut"] and committed >= CUT_AFTER:
            link.cut()
            state["cut"] = True
            giving_up.start()
            print("\n[the link is cut]", flush=True)
        offline = sum(not token.committed and token.origin is Origin.OFFLINE for token in event.tokens)
        state["written"] = max(state["written"], offline)
        if state["cut"] and not state["restored"] and offline >= OFFLINE_TOKENS:
            print(f"\n[{offline} tokens written without the target:]\n{event.tentative}", flush=True)
            print("\n[the link is restored]", flush=True)
            link.restore()
            state["restored"] = True

    finished, prompt = _ask(chat, SECOND, watch)
    giving_up.cancel()
    own = chat.chat.tokens[len(prompt) :]
    alone = server.decode(prompt, ANSWER_TOKENS)
    statistics = finished.statistics
    identical = own == alone
    _table(
        ("tokens", f"{len(own)}"),
        ("written while offline", f"{state['written']}"),
        ("of them kept by the target", f"{statistics.offline}"),
        ("rolled back", f"{statistics.rolled_back} in all"),
        ("identical to the server's own decoding", "yes" if identical else "NO"),
    )
    return identical and state["written"] >= LEAST_OFFLINE


def _ask(chat: SyncChat, question: str, watch: Callable[[ChatEvent], None]) -> tuple[AnswerFinished, list[int]]:
    """Ask, show the answer; returns its end and the tokens of everything before it."""
    print(f"> {question}\n")
    for event in chat.send(question, max_new_tokens=ANSWER_TOKENS):
        watch(event)
        show(event)
        if isinstance(event, AnswerFinished):
            prompt = chat.chat.tokens[: len(chat.chat.tokens) - len(event.tokens)]
            return event, prompt
    raise MoaError("the answer ended without its last event", code="defect")


def _title(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


def _table(*rows: tuple[str, str]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


if __name__ == "__main__":
    sys.exit(main())
