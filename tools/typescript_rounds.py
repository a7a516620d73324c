"""Rounds of the TypeScript runtime beside those of Python's, on the same graph, questions and answers.

``PYTHONPATH=tests python tools/typescript_rounds.py --bundle BUNDLE --questions FILE --answers FILE --limit 12``: the
answers as ``moa-bench accept --replay --answers`` keeps them. One JSON object a shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from moa_bench.accept import AcceptSettings
from moa_bench.harness import Conversation, Device, LoopbackVerifier, Round, device_of
from moa_bench.questions import Question
from moa_bench.target_answers import AnswerFile, ReplayEngine, write_answers
from moa_export.targets.web import WebEngine
from moa_runtime.bundle import Bundle
from moa_runtime.session.events import Sampling
from moa_server.engine.base import Engine
from support.web.typescript import TypeScriptDevice

_SAMPLING = Sampling()
#: Nodes that a step of a tree continues, as the program in Node has it.
WIDTH = 8


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
