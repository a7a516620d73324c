"""Plain decoding as a stream of server-sent events."""

from __future__ import annotations

import json
import random
import threading
import time

import httpx
import pytest

from moa_runtime.session.events import Sampling
from moa_server.plain import decode
from moa_server.settings import Settings
from server.running import TIMEOUT_S, serving

PROMPT = random.Random(8).sample(range(3, 512), 16)


@pytest.fixture(scope="module")
def verifier(engine):
    with serving(engine, Settings()) as running:
        yield running


def events(response: httpx.Response) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.95, 6)])
def test_a_stream_brings_each_token_and_ends_with_the_forwards(verifier, engine, sampling):
    body = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    body |= {"tokens": PROMPT, "max_new_tokens": 20, "stream": True}
    response = verifier.http("POST", "/v1/decode", json=body)
    steps = list(decode(engine, PROMPT, sampling, 20))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events(response) == [
        *({"token": step.token} for step in steps),
        {"done": True, "forwards": sum(step.forwards for step in steps)},
    ]


def test_stream_false_is_the_answer_as_a_whole(verifier):
    body = {"tokens": PROMPT, "max_new_tokens": 5}
    whole, not_streamed = (
        verifier.http("POST", "/v1/decode", json={**body, **more}) for more in ({}, {"stream": False})
    )
    assert not_streamed.json() == whole.json()


@pytest.mark.parametrize(("changed", "said"), [({"stream": 1}, "stream must be"), ({"tokens": [512]}, "below 512")])
def test_what_is_refused_is_refused_before_the_first_event(verifier, changed, said):
    response = verifier.http("POST", "/v1/decode", json={"tokens": PROMPT, "stream": True, **changed})
    assert response.status_code == 400
    assert said in response.json()["error"]


def test_a_failing_engine_breaks_the_stream_and_leaves_no_place_taken(engine, monkeypatch, caplog):
    body = {"tokens": PROMPT, "max_new_tokens": 5, "stream": True}
    with serving(engine, Settings(max_sessions=1)) as verifier:
        with monkeypatch.context() as broken:
            broken.setattr(type(engine), "logits", lambda *_: 1 / 0)
            with pytest.raises(httpx.RemoteProtocolError):
                verifier.http("POST", "/v1/decode", json=body)
        assert "ZeroDivisionError" in caplog.text
        assert len(events(verifier.http("POST", "/v1/decode", json=body))) == 6


class GatedEngine:
    """Writes 7 again and again, one token for each ``permits.release()``."""

    fingerprints, vocab_size, stop_tokens, max_context = None, 10, (), 1000

    def __init__(self) -> None:
        self.forwards = 0
        self.permits = threading.Semaphore(0)
        self.closed = threading.Event()

    def open(self) -> GatedEngine:
        return self

    def verify(self, prefix, draft, parents, sampling) -> list[int]:
        assert self.permits.acquire(timeout=TIMEOUT_S)
        self.forwards += 1
        return [7]

    def keep(self, path) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


def test_decoding_stops_when_the_client_leaves():
    engine = GatedEngine()
    with serving(engine, Settings(max_sessions=1)) as verifier:
        url = f"http://127.0.0.1:{verifier.port}/v1/decode"
        engine.permits.release()
        with httpx.stream("POST", url, json={"tokens": [1], "stream": True}, timeout=TIMEOUT_S) as response:
            lines = response.iter_lines()
            assert next(lines) == 'data: {"token": 7}'
            # The stream holds the only place, and waits for its second token.
            assert verifier.http("POST", "/v1/decode", json={"tokens": [1]}).status_code == 503
        engine.permits.release(100)
        assert engine.closed.wait(TIMEOUT_S)
        assert engine.forwards < 100
        deadline = time.monotonic() + TIMEOUT_S
        while verifier.http("POST", "/v1/decode", content="no JSON").status_code == 503:
            assert time.monotonic() < deadline, "the place of a client that left stays taken"
