"""The TypeScript runtime in Node, as a device whose verifier is in this process."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moa_bench.harness import LoopbackVerifier
from moa_export.targets.web import WebEngine
from moa_runtime.bundle import Bundle
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from support.server.running import Verifier
from support.system.asking import QUESTION

WEB = Path(__file__).parents[3] / "runtime" / "web"
_PROGRAM = WEB / "dist" / "test" / "device_program.js"


def client_command(
    web: Path, bundle: Path, port: int, file: Callable[[str], Path], samplings: Sequence[Sampling], **given: Any
) -> list[str]:
    """The command of a program that asks questions one after the other, and can be killed at any moment.

    Args:
        file: path of ``chat`` (the store), ``seen`` and ``done``, see ``runtime/web/test/system_client.ts``.
        samplings: of each question.
        given: ``token``, ``questions``, ``drafting``, ``length``.
    """
    given |= {"bundle": str(bundle), "url": f"ws://127.0.0.1:{port}"}
    given |= {"store": str(file("chat")), "seen": str(file("seen")), "done": str(file("done"))}
    given["samplings"] = [{"temperature": s.temperature, "top_p": s.top_p, "seed": str(s.seed)} for s in samplings]
    return ["node", str(web / "dist" / "test" / "system_client.js"), json.dumps(given)]


def target_writes(bundle: Path, verifier: Verifier, length: int, sampling: Sampling) -> str:
    """The target's own answer to :data:`QUESTION`."""
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    return tokenizer.decode(verifier.decode(prompt, length, sampling))


class TypeScriptDevice:
    """Opens with ``with``. Session, loop and drafter are those of ``runtime/web``, its graph runs in onnxruntime-web.

    Args:
        bundle: its folder.
        levels, nodes: of the drafts, trees that continue 8 nodes a step; no nodes, and they are chains.
    """

    def __init__(self, engine: WebEngine, bundle: Path, levels: int, nodes: int | None = None) -> None:
        self._command = [engine.node, _PROGRAM, bundle, engine.module, str(levels), str(nodes or 0)]

    def __enter__(self) -> TypeScriptDevice:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def answer(
        self, verifier: LoopbackVerifier, question: Sequence[int], *, most: int, fresh: bool
    ) -> tuple[list[int], int]:
        """The committed tokens of an answer, and the drafts that were judged for it.

        Args:
            question: tokens of the user's turn, up to where the answer begins.
            most: tokens of the answer.
            fresh: whether a new conversation begins.
        """
        self._say({"ask": list(question), "most": most, "fresh": fresh})
        while "answer" not in (said := self._hear()):
            frames = [answer for frame in said["frames"] for answer in verifier.receive(base64.b64decode(frame))]
            self._say({"frames": [base64.b64encode(frame).decode() for frame in frames]})
        return said["answer"], said["rounds"]

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(next(self._process.stdout))  # type: ignore[no-any-return]
