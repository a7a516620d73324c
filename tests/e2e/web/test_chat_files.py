"""A chat goes from Python to Node and back, in the middle of an answer: its file is the same."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent
from moa_runtime.session.events import Sampling
from support.server.running import Verifier
from support.system.asking import QUESTION, TIMEOUT_S, committed, endpoint
from support.web.typescript import client_command, target_writes

SAMPLING = Sampling(0.8, 0.9, 7)
LENGTH = 200


async def in_python(bundle: Path, verifier: Verifier, store: Path, enough: Callable[[ChatEvent], bool]) -> None:
    """Go on with the chat, or begin it, and close it at an event."""
    where = endpoint(verifier)
    async with await Chat.connect(Bundle.open(bundle), where, threads=1, store=store) as chat:
        assert not chat.store_problem
        events = chat.pending() or chat.send(QUESTION, max_new_tokens=LENGTH, sampling=SAMPLING)
        async with aclosing(events):
            async for event in events:
                if enough(event):
                    await chat.close()


def in_node(compiled: Path, bundle: Path, verifier: Verifier, store: Path, enough: int | None) -> dict[str, Any]:
    """Begin or continue the chat; kill the program when the file has this number of tokens of the answer."""
    command = client_command(
        compiled,
        bundle,
        verifier.port,
        lambda kind: store if kind == "chat" else store.with_name(kind),
        [SAMPLING],
        token=verifier.token,
        questions=[QUESTION],
        drafting="device",
        length=LENGTH,
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            if enough is not None:
                while written(store) < enough:
                    assert process.poll() is None, process.stderr and process.stderr.read().decode()
                process.kill()
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert enough is not None or process.returncode == 0, errors.decode()
    return {} if enough is not None else json.loads(store.with_name("done").read_text(encoding="utf-8"))


def written(store: Path) -> int:
    """Tokens of the answer in the file."""
    answer = json.loads(store.read_text(encoding="utf-8"))["answer"] if store.exists() else None
    return sum(length for _, length in answer["origins"]) if answer else 0


def test_from_python_to_node(compiled: Path, onnx_bundle: Path, verifier: Verifier, tmp_path: Path) -> None:
    store = tmp_path / "chat.json"
    asyncio.run(in_python(onnx_bundle, verifier, store, lambda event: committed(event) >= 8))
    assert 8 <= written(store) < LENGTH
    done = in_node(compiled, onnx_bundle, verifier, store, None)
    assert [turn["content"] for turn in done["messages"]] == [
        QUESTION,
        target_writes(onnx_bundle, verifier, LENGTH, SAMPLING),
    ]


def test_from_node_to_python(compiled: Path, onnx_bundle: Path, verifier: Verifier, tmp_path: Path) -> None:
    store, seen = tmp_path / "chat.json", list[ChatEvent]()
    in_node(compiled, onnx_bundle, verifier, store, 1)
    held = written(store)
    assert 1 <= held < LENGTH
    asyncio.run(in_python(onnx_bundle, verifier, store, lambda event: bool(seen.append(event))))
    first, last = seen[0], seen[-1]
    assert isinstance(first, AnswerUpdate) and committed(first) == held
    assert isinstance(last, AnswerFinished) and last.text == target_writes(onnx_bundle, verifier, LENGTH, SAMPLING)
