"""Fuzz what strangers send, and what their files contain, guided by coverage (``pip install atheris``).

>>> python tools/fuzz.py template --seconds 600     # with PYTHONPATH=tests

A finding is an exception that is no MoaError, a traceback in a log, or an input that takes more than a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import hashlib
import json
import logging
import os
import random
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["moa_chat", "moa_decoder", "moa_drafter", "moa_runtime", "moa_server"]):
    import moa_decoder.gguf_weights
    import moa_drafter.gguf_tokenizer
    import moa_runtime.bundle
    import moa_runtime.chat_template
    import moa_runtime.session.client
    import moa_runtime.tokenizer
    import moa_server.process  # noqa: F401

import httpx

from moa_runtime.errors import MoaError
from moa_runtime.session.events import Origin, Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.settings import Settings
from support.server.attacks import BINARY, CLOSE, CONT, PING, TEXT, Victim, frame, message
from support.server.in_memory import draft, hello, prompt
from support.server.running import Client, Verifier, serving
from support.tiny import make_tiny_target
from support.toy_engine import PRINTS, ToyEngine

SLOW_S = 1.0

#: Values for places in JSON that expect others.
ODD: list[Any] = [None, True, 0, -1, 1, 2**31, 2**63, 2**70, 1e308, float("inf"), float("nan"), "", "\ud800", "\0"]
ODD += ["../x", "a" * 1000, [], {}, [[]], {"a": {}}, [None], {"type": "Sequence"}]
_JINJA = re.split(
    " ",
    "{{ }} {% %} {%- -%} {# #} for in endfor if else endif set endset macro endmacro call filter endfilter ( ) [ ] { } "
    ", . : | ~ + - * ** // % == < is not and or messages loop namespace(x=1) range(9999) dict(a=1) cycler('a') "
    "joiner(',') 'a' '%s' '{0:9999}' 1 0 -1 2**20 1.5 none true x ns.x recursive break continue import include block",
)


@dataclass
class Target:
    """What is fuzzed.

    Attributes:
        seeds: inputs that are valid.
        run: takes one input.
        mutate: makes another input of one, with a generator; None to change bytes alone.
        words: that inputs are made of.
    """

    seeds: Sequence[bytes]
    run: Callable[[bytes], object]
    mutate: Callable[[bytes, random.Random], bytes] | None = None
    words: Sequence[bytes] = ()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(inner)[:40] if len(path) < 40 else ():
        yield from _places(each, (*path, key))


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change, move, copy or drop some of the values of a document."""
    document = json.loads(data)
    for _ in range(rng.choice([1, 1, 2])):
        if not (places := list(_places(document))):
            break
        (*path, last), owner = rng.choice(places), document
        for key in path:
            owner = owner[key]
        if (kind := rng.random()) < 0.15:
            del owner[last]
        elif kind < 0.25 and isinstance(owner, dict):
            owner[rng.choice(["x", "type", "id", "content"])] = copy.deepcopy(owner[last])
        elif kind < 0.4:
            other = document
            for key in rng.choice(places):
                with contextlib.suppress(KeyError, IndexError, TypeError):
                    other = other[key]
            owner[last] = copy.deepcopy(other)
        else:
            owner[last] = copy.deepcopy(rng.choice(ODD))
    return json.dumps(document).encode()


def mutate_words(data: bytes, rng: random.Random) -> bytes:
    """Change, copy, insert or drop some of the words of a template."""
    words = re.findall(r"\w+|\{[{%#]-?|-?[}%#]\}|\s+|.", data.decode(errors="replace"), re.DOTALL)
    template = moa_runtime.chat_template
    known = [*_JINJA, *template._FILTERS, *(f".{name}(" for name in template._METHODS)]
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(words) + 1)
        until = at + rng.choice([0, 0, 1, 1, rng.randint(0, 20)])
        start = rng.randrange(len(words) + 1)
        copied = words[start : start + rng.randint(1, 20)]
        words[at:until] = rng.choice([[], [rng.choice(known)], [f" {rng.choice(known)} "], copied])
    return "".join(words).encode()


@contextlib.contextmanager
def fuzz_manifest(folder: Path) -> Iterator[Target]:
    from unit.runtime.test_bundle import MANIFEST

    files = {
        "graph.onnx": b"abc",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "Half.mlpackage/a": b"abc",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    valid = json.loads(MANIFEST.to_json())
    valid["files"] = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()
    }

    def run(data: bytes) -> None:
        (folder / "manifest.json").write_bytes(data)
        bundle = moa_runtime.bundle.Bundle.open(folder)
        bundle.manifest.stopping_rule  # noqa: B018  # what it reads may be wrong

    yield Target([json.dumps(valid).encode()], run, mutate_json)


@contextlib.contextmanager
def fuzz_tokenizer(folder: Path) -> Iterator[Target]:
    valid = json.loads(Path("tests/vectors/data/texts/tokenizer.json").read_text())
    others = [
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"}]}},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.0]], "byte_fallback": False}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ]

    def run(data: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(data)
        tokenizer = moa_runtime.tokenizer.ChatTokenizer(folder / "tokenizer.json", None, {}, [2])
        stream = moa_runtime.tokenizer.TextStream(tokenizer)
        for text in ("a" * 40, "Once upon ü 日本\n\t<|im_end|>", ""):
            tokens = tokenizer.encode(text)
            tokenizer.decode(tokens)
            for token in tokens[:5]:
                stream.push(token)
        tokenizer.decode([0, 10**6, 2**32 - 1])
        stream.finish()

    yield Target([json.dumps({**valid, **other}).encode() for other in ({}, *others)], run, mutate_json)


@contextlib.contextmanager
def fuzz_template(folder: Path) -> Iterator[Target]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 200}]
    seeds = [
        "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ loop.index }}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for a, b in messages[0].items() %}{% set n.x = n.x ~ a %}{% endfor %}",
        "{% macro f(a) %}{% if a is string and a not in ['x'] %}{{ a.split()[0] }}{% endif %}{% endmacro %}{{ f(1) }}",
        "{% for m in messages recursive %}{{ loop([m]) if loop.depth < 3 else m | tojson }}{% endfor %}",
        "{% set x %}a{% endset %}{% filter upper %}{{ '%s' | format(x * 3) }}{% endfilter %}{{ range(9) | last }}",
    ]

    def run(data: bytes) -> None:
        source = data.decode(errors="surrogateescape")
        moa_runtime.chat_template.ChatTemplate(source, {"bos_token": "<s>"}).render(messages, True)

    yield Target([seed.encode() for seed in seeds], run, mutate_words, [word.encode() for word in _JINJA])


@contextlib.contextmanager
def fuzz_gguf(folder: Path) -> Iterator[Target]:
    from support.drafter.gguf_files import write_gguf

    file = folder / "a.gguf"
    write_gguf(make_tiny_target(folder / "target"), file)
    whole, kept = file.read_bytes(), 1 << 14  # the tensors' bytes are added to each input

    def run(data: bytes) -> None:
        file.write_bytes(data + whole[kept:])
        weights = moa_decoder.gguf_weights.GgufWeights([file])
        for layer in range(len(weights.spec.layers)):
            weights.matrix(layer, "down")
        moa_drafter.gguf_tokenizer.tokenizer_of("b", weights.metadata, weights.spec.vocab_size)
        moa_drafter.gguf_tokenizer.special_tokens("b", weights.metadata)

    words = [number.to_bytes(8, "little") for number in (0, 1, 8, 9, 2**31, 2**32, 2**63, 2**64 - 1)]
    words += [b"general.architecture", b"tokenizer.ggml.tokens", b"llama.", b"split."]
    yield Target([whole[:kept]], run, words=words)


@contextlib.contextmanager
def fuzz_gateway(folder: Path) -> Iterator[Target]:
    from integration.chat.test_gateway_app import HERE, PooledChat, app_of, finished, update

    class Endless(list[Any]):
        def pop(self, index: Any = 0) -> Any:
            return self[index]

    async def connect(needs_verifier: bool) -> PooledChat:
        chat = PooledChat()
        chat._scripts = Endless([[update("a"), finished("ab")]])
        return chat

    client = httpx.AsyncClient(transport=httpx.ASGITransport(app_of(connect)), base_url=HERE, timeout=20)
    loop = asyncio.new_event_loop()
    common: dict[str, Any] = {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 5}
    common |= {"stop": ["x"], "n": 2, "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}}
    common |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": False, "user": "a"}
    turn = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    answered = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "a", "description": "b", "parameters": schema}}
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"a": "b"}'}}
    called = [turn, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "c"}]
    bodies: list[dict[str, Any]] = [{"messages": [turn, {"role": "assistant", "content": "a"}, turn], **common}]
    bodies += [{"prompt": "a", **common}, {"messages": [turn], "response_format": answered}, {"prompt": ["a"]}]
    bodies += [{"messages": called, "tools": [tool], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2}]
    bodies += [{"input": "a", "stream": True, "instructions": "b"}, {"input": [turn], "tools": [{**tool["function"]}]}]
    paths = {b'"messages"': "/v1/chat/completions", b'"input"': "/v1/responses"}

    def run(data: bytes) -> None:
        path = next((path for word, path in paths.items() if word in data), "/v1/completions")
        answer = loop.run_until_complete(client.post(path, content=data))
        if answer.status_code >= 500 and answer.status_code != 503:
            raise RuntimeError(f"{answer.status_code}: {answer.text[:200]}")

    yield Target([json.dumps(body).encode() for body in bodies], run, mutate_json)


@contextlib.contextmanager
def fuzz_client(folder: Path) -> Iterator[Target]:
    """The client's session: an input is the frames of a server, each after its length, two bytes."""
    engine, frames = ToyEngine(), []

    class Recording(Client):
        def exchange(self) -> None:
            received, take = [], self.session.receive
            self.session.receive = lambda data: (received.append(data), take(data))[1]  # type: ignore[method-assign]
            super().exchange()
            del self.session.receive
            frames.extend(received)

    with serving(engine, Settings()) as verifier:
        recording = Recording(verifier, engine)
        recording.connect()
        recording.session.prompt([5, 6, 7], Sampling(), 9)
        recording.rounds(lambda tokens: [4, 5])
        recording.settle()
        recording.socket.close()

    def run(data: bytes) -> None:
        session = moa_runtime.session.client.ClientSession(PRINTS, stop_tokens=engine.stop_tokens)
        session.prompt([5, 6, 7], Sampling(), 9)
        session.connect()
        while data:
            session.frames_to_send()
            size, data = int.from_bytes(data[:2], "big"), data[2:]
            session.receive(data[:size])
            data = data[size:]
            if session.may_propose and not session.tentative:
                session.extend([4, 5], Origin.DRAFTED)
                session.propose()

    yield Target([b"".join(len(each).to_bytes(2, "big") + each for each in frames)], run)


class _Edge:
    """A verifier with the toy engine, and what its process logs."""

    def __init__(self, verifier: Verifier) -> None:
        self.victim, self.errors = Victim(verifier.port, PRINTS), []
        self.steps = verifier.parts.engine.steps
        handler = logging.Handler(logging.ERROR)
        handler.emit = self.errors.append  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        self.sent = 0

    def exchange(self, data: bytes) -> None:
        """Send and take all that comes; then ask something honest, now and then."""
        try:
            self._send(data)
        except TimeoutError:  # this process may have been stopped meanwhile
            self._send(data)
        self.sent += 1
        if self.sent % 100 == 0:
            self.steps.clear()  # the toy keeps each step for tests: a gigabyte of them takes seconds to look through
            answer = httpx.get(f"http://127.0.0.1:{self.victim.port}/healthz", timeout=60)
            opened = len(list(Path("/proc/self/fd").iterdir()))
            if answer.status_code != 200 or opened > 100:
                raise RuntimeError(f"{answer.status_code}, {opened} descriptors")
        if self.errors:
            record = self.errors.pop(0)
            raise RuntimeError(f"{record.getMessage()} {record.exc_info}")

    def _send(self, data: bytes) -> None:
        with self.victim.open() as connected, contextlib.suppress(ConnectionError):
            connected.sendall(data)
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(1 << 16):
                pass


@contextlib.contextmanager
def fuzz_http(folder: Path) -> Iterator[Target]:
    with serving(ToyEngine(), Settings(idle_seconds=2)) as verifier:
        edge = _Edge(verifier)
        body = b'{"tokens": [5, 6, 7], "max_new_tokens": 5, "stream": true}'
        post = edge.victim.head("POST /v1/decode", f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n")
        chunked = edge.victim.head("POST /v1/decode", "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n")
        seeds = [post + body, chunked + b'5;a=b\r\n{"tok\r\n35\r\n' + body[5:] + b"\r\n0\r\nx: y\r\n\r\n"]
        seeds += [edge.victim.head(f"GET {path}") for path in ("/healthz", "/v1/status?x=%00", "/metrics", "//..%2f")]
        words = [b"\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"HTTP/1.0", b"OPTIONS"]
        words += [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"Upgrade: h2c\r\n", b"Host: \r\n"]
        words += [b"Connection: keep-alive\r\n", b"Origin: null\r\n", b"Authorization: Bearer \r\n", b"\xff"]
        yield Target(seeds, edge.exchange, words=words)


@contextlib.contextmanager
def fuzz_websocket(folder: Path) -> Iterator[Target]:
    """Frames after an upgrade: bytes if the input's first one is even; else the messages that follow, each after its
    length, two bytes, after a Hello."""
    greeting = message(hello())
    said = [prompt(1, 0, [5, 6, 7], 1, 9), draft(1, 4, [4, 5], [0, 1])]
    said += [wire.ClientMessage(), prompt(2, 4, [8]), hello("x")]
    payloads = [each.SerializeToString() for each in said]
    framed = b"".join(len(each).to_bytes(2, "big") + each for each in payloads)
    kinds = frame(TEXT, b"x") + frame(PING, b"abc") + frame(BINARY, b"ab", False) + frame(CONT, b"c")
    kinds += frame(CLOSE, b"\x03\xe8")
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with serving(ToyEngine(), Settings(idle_seconds=2)) as verifier:
        edge = _Edge(verifier)
        head = edge.victim.head("GET /v1/session", upgrade)

        def run(data: bytes) -> None:
            sent, rest = [head], data[1:]
            if data[:1] and data[0] % 2:
                sent.append(greeting)
                while rest:
                    size = int.from_bytes(rest[:2], "big")
                    sent.append(frame(BINARY, rest[2 : 2 + size]))
                    rest = rest[2 + size :]
            edge.exchange(b"".join([*sent, rest]))

        yield Target([b"\1" + framed, b"\0" + greeting + b"".join(map(message, said)), b"\0" + kinds], run)


TARGETS = {name.removeprefix("fuzz_"): found for name, found in list(globals().items()) if name.startswith("fuzz_")}


def main() -> None:
    """Fuzz one target; print each finding, and at the end the number of inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="(default: %(default)d)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)d)")
    options = parser.parse_args()
    found: set[str] = set()
    count = accepted = 0
    with tempfile.TemporaryDirectory() as name, TARGETS[options.target](Path(name)) as target:
        until = time.monotonic() + options.seconds

        def report(kind: str, text: str, data: bytes) -> None:
            if kind not in found:
                found.add(kind)
                print(f"finding: {kind}\n{text}\n{data[:2000]!r}", flush=True)

        def one(data: bytes) -> None:
            nonlocal count, accepted
            count, began = count + 1, time.process_time()
            try:
                target.run(data)
                accepted += 1
            except MoaError:
                pass
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                report(f"{type(error).__name__} in {at.name}:{at.lineno}", traceback.format_exc(), data)
            if (took := time.process_time() - began) > SLOW_S:
                report(f"slow {hashlib.sha256(data[:200]).hexdigest()[:8]}", f"{took:.1f} s", data)
            if time.monotonic() > until:
                print(f"{options.target}: {count} inputs, {accepted} accepted, {len(found)} findings", flush=True)
                os._exit(bool(found))

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            rng = random.Random(seed)
            if target.mutate is not None and rng.random() < 0.8:
                with contextlib.suppress(ValueError, RecursionError):
                    return target.mutate(data, rng)[:most]
            return bytes(atheris.Mutate(data, most))

        corpus, words = Path(name) / "corpus", Path(name) / "words"
        corpus.mkdir()
        for index, seed in enumerate(target.seeds):
            (corpus / str(index)).write_bytes(seed)
        limits = [
            "-max_len=200000",
            "-timeout=1200",
            "-rss_limit_mb=4096",
            "-verbosity=0",
            "-report_slow_units=9999",
            f"-seed={options.seed}",
        ]
        if target.words:
            escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
            words.write_text("".join(f'"{word}"\n' for word in escaped))
            limits.append(f"-dict={words}")
        atheris.Setup([sys.argv[0], *limits, str(corpus)], one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
