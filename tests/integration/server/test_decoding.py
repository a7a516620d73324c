"""Plain decoding as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from pathlib import Path

import httpx
import pytest

from moa_runtime.session.events import Sampling
from moa_server.auth import new_token
from moa_server.engine.baseline import decode
from moa_server.settings import Settings
from support.server.running import TIMEOUT_S, serving
from support.toy_engine import ToyEngine

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
        {"done": True, "forwards": sum(step.steps for step in steps), "finish": "length"},
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


def test_a_failing_engine_ends_the_stream_and_leaves_no_place_taken(engine, monkeypatch, caplog):
    body = {"tokens": PROMPT, "max_new_tokens": 5, "stream": True}
    with serving(engine, Settings(max_sessions=1)) as verifier:
        with monkeypatch.context() as broken:
            broken.setattr(type(engine), "step", lambda *_: 1 / 0)
            [said] = events(verifier.http("POST", "/v1/decode", json=body))
            whole = verifier.http("POST", "/v1/decode", json={**body, "stream": False})
        assert "sending it again may help" in said["error"]
        assert whole.status_code == 500 and whole.json() == said
        assert "ZeroDivisionError" in caplog.text and "Traceback" not in caplog.text
        assert len(events(verifier.http("POST", "/v1/decode", json=body))) == 6


class GatedEngine(ToyEngine):
    """Takes a step for each ``permits.release()``."""

    def __init__(self) -> None:
        super().__init__(vocab_size=10)
        self.permits = threading.Semaphore(0)

    async def step(self, requests):
        await asyncio.get_running_loop().run_in_executor(None, self.permits.acquire, True, TIMEOUT_S)
        return await super().step(requests)


@pytest.mark.parametrize("stream", [True, False])
def test_decoding_stops_when_the_client_leaves(stream):
    engine = GatedEngine()
    with serving(engine, Settings(max_sessions=1)) as verifier:
        url = f"http://127.0.0.1:{verifier.port}/v1/decode"
        body = {"tokens": [1], "stream": stream}
        if stream:
            engine.permits.release()
            with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
                lines = response.iter_lines()  # kept: without it the response is closed
                assert next(lines) == f'data: {{"token": {engine.choice([1])}}}'
                # The stream holds the only place, and waits for its second token.
                refused = verifier.http("POST", "/v1/decode", json={"tokens": [1]})
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=0.3)
        deadline = time.monotonic() + TIMEOUT_S
        while verifier.parts.plain.running:
            assert time.monotonic() < deadline, "the place of a client that left stays taken"
            time.sleep(0.01)
        steps = len(engine.steps)
        engine.permits.release(100)
        assert verifier.http("POST", "/v1/decode", json={"tokens": [2], "max_new_tokens": 1}).status_code == 200
        assert len(engine.steps) <= steps + 2
        assert engine.sequences_open <= 1


def token_file(folder: Path, **budget) -> tuple[Path, str]:
    token, entry = new_token("alice")
    file = folder / "tokens.json"
    file.write_text(json.dumps({"tokens": [{**json.loads(entry), **budget}]}))
    return file, token


@contextlib.contextmanager
def a_stream_of(engine: GatedEngine, file: Path, token: str):
    """A verifier, the lines of a stream that has its first token and waits for the next, and what asks for another."""
    with serving(engine, Settings(token_file=file)) as verifier:
        url, headers = f"http://127.0.0.1:{verifier.port}/v1/decode", {"Authorization": f"Bearer {token}"}
        engine.permits.release()
        with httpx.stream("POST", url, json={"tokens": [1], "stream": True}, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            yield verifier, lines, lambda: httpx.post(url, json={"tokens": [1]}, headers=headers)
        engine.permits.release(100)


def test_a_tokens_sessions_count_for_decoding_too(tmp_path):
    with a_stream_of(GatedEngine(), *token_file(tmp_path, sessions=1)) as (_, _, another):
        refused = another()
        assert refused.status_code == 503 and "1 sessions" in refused.json()["error"]


def test_a_token_that_is_withdrawn_ends_its_stream(tmp_path):
    file, token = token_file(tmp_path)
    engine = GatedEngine()
    with a_stream_of(engine, file, token) as (verifier, lines, _):
        file.write_text('{"tokens": []}')
        verifier.parts.authenticator.reload()
        engine.permits.release(100)
        assert "the bearer token was withdrawn" in "".join(lines)
