"""A verifier and a client as processes that can be killed at any moment, and what the client's user sees."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.conversation import Conversation
from moa_runtime.events import AnswerUpdate
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer, TextStream
from moa_runtime.transport import Endpoint, Timing

QUESTIONS = ("Name three primary colours.", "And why?")
#: Several connections in the second that a program may live.
_TIMING = Timing(first_backoff=0.05, longest_backoff=0.2)
_START_S = 120.0


@dataclass(frozen=True)
class Setting:
    """What both programs need to know.

    Attributes:
        folder: has, of conversation n, ``chat-n.json`` (the store), ``seen-n`` (confirmed text that was shown, a JSON
            line each), ``done-n`` (tokens and turns, at its end); and the ``log`` of both.
        options: of moa-serve.
        temperature: 0 is greedy. Answer k of conversation n has the seed ``100 * (n % 8) + k``.
        length: tokens of an answer, at most.
    """

    folder: Path
    bundle: Path
    port: int
    options: tuple[str, ...]
    temperature: float
    length: int

    def sampling(self, conversation: int, answer: int) -> Sampling:
        return Sampling(self.temperature, 0.95, 100 * (conversation % 8) + answer) if self.temperature else Sampling()

    def file(self, kind: str, conversation: int) -> Path:
        return self.folder / f"{kind}-{conversation}"

    @property
    def enough(self) -> Path:
        """While it is not there, one conversation follows the other."""
        return self.folder / "enough"


class VerifierProgram:
    """The verifier. A fork of a program that has imported everything starts in a fraction of a second."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._context = multiprocessing.get_context("forkserver")
        preload = ["moa_server.cli", "moa_server.engine.onnx_engine", "support.system.killed"]
        self._context.set_forkserver_preload(preload)
        self.verifier = self._start(serve)
        self._decoded: dict[str, list[int]] = {}

    @property
    def log(self) -> str:
        return (self.setting.folder / "log").read_text()

    def kill(self, who: str) -> None:
        """SIGKILL, and start it again."""
        process: BaseProcess = getattr(self, who)
        assert process.is_alive(), f"the {who} ended:\n{self.log}"
        process.kill()
        process.join()
        setattr(self, who, self._start(serve if who == "verifier" else talk))

    def decode(self, tokens: list[int], count: int, sampling: Sampling) -> list[int]:
        """What the target writes alone; it is asked once for each."""
        body = {"tokens": tokens, "max_new_tokens": count, "temperature": sampling.temperature}
        body |= {"top_p": sampling.top_p, "seed": sampling.seed}
        if str(body) not in self._decoded:
            self._decoded[str(body)] = self._decode(body)
        return self._decoded[str(body)]

    def _decode(self, body: dict[str, Any]) -> list[int]:
        url, deadline = f"http://127.0.0.1:{self.setting.port}/v1/decode", time.monotonic() + _START_S
        while True:
            try:
                answer = httpx.post(url, json=body, timeout=_START_S).raise_for_status().json()
                return list(answer["tokens"])
            except httpx.ConnectError:  # it is still starting
                assert time.monotonic() < deadline and self.verifier.is_alive()
                time.sleep(0.05)

    def close(self) -> None:
        self.verifier.kill()
        self.verifier.join()

    def _start(self, program: Any) -> BaseProcess:
        process = self._context.Process(target=program, args=(self.setting,), daemon=True)
        process.start()
        return process


class Programs(VerifierProgram):
    """With the client."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.client = self._start(talk)

    def finish(self, within_s: float) -> None:
        """Let the client end its conversation."""
        self.setting.enough.touch()
        self.client.join(within_s)
        assert self.client.exitcode == 0, (
            f"the client has status {self.client.exitcode} after {within_s} s:\n{self.log}"
        )

    def close(self) -> None:
        self.client.kill()
        self.client.join()
        super().close()


def check(program: VerifierProgram, conversation: int) -> None:
    """Every question has its whole answer, which begins with all that was ever shown as confirmed."""
    setting = program.setting
    done = json.loads(setting.file("done", conversation).read_text(encoding="utf-8"))
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(setting.bundle))
    expected, tokens = Conversation(tokenizer), []
    for answer, text in enumerate(QUESTIONS):
        question = expected.ask(tokens, text)
        prompt = tokens[: question.kept] + question.supplied
        written = program.decode(prompt, setting.length, setting.sampling(conversation, answer))
        tokens = prompt + written
        stream = TextStream(tokenizer)
        cut = len(written) == setting.length  # half a character at its end is left out
        expected.answered(question, "".join(map(stream.push, written)) + ("" if cut else stream.finish()), len(tokens))
    assert done["messages"] == expected.messages, f"conversation {conversation}"
    assert done["tokens"] == tokens
    for line in setting.file("seen", conversation).read_text(encoding="utf-8").splitlines():
        answer, shown = json.loads(line)
        assert expected.messages[2 * answer + 1]["content"].startswith(shown)


def serve(setting: Setting) -> None:
    """The verifier."""
    from moa_server.cli import main

    _log_to(setting.folder / "log")
    sys.exit(main(["--port", str(setting.port), "--threads", "1", *setting.options]))


def talk(setting: Setting) -> None:
    """The client."""
    _log_to(setting.folder / "log")
    asyncio.run(_talk(setting))


def _log_to(file: Path) -> None:
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)


async def _talk(setting: Setting) -> None:
    bundle, conversation = Bundle.open(setting.bundle), 0
    while setting.file("done", conversation).exists():
        conversation += 1
    while not setting.enough.exists() or any(setting.folder.glob(f"chat-{conversation}.json")):
        await _converse(setting, bundle, conversation)
        conversation += 1


async def _converse(setting: Setting, bundle: Bundle, conversation: int) -> None:
    store = setting.folder / f"chat-{conversation}.json"
    options: dict[str, Any] = {"threads": 1, "timing": _TIMING, "store": store, "wait": False}
    async with await Chat.connect(bundle, Endpoint(f"ws://127.0.0.1:{setting.port}"), **options) as chat:
        assert not chat.store_problem, chat.store_problem
        with setting.file("seen", conversation).open("a", encoding="utf-8") as seen:
            while (answer := len(chat.messages) // 2) < len(QUESTIONS):
                text = QUESTIONS[answer]
                sampling = setting.sampling(conversation, answer)
                events = chat.pending() or chat.send(text, max_new_tokens=setting.length, sampling=sampling)
                async with contextlib.aclosing(events):
                    async for event in events:
                        assert chat.question == text
                        # What it has when it is killed is in the system's hands, no disk needed.
                        if isinstance(event, AnswerUpdate):
                            print(json.dumps([answer, event.committed]), file=seen, flush=True)
        done = setting.file("done", conversation)
        unfinished = done.with_suffix(".new")
        unfinished.write_text(json.dumps({"tokens": chat.tokens, "messages": chat.messages}), encoding="utf-8")
        unfinished.replace(done)
