"""Two clients with nothing to hide, in a process of their own: one drafts, one streams; both check every text."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import httpx
from websockets.exceptions import ConnectionClosed, InvalidMessage

from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Grammar, Origin, Sampling
from moa_server.connection import TRY_AGAIN_LATER
from soak.raw import Target
from support.server.running import TIMEOUT_S, Client

LENGTH = 48
SAMPLINGS = (Sampling(), Sampling(0.9, 0.95, seed=7))


@dataclass(frozen=True)
class Reference:
    """What the target writes alone."""

    prompt: tuple[int, ...]
    sampling: Sampling
    text: tuple[int, ...]


def references(target: Target, count: int, seed: int) -> list[Reference]:
    """Plain decoding of ``count`` prompts, asked before anybody disturbs."""
    rng, verifier = random.Random(seed), target.verifier
    found = []
    for index in range(count):
        length = rng.randint(4, min(200, target.context // 3))
        tokens = tuple(rng.randrange(3, target.vocabulary) for _ in range(length))
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        found.append(Reference(tokens, sampling, tuple(verifier.decode(tokens, LENGTH, sampling))))
    return found


class _NoAnswerError(Exception):
    """A connection ended before its answer began: it gives way, if more than a few hundred of its address wait."""


def run(target: Target, known: Sequence[Reference], seed: int, out: Connection) -> None:
    """Send ``("draft" or "stream", seconds)`` of every step, ``("first", seconds)`` of every first token,
    ``("refused", sentence)`` if all places are taken, or too many connections wait of this address, and ``("differs",
    sentence)``, until the parent ends."""
    lock = threading.Lock()

    def say(kind: str, value: object) -> None:
        with lock:
            out.send((kind, value))

    def forever(work, name: str) -> None:
        rng = random.Random(f"{seed}.{name}")
        while True:
            try:
                work(target, rng.choice(known), rng, say)
            except Exception as error:
                closed = error.rcvd if isinstance(error, ConnectionClosed) else None
                busy = isinstance(error, InvalidMessage | _NoAnswerError)
                busy |= closed is not None and closed.code == TRY_AGAIN_LATER
                say("refused" if busy else "differs", f"{name}: {type(error).__name__}: {error}")
                time.sleep(1)

    threads = [
        threading.Thread(target=forever, args=(draft, "draft"), daemon=True),
        threading.Thread(target=forever, args=(stream, "stream"), daemon=True),
    ]
    for thread in threads:
        thread.start()
    out.recv()  # the parent has had enough


def draft(target: Target, reference: Reference, rng: random.Random, say) -> None:
    """One session: drafts that are right two times out of three, now and then a lost connection."""
    client = Client(target.verifier, _Known(target))
    client.connect()
    try:
        session = client.session
        session.prompt(reference.prompt, reference.sampling, LENGTH)
        _round(client, say, "first")
        while session.answering:
            if rng.random() < 0.02:
                client.drop()
                client.connect()
            _draft(session, reference, rng)
            session.propose()
            _round(client, say, "draft")
        text = session.committed[len(reference.prompt) :]
        if text != list(reference.text):
            say("differs", f"drafted {text}, plain decoding is {list(reference.text)}")
    finally:
        client.socket.close()


def constrained(target: Target, grammar: Grammar) -> None:
    """Ask for one token that conforms to a grammar."""
    client = Client(target.verifier, _Known(target))
    client.connect()
    try:
        client.session.prompt([5], Sampling(grammar=grammar), 1)
        while client.session.answering:
            _round(client, lambda *_: None, "first")
    finally:
        client.socket.close()


def _draft(session: ClientSession, reference: Reference, rng: random.Random) -> None:
    if session.tentative:
        return
    at = len(session.committed) - len(reference.prompt)
    right = list(reference.text[at : at + rng.randint(0, 6)])
    session.extend([token if rng.random() < 2 / 3 else 3 + token % 100 for token in right], Origin.DRAFTED)


def _round(client: Client, say, kind: str) -> None:
    began = time.monotonic()
    while client.session.awaiting_verdict or client.session.link is not LinkState.UP:
        client.exchange()
        if client.faults:
            raise RuntimeError(f"the verifier refused: {client.faults[0].text}")
    say(kind, time.monotonic() - began)


def stream(target: Target, reference: Reference, rng: random.Random, say) -> None:
    """One answer of ``/v1/decode`` as a stream."""
    sampling = reference.sampling
    body = {"tokens": reference.prompt, "max_new_tokens": LENGTH, "stream": True}
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    text, last = [], time.monotonic()
    tls = target.verifier.tls
    url = f"http{'s' if tls else ''}://127.0.0.1:{target.port}/v1/decode"
    with contextlib.ExitStack() as stack:
        try:
            asked = httpx.stream("POST", url, json=body, timeout=TIMEOUT_S, verify=tls or True)
            answer = stack.enter_context(asked)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            raise _NoAnswerError(repr(error)) from error
        for line in answer.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line else {}
            if "error" in event:
                raise RuntimeError(event["error"])
            if "token" in event:
                say("stream" if text else "first", time.monotonic() - last)
                last = time.monotonic()
                text.append(event["token"])
    if text != list(reference.text):
        say("differs", f"streamed {text}, plain decoding is {list(reference.text)}")


class _Known:
    """What a client must know of an engine."""

    stop_tokens = ()  # the verifier says where an answer ends

    def __init__(self, target: Target) -> None:
        self.fingerprints = target.fingerprints


def ask(port: int, out: Connection) -> None:
    """Send ``("draft", seconds)`` of every piece of answers that a gateway streams, until the parent ends."""
    [model] = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=TIMEOUT_S).json()["data"]
    body = {"model": model["id"], "prompt": "Once upon a time", "max_tokens": LENGTH, "stream": True, "temperature": 0}
    while True:
        last = time.monotonic()
        try:
            url = f"http://127.0.0.1:{port}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line:
                        out.send(("draft", time.monotonic() - last))
                        last = time.monotonic()
        except httpx.HTTPError as error:
            out.send(("differs", repr(error)))
