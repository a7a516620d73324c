"""The TypeScript runtime in Node, as a device whose verifier is in this process."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moa_bench.harness import LoopbackVerifier
from moa_export.targets.web import WebEngine

WEB = Path(__file__).parents[3] / "runtime" / "web"
_PROGRAM = WEB / "dist" / "test" / "device_program.js"


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
