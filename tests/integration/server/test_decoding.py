"""Plain decoding as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import httpx
import pytest

from moa_runtime.session.events import Sampling
from moa_server.auth import new_token
from moa_server.engine.baseline import decode
from moa_server.settings import Settings
from support.server.edge_running import eventually
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
    end = {"forwards": sum(step.steps for step in steps), "finish": "length"}
    assert events(response) == [*({"token": step.token} for step in steps), {"done": True, **end}]
    whole = verifier.http("POST", "/v1/decode", json={**body, "stream": False}).json()
    assert whole == {"tokens": [step.token for step in steps], **end}


@pytest.mark.parametrize("changed", [{"stream": 1}, {"tokens": [512]}])
def test_a_bad_request_is_refused_before_the_first_event(verifier, changed):
    assert verifier.http("POST", "/v1/decode", json={"tokens": PROMPT, "stream": True, **changed}).status_code == 400


def test_a_failing_engine_ends_the_stream_and_frees_its_slot(engine, monkeypatch, caplog):
    body = {"tokens": PROMPT, "max_new_tokens": 5, "stream": True}
    with serving(engine, Settings(max_sessions=1)) as verifier:
        with monkeypatch.context() as broken:
            broken.setattr(type(engine), "step", lambda *_: 1 / 0)
            [said] = events(verifier.http("POST", "/v1/decode", json=body))
            whole = verifier.http("POST", "/v1/decode", json={**body, "stream": False})
        assert whole.status_code == 500 and whole.json() == said and said["error"]
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
        eventually(lambda: not verifier.parts.plain.running)
        steps = len(engine.steps)
        engine.permits.release(100)
        assert verifier.http("POST", "/v1/decode", json={"tokens": [2], "max_new_tokens": 1}).status_code == 200
        assert len(engine.steps) <= steps + 2
        assert engine.sequences_open <= 1


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_tokens_sessions_count_for_decoding_and_a_withdrawn_token_ends_its_stream(tmp_path, withdrawn):
    token, entry = new_token("alice")
    file, engine = tmp_path / "tokens.json", GatedEngine()
    file.write_text(json.dumps({"tokens": [{**json.loads(entry), "sessions": 1}]}))
    with serving(engine, Settings(token_file=file)) as verifier:
        verifier.token = token
        url = f"http://127.0.0.1:{verifier.port}/v1/decode"
        engine.permits.release()
        with httpx.stream("POST", url, json={"tokens": [1], "stream": True}, headers=verifier.headers) as response:
            lines = response.iter_lines()
            next(lines)
            if withdrawn:
                file.write_text('{"tokens": []}')
                verifier.parts.authenticator.reload()
                engine.permits.release(100)
                assert "error" in json.loads([line for line in lines if line][-1].removeprefix("data: "))
            else:
                assert verifier.http("POST", "/v1/decode", json={"tokens": [1]}).status_code == 503
        engine.permits.release(100)
