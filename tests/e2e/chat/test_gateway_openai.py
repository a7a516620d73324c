"""The unmodified ``openai`` package against ``moa-chat --serve``, both as users have them, and a real verifier."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from openai import OpenAI  # noqa: E402

from moa_runtime.bundle import Bundle  # noqa: E402
from moa_runtime.tokenizer import ChatTokenizer  # noqa: E402
from support.chat.programs import TOKEN, Running, chat, gateway, verifier  # noqa: E402

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "target"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def server(tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    with verifier(tiny_target, tiny_drafter) as running:
        yield running


@pytest.fixture(scope="module")
def endpoint(onnx_bundle: Path, server: Running) -> Iterator[Running]:
    with gateway(onnx_bundle, server.url) as running:
        yield running


def client(running: Running, key: str = "unused") -> OpenAI:
    return OpenAI(base_url=running.url, api_key=key, timeout=TIMEOUT_S, max_retries=0)


def create(running: Running, messages=QUESTION, **options):
    options.setdefault("max_tokens", 24)
    return client(running).chat.completions.create(model=MODEL, messages=messages, **options)


def text_of(completion) -> str:
    return completion.choices[0].message.content


def once(bundle: Path, url: str, *arguments: str) -> str:
    """What the terminal program answers."""
    command = chat(bundle, url, "--once", QUESTION[0]["content"], "--max-new-tokens", "24", "--json", *arguments)
    environment = {**os.environ, "MOA_TOKEN": TOKEN}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=True)
    return json.loads(done.stdout)["text"]


def test_the_ready_line_and_the_models(endpoint):
    assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/v1"
    assert [model.id for model in client(endpoint).models.list()] == [MODEL]
    assert client(endpoint).models.retrieve(MODEL).owned_by == "moa-edge"


def test_an_answer_is_the_targets_own_streamed_or_not(endpoint, onnx_bundle, server):
    expected = once(onnx_bundle, server.url)
    whole = create(endpoint)
    assert text_of(whole) == expected and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24 > 24
    assert whole.usage.moa["tokens"] == 24 and whole.usage.moa["offline"] is False
    *chunks, figures = create(endpoint, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert figures.choices == [] and figures.usage.completion_tokens == 24 and figures.usage.moa["rounds"] >= 1


def test_no_request_waits_for_an_acknowledgement(endpoint):
    """Of its headers, before the body is sent: 40 ms."""
    taken = []
    with httpx.Client(timeout=TIMEOUT_S) as connection:
        for _ in range(20):
            began = time.monotonic()
            connection.get(f"{endpoint.url}/models")
            taken.append(time.monotonic() - began)
    assert min(taken[5:]) < 0.03


def test_sampling_follows_the_seed(endpoint, onnx_bundle, server):
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    expected = once(onnx_bundle, server.url, "--temperature", "0.9", "--top-p", "0.95", "--seed", "7")
    assert text_of(create(endpoint, **sampled)) == text_of(create(endpoint, **sampled)) == expected
    assert text_of(create(endpoint, **{**sampled, "seed": 8})) != expected


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.9, "top_p": 0.95}])
@pytest.mark.parametrize("prompt", ["The capital of France is", " It <|im_end|> \n"])
def test_a_text_is_gone_on_with_as_the_verifier_decodes_it(endpoint, onnx_bundle, server, sampled, prompt):
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(onnx_bundle), raw=True)
    tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == prompt and not {0, 1, 2} & set(tokens)

    def decoded(seed: int) -> str:
        sampling = {**sampled, "seed": seed} if sampled else {}
        body = {"tokens": tokens, "max_new_tokens": 24, **sampling}
        url, headers = f"http://127.0.0.1:{server.port}/v1/decode", {"Authorization": f"Bearer {TOKEN}"}
        return tokenizer.decode(httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S).json()["tokens"])

    def complete(**options):
        options = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": 7, **sampled, **options}
        return client(endpoint).completions.create(**options)

    whole = complete(n=3)
    assert [choice.text for choice in whole.choices] == [decoded(seed) for seed in (7, 8, 9)]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and whole.usage.prompt_tokens == len(tokens)
    assert len({choice.text for choice in whole.choices}) == (3 if sampled else 1)
    *chunks, figures = complete(stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == decoded(7)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop") and figures.usage.completion_tokens <= 24


def test_several_answers_are_those_of_their_seeds(endpoint):
    sampled = {"temperature": 0.9, "top_p": 0.95}
    alone = [text_of(create(endpoint, seed=seed, **sampled)) for seed in (7, 8, 9)]
    whole = create(endpoint, seed=7, n=3, **sampled)
    assert [choice.message.content for choice in whole.choices] == alone and len(set(alone)) == 3
    assert whole.usage.completion_tokens == sum(each["tokens"] for each in whole.usage.moa["choices"])
    streamed = {0: "", 1: "", 2: ""}
    for chunk in create(endpoint, seed=7, n=3, stream=True, **sampled):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == alone


def test_a_conversation_goes_on(endpoint):
    system = {"role": "system", "content": "Be brief."}
    first = text_of(create(endpoint, [system, *QUESTION]))
    turns = [system, *QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "And why?"}]
    second = create(endpoint, turns)
    # Most of the conversation is known already and was not sent again.
    assert second.usage.moa["bytes_up"] < create(endpoint, turns[1:]).usage.moa["bytes_up"]
    assert text_of(create(endpoint, turns)) == text_of(second)


def test_a_stop_text_ends_the_answer(endpoint):
    whole = text_of(create(endpoint))
    stop = whole[9:12]
    cut = create(endpoint, stop=["never comes", stop])
    assert text_of(cut) == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    streamed = create(endpoint, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text_of(cut)


def test_refusals_are_the_packages_own_exceptions(endpoint):
    with pytest.raises(openai.BadRequestError, match="context holds 512") as full:
        create(endpoint, [{"role": "user", "content": "word " * 600}])
    assert full.value.code == "context_length_exceeded" and full.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        create(endpoint, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="only 'target'"):
        client(endpoint).chat.completions.create(model="gpt-5", messages=QUESTION)
    url = f"{endpoint.url}/chat/completions"
    assert httpx.post(url, content="{").json()["error"]["message"].startswith("the body is not JSON")
    page = httpx.post(url, json={"messages": QUESTION}, headers={"Origin": "http://evil.example"})
    assert page.status_code == 403


def test_requests_at_once_do_not_mix(endpoint):
    questions = ["Name a bird.", "Name a river.", "Name a colour."]
    alone = [text_of(create(endpoint, [{"role": "user", "content": text}])) for text in questions]
    together: dict[str, str] = {}

    def ask(text: str) -> None:
        together[text] = text_of(create(endpoint, [{"role": "user", "content": text}]))

    threads = [threading.Thread(target=ask, args=(text,)) for text in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [together[text] for text in questions] == alone


def test_an_answer_that_nobody_reads_is_stopped(onnx_bundle, server):
    with gateway(onnx_bundle, server.url) as running:
        url, body = f"{running.url}/chat/completions", {"messages": QUESTION, "max_tokens": 400}
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=TIMEOUT_S) as answer:
            next(answer.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=httpx.Timeout(TIMEOUT_S, read=0.3))
        for _ in range(2):
            line = running.process.stderr.readline()
            assert "POST /v1/chat/completions" in line and "tokens |" not in line  # it did not come to its end
        assert text_of(create(running))


def test_the_verifier_is_killed_in_the_middle(onnx_bundle, tiny_target, tiny_drafter):
    """The stream goes on with the device's own text and ends well-formed; so does a request without a stream."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(verifier(tiny_target, tiny_drafter))
        running = stack.enter_context(gateway(onnx_bundle, server.url, "--offline", "drafter", "--offline-limit", "40"))
        expected = text_of(create(running, max_tokens=200))
        text, reason, figures, killed = "", None, None, False
        stream = create(running, max_tokens=200, stream=True, stream_options={"include_usage": True})
        for chunk in stream:
            for choice in chunk.choices:
                assert reason is None
                text += choice.delta.content or ""
                reason = choice.finish_reason
            figures = chunk.usage
            if len(text) > 10 and not killed:
                killed, sent = True, text
                server.process.kill()
                server.process.wait()
        assert killed and expected.startswith(sent) and len(text) > len(sent)
        assert reason in ("stop", "length") and figures.moa["offline"] is True and figures.moa["offline_tokens"] > 8
        with pytest.raises(openai.InternalServerError, match="no answer that the verifier did not begin") as refused:
            create(running, max_tokens=30)
        assert refused.value.status_code == 503
        # What was sent offline is history now; with a verifier again, the target goes on behind it.
        stack.enter_context(verifier(tiny_target, tiny_drafter, server.port))
        turns = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And why?"}]
        deadline = time.monotonic() + TIMEOUT_S
        online = None
        while online is None:
            assert time.monotonic() < deadline
            with contextlib.suppress(openai.InternalServerError):
                online = create(running, turns)
        assert online.usage.moa["offline_tokens"] == 0 and text_of(online)


def test_a_verifier_that_comes_back_finishes_the_answer(onnx_bundle, tiny_target, tiny_drafter):
    """By default a client never reads what the target did not write."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(verifier(tiny_target, tiny_drafter))
        running = stack.enter_context(gateway(onnx_bundle, server.url))
        expected = text_of(create(running, max_tokens=200))
        text = ""
        for chunk in create(running, max_tokens=200, stream=True):
            text += chunk.choices[0].delta.content or ""
            if len(text) > 10 and server.process.poll() is None:
                server.process.kill()
                server.process.wait()
                stack.enter_context(verifier(tiny_target, tiny_drafter, server.port))
        assert text == expected and server.process.poll() is not None


def test_the_writer_answers_where_a_request_has_it_so(writing_bundle, tiny_target, tiny_drafter):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with gateway(writing_bundle, f"ws://127.0.0.1:{port}") as running:
        assert "warning: no verifier answers" in running.process.stderr.readline()
        with pytest.raises(openai.InternalServerError, match="no verifier answers"):
            create(running)
        answered = create(running, extra_body={"offline": "writer"})
        assert text_of(answered) and answered.usage.moa["offline"] is True
        assert answered.usage.moa["offline_tokens"] == answered.usage.completion_tokens


def test_starting_while_the_verifier_is_away(onnx_bundle, tiny_target, tiny_drafter):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with gateway(onnx_bundle, f"ws://127.0.0.1:{port}") as running:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="no verifier answers") as away:
                create(running, stream=stream)
            assert away.value.status_code == 503 and int(away.value.response.headers["retry-after"]) > 0
        with verifier(tiny_target, tiny_drafter, port):
            assert text_of(create(running))


def test_a_token_of_its_own_and_a_refused_one_at_the_verifier(onnx_bundle, server):
    with gateway(onnx_bundle, server.url, "--token", "wrong", "--gateway-token", "sesame") as running:
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            create(running)
        with pytest.raises(openai.InternalServerError, match="refused the token") as refused:
            client(running, "sesame").chat.completions.create(model=MODEL, messages=QUESTION)
        assert refused.value.status_code == 502
