"""Rounds of the TypeScript runtime beside those of Python's, on the same graph, questions and answers.

``PYTHONPATH=tests python tools/typescript_rounds.py --bundle BUNDLE --questions FILE --answers FILE --limit 12``: the
answers as ``moa-bench accept --replay --answers`` keeps them. One JSON object a shape.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from moa_bench.accept import AcceptSettings
from moa_bench.harness import Conversation, Device, LoopbackVerifier, Round, device_of
from moa_bench.questions import Question
from moa_bench.target_answers import AnswerFile, ReplayEngine, write_answers
from moa_export.targets.web import WebEngine
from moa_runtime.bundle import Bundle
from moa_runtime.session.events import Sampling
from moa_server.engine.base import Engine
from support.web.typescript import WEB

_PROGRAM = WEB / "dist" / "test" / "device_program.js"
_SAMPLING = Sampling()
#: Nodes that a step of a tree continues, as the program in Node has it.
WIDTH = 8


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


@dataclass
class Rounds:
    """Of all questions."""

    questions: int = 0
    tokens: int = 0
    python: int = 0
    typescript: int = 0
    same_answers: int = 0
    same_rounds: int = 0


def count(
    bundle: Bundle, engine: Engine, node: WebEngine, questions: Iterable[Question], settings: AcceptSettings
) -> Rounds:
    """Have both answer the first turn of each question; ``engine`` verifies."""
    device, found = device_of(bundle, "web"), Rounds()
    with TypeScriptDevice(node, bundle.folder, settings.draft_length, settings.nodes) as typescript:
        for question in questions:
            tokens = device.tokenizer.continue_chat([], [], question.turns[0])
            ours, rounds = _python(device, engine, tokens, settings)
            verifier = LoopbackVerifier(engine)
            theirs, judged = typescript.answer(verifier, tokens, most=settings.max_new_tokens, fresh=True)
            verifier.close()
            found.questions += 1
            found.tokens += len(ours)
            found.python += rounds
            found.typescript += judged
            found.same_answers += ours == theirs
            found.same_rounds += rounds == judged
    return found


def _python(device: Device, engine: Engine, tokens: list[int], settings: AcceptSettings) -> tuple[list[int], int]:
    verifier, rounds = LoopbackVerifier(engine), list[Round]()
    conversation = Conversation(
        verifier, device.new_drafter(), device.fingerprints, device.stop_tokens, settings.controller()
    )
    most = settings.max_new_tokens
    answer = conversation.answer(tokens, _SAMPLING, max_new_tokens=most, on_round=rounds.append)
    verifier.close()
    return answer.tokens, len(rounds)


def main() -> None:
    from moa_bench.harness import engine_of
    from moa_bench.options import add_question_options, add_target_options, questions_of
    from moa_export.targets.base import NotRun
    from moa_export.targets.web import find_engine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    add_question_options(parser)
    add_target_options(parser)
    args = parser.parse_args()
    node = find_engine(npm=False)
    if isinstance(node, NotRun):
        sys.exit(node.reason)
    bundle, questions = Bundle.open(args.bundle), questions_of(args)
    engine = engine_of(args)
    kept = AnswerFile(
        args.answers, engine.fingerprints.target, args.max_new_tokens, _SAMPLING, vocab_size=engine.vocab_size
    )
    answers = write_answers(
        engine,
        questions,
        device_of(bundle, "web").tokenizer,
        max_new_tokens=args.max_new_tokens,
        sampling=_SAMPLING,
        known=kept.answers,
        on_answers=kept.add,
    )
    for settings in (
        AcceptSettings(6, max_new_tokens=args.max_new_tokens),
        AcceptSettings(6, 32, WIDTH, max_new_tokens=args.max_new_tokens),
    ):
        found = count(bundle, ReplayEngine(engine, answers), node, questions, settings)
        print(json.dumps({"levels": settings.draft_length, "nodes": settings.nodes, **asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
