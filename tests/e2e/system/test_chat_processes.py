"""A chat with a verifier that is a process, which is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from moa_runtime.bundle import Bundle
from moa_runtime.events import AnswerUpdate, ChatEvent
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint
from support.server.running import Verifier
from support.system.asking import ask, chatting, own_decoding


class ServeProcess:
    """``moa-serve`` as a program of its own, so that it can be killed."""

    def __init__(self, root: Path, port: int, *more: str) -> None:
        command = [sys.executable, "-c", "import sys; from moa_server.cli import main; sys.exit(main())"]
        options = ["--model", root / "target", "--drafter", root / "drafter", "--port", port, "--json", *more]
        self._process = subprocess.Popen([*command, *map(str, options)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(json.loads(self._process.stdout.readline())["port"])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_killed_verifier_goes_on_with_the_answer(tiny_target: Path, bundle: Bundle, verifier: Verifier) -> None:
    """SIGKILL in the middle of an answer: the next process knows nothing, and continues it token for token."""

    async def run() -> None:
        process = ServeProcess(tiny_target.parent, 0)
        try:
            async with chatting(bundle, Endpoint(f"ws://127.0.0.1:{process.port}")) as chat:
                begun = asyncio.Event()

                def watch(event: ChatEvent) -> None:
                    if isinstance(event, AnswerUpdate) and sum(t.committed for t in event.tokens) >= 4:
                        begun.set()

                question = asyncio.create_task(ask(chat, count=200, watch=watch))
                await begun.wait()
                process.kill()
                process = await asyncio.to_thread(ServeProcess, tiny_target.parent, process.port)
                answer = await question
                assert answer.statistics.reconnects == 1
                # The other verifier serves the same target.
                assert [t.token for t in answer.tokens] == own_decoding(verifier, chat, answer, 200, Sampling())
        finally:
            process.kill()

    asyncio.run(run())
