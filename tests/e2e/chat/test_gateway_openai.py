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
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("granian")
openai = pytest.importorskip("openai")

from openai import OpenAI  # noqa: E402

from moa_runtime.bundle import Bundle  # noqa: E402
from moa_runtime.tokenizer import ChatTokenizer  # noqa: E402
from support.chat.programs import TOKEN, Running, chat, gateway, verifier  # noqa: E402

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "target"
TIMEOUT_S = 60
SAMPLED = {"temperature": 0.9, "top_p": 0.95}
NONE = SimpleNamespace(content=[])
LEGACY = ("tokens", "token_logprobs", "top_logprobs")
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def start(tiny_target, tiny_drafter) -> Iterator:
    """Starts verifiers and gateways that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, *given: stack.enter_context(
            verifier(tiny_target, tiny_drafter, *given) if kind == "verifier" else gateway(*given)
        )


def client(running: Running, key: str = "unused") -> OpenAI:
    return OpenAI(base_url=running.url, api_key=key, timeout=TIMEOUT_S, max_retries=0)


def create(running: Running, messages=QUESTION, **options):
    options.setdefault("max_tokens", 24)
    return client(running).chat.completions.create(model=MODEL, messages=messages, **options)


def text_of(completion) -> str:
    return completion.choices[0].message.content


def once_online(running: Running, messages):
    """The answer to a conversation, once the verifier is there."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return create(running, messages)
        except openai.InternalServerError:
            assert time.monotonic() < deadline


def free_url() -> str:
    """The address of a verifier that is not there yet."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"ws://127.0.0.1:{listening.getsockname()[1]}"


def once(bundle: Path, url: str, *arguments: str) -> str:
    """The answer of the terminal program."""
    command = chat(bundle, url, "--once", QUESTION[0]["content"], "--max-new-tokens", "24", "--json", *arguments)
    environment = {**os.environ, "MOA_TOKEN": TOKEN}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=True)
    return json.loads(done.stdout)["text"]


def test_an_answer_is_the_targets_own_streamed_or_not(endpoint, onnx_bundle, server):
    assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/v1"
    assert [model.id for model in client(endpoint).models.list()] == [MODEL]
    assert client(endpoint).models.retrieve(MODEL).owned_by == "moa-edge"
    expected = once(onnx_bundle, server.url)
    whole = create(endpoint)
    assert text_of(whole) == expected and whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24 and whole.usage.completion_tokens == 24
    assert whole.usage.moa["tokens"] == 24 and whole.usage.moa["offline"] is False
    *chunks, figures = create(endpoint, **STREAM)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert figures.choices == [] and figures.usage.completion_tokens == 24 and figures.usage.moa["rounds"] >= 1
    stop = expected[9:12]
    assert text_of(create(endpoint, stop=["never comes", stop])) == expected[: expected.index(stop)]


def test_tokens_have_logprobs_streamed_or_not(endpoint):
    options = {"logprobs": True, "top_logprobs": 4, "temperature": 0.8, "seed": 5}
    whole, *chunks = create(endpoint, **options), *create(endpoint, **options, **STREAM)
    content = whole.choices[0].logprobs.content
    written = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")  # the target's noise
    assert written.rstrip("\ufffd") == text_of(whole).rstrip("\ufffd")  # half a character at the end is left out
    assert len(content) == whole.usage.completion_tokens - (whole.choices[0].finish_reason == "stop")
    for token in content:
        top = [each.logprob for each in token.top_logprobs]
        assert len(top) == 4 and top == sorted(top, reverse=True) and token.logprob <= top[0] <= 0
    streamed = [token for chunk in chunks for choice in chunk.choices for token in (choice.logprobs or NONE).content]
    assert [token.bytes for token in streamed] == [token.bytes for token in content]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in content], abs=1e-5)
    figures = chunks[-1].metrics["speculative_decoding"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] and whole.metrics["speculative_decoding"]
    raw = client(endpoint).completions.create(model=MODEL, prompt="Once upon", max_tokens=8, logprobs=2)
    [choice] = raw.choices
    assert choice.logprobs.text_offset[0] == 0 and len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    for token, logprob, top in zip(*(getattr(choice.logprobs, name) for name in LEGACY), strict=True):
        assert top[token] == logprob and 1 <= len(top) <= 3


def test_a_response_is_the_answer_of_a_chat_completion(endpoint):
    expected = text_of(create(endpoint, messages=[{"role": "system", "content": "Be brief."}, *QUESTION]))
    options = {"model": MODEL, "input": QUESTION, "instructions": "Be brief.", "max_output_tokens": 24}
    responses = client(endpoint).responses
    whole = responses.create(**options)
    assert whole.output_text == expected and whole.status == "incomplete" and whole.usage.output_tokens == 24
    with responses.stream(**options) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == expected and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected
    with pytest.raises(openai.BadRequestError) as refused:
        responses.create(**options, previous_response_id="resp_1")
    assert refused.value.code == "unsupported_parameter"


def test_sampling_follows_the_seed(endpoint, onnx_bundle, server):
    expected = once(onnx_bundle, server.url, "--temperature", "0.9", "--top-p", "0.95", "--seed", "7")
    alone = [text_of(create(endpoint, seed=seed, **SAMPLED)) for seed in (7, 8, 9)]
    whole = create(endpoint, seed=7, n=3, **SAMPLED)
    assert alone[0] == expected and [choice.message.content for choice in whole.choices] == alone
    assert len(set(alone)) == 3


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", ["The capital of France is", " It <|im_end|> \n"])
def test_a_text_is_continued_as_the_verifier_decodes_it(endpoint, onnx_bundle, server, sampled, prompt):
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(onnx_bundle), raw=True)
    tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == prompt and not {0, 1, 2} & set(tokens)

    def decoded(seed: int) -> str:
        sampling = {**sampled, "seed": seed} if sampled else {}
        body = {"tokens": tokens, "max_new_tokens": 24, **sampling}
        url, headers = f"http://127.0.0.1:{server.port}/v1/decode", {"Authorization": f"Bearer {TOKEN}"}
        text = tokenizer.decode(httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S).json()["tokens"])
        return text.removesuffix("\ufffd")  # half a character at the end of a cut answer is left out

    def complete(**options):
        options = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": 7, **sampled, **options}
        return client(endpoint).completions.create(**options)

    whole = complete(n=3)
    assert [choice.text for choice in whole.choices] == [decoded(seed) for seed in (7, 8, 9)]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and whole.usage.prompt_tokens == len(tokens)
    *chunks, figures = complete(**STREAM)
    assert "".join(chunk.choices[0].text for chunk in chunks) == decoded(7)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop") and figures.usage.completion_tokens <= 24


def computed(server: Running) -> float:
    """Tokens of prompts that the verifier has computed."""
    url, headers = f"http://127.0.0.1:{server.port}/metrics", {"Authorization": f"Bearer {TOKEN}"}
    lines = httpx.get(url, headers=headers, timeout=TIMEOUT_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith('moa_tokens_total{kind="prefill"}'))


def test_a_conversation_is_continued_without_being_sent_again(endpoint, server):
    system = {"role": "system", "content": "Be brief."}
    first = text_of(create(endpoint, [system, *QUESTION]))
    turns = [system, *QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "And why?"}]
    prefilled = [computed(server)]
    second = create(endpoint, turns)
    prefilled.append(computed(server))
    again = create(endpoint, [{"role": "system", "content": "Be long."}, *turns[1:]])
    prefilled.append(computed(server))
    assert 2 * (prefilled[1] - prefilled[0]) < prefilled[2] - prefilled[1] and text_of(again)
    assert text_of(create(endpoint, turns)) == text_of(second)


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


def test_an_answer_whose_client_has_left_is_stopped(onnx_bundle, server, start):
    running = start("gateway", onnx_bundle, server.url)
    url, body = f"{running.url}/chat/completions", {"messages": QUESTION, "max_tokens": 400}
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=TIMEOUT_S) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=httpx.Timeout(TIMEOUT_S, read=0.3))
    for _ in range(2):
        line = running.process.stderr.readline()
        assert "POST /v1/chat/completions" in line and "tokens |" not in line  # it did not come to its end
    assert text_of(create(running))


def test_the_device_continues_if_the_verifier_is_killed_in_the_middle(onnx_bundle, start):
    """The stream is continued with the device's own text and ends well-formed."""
    server = start("verifier")
    running = start("gateway", onnx_bundle, server.url, "--offline", "drafter", "--offline-limit", "40")
    expected = text_of(create(running, max_tokens=200))
    text, sent, reason, figures = "", "", None, None
    for chunk in create(running, max_tokens=200, **STREAM):
        for choice in chunk.choices:
            assert reason is None
            text += choice.delta.content or ""
            reason = choice.finish_reason
        figures = chunk.usage
        if len(text) > 10 and not sent:
            sent = text
            server.process.kill()
            server.process.wait()
    assert sent and expected.startswith(sent) and len(text) > len(sent)
    assert reason in ("stop", "length") and figures.moa["offline"] is True and figures.moa["offline_tokens"] > 8
    with pytest.raises(openai.InternalServerError) as refused:
        create(running, max_tokens=30)
    assert refused.value.status_code == 503 and refused.value.code == "verifier_unavailable"
    # Text sent offline is history now; with a verifier again, the target continues after it.
    start("verifier", server.port)
    turns = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And why?"}]
    online = once_online(running, turns)
    assert online.usage.moa["offline_tokens"] == 0 and text_of(online)


def test_a_verifier_that_comes_back_finishes_the_answer(onnx_bundle, start):
    """By default a client never reads text that the target did not write."""
    server = start("verifier")
    running = start("gateway", onnx_bundle, server.url)
    expected, text = text_of(create(running, max_tokens=200)), ""
    for chunk in create(running, max_tokens=200, stream=True):
        text += chunk.choices[0].delta.content or ""
        if len(text) > 10 and server.process.poll() is None:
            server.process.kill()
            server.process.wait()
            start("verifier", server.port)
    assert text == expected and server.process.poll() is not None


def test_without_a_verifier_a_request_waits_for_it_or_has_the_writer_answer(writing_bundle, start):
    url = free_url()
    running = start("gateway", writing_bundle, url)
    assert "warning: " in running.process.stderr.readline()
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as away:
            create(running, stream=stream)
        assert away.value.status_code == 503 and int(away.value.response.headers["retry-after"]) > 0
    answered = create(running, extra_body={"offline": "writer"})
    assert text_of(answered) and answered.usage.moa["offline"] is True
    assert answered.usage.moa["offline_tokens"] == answered.usage.completion_tokens
    start("verifier", int(url.rpartition(":")[2]))
    assert text_of(once_online(running, QUESTION))


def test_a_token_of_the_endpoint_and_one_that_the_verifier_refuses(onnx_bundle, server, start):
    running = start("gateway", onnx_bundle, server.url, "--token", "wrong", "--gateway-token", "sesame")
    with pytest.raises(openai.AuthenticationError):
        create(running)
    with pytest.raises(openai.InternalServerError) as refused:
        client(running, "sesame").chat.completions.create(model=MODEL, messages=QUESTION)
    assert refused.value.status_code == 502 and refused.value.code == "verifier_refused"
