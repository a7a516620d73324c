"""The TypeScript runtime takes the rounds that Python's takes: the same session, loop, drafter and graph."""

from __future__ import annotations

from moa_bench.accept import AcceptSettings
from moa_bench.questions import Question
from moa_runtime.bundle import Bundle
from moa_server.engine.torch_engine import load_torch_engine
from typescript_rounds import WIDTH, count

TURNS = ("Name three colours.", "Why is the sky blue?", "Say it again: the sky is blue, the sky is blue, the sky is")


def test_rounds_and_answers_are_pythons(compiled, web_bundle, web_engine_here, tiny_target, tiny_drafter):
    engine = load_torch_engine(str(tiny_target), tiny_drafter)
    questions = [Question(number, "all", (turn,)) for number, turn in enumerate(TURNS)]
    for settings in (AcceptSettings(4, max_new_tokens=24), AcceptSettings(3, 9, WIDTH, max_new_tokens=24)):
        found = count(Bundle.open(web_bundle), engine, web_engine_here, questions, settings)
        assert found.questions == found.same_answers == found.same_rounds == len(TURNS)
        assert found.python > 0 and found.tokens > len(TURNS)
