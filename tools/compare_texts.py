"""Compare the texts of two engines token by token, and tell a rounding difference from a real one.

``python tools/compare_texts.py`` compares vLLM with the transformers engine on the default target, greedily and
sampled; it exits with 1 if a token differs by more than rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import chain
from moa_server.engine.base import Engine, Float32, new_sequence
from moa_server.engine.baseline import BlockingEngine, decode
from moa_server.engine.sampling import choose
from moa_server.scheduling.verify_job import Job

#: Changes of all logits that are tried, the smallest first.
CHANGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
#: Engines in float32 differ by at most this much in a logit, because they sum in another order.
ROUNDING = 1e-3
_TRIES = 64
#: Lengths of drafts (tokens), drawn at random, and the share of their tokens that is wrong.
_LENGTHS = (0, 1, 2, 4, 8, 16)
_WRONG = 0.2
_SAMPLED = Sampling(0.8, 0.95, 7)


@dataclass(frozen=True)
class Difference:
    """A position at which the engines choose different tokens.

    Attributes:
        question: number of the question, from 0.
        position: of the token in the answer, from 0.
        expected, found: the choices of the first and of the second engine.
        nearness: see :func:`nearness`.
    """

    question: int
    position: int
    expected: int
    found: int
    nearness: float | None

    @property
    def beyond_rounding(self) -> bool:
        """Whether rounding does not explain it."""
        return self.nearness is None or self.nearness > ROUNDING


@dataclass
class Comparison:
    """Counts of questions and of compared tokens, and all differences found."""

    questions: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


def compare(
    prompts: Iterable[Sequence[int]],
    engines: tuple[Engine, Engine],
    logits: Callable[[Sequence[int]], Float32],
    sampling: Sampling,
    max_new_tokens: int,
) -> Comparison:
    """Let the first engine write each answer alone and the second one verify drafts of it.

    Drafts have any length, and a fifth of their tokens is wrong. After a difference the comparison continues with the
    first engine's token, so whole answers are compared.

    Args:
        prompts: token ids of each question.
        logits: of the first engine after a text, ``[vocab_size]``.
    """
    first, second = engines
    found = Comparison()
    with contextlib.closing(BlockingEngine(second)) as verifying:
        for number, prompt in enumerate(prompts):
            rng = random.Random(number)
            expected = [token.token for token in decode(first, prompt, sampling, max_new_tokens)]
            for at, token in _differing(verifying, prompt, expected, sampling, rng):
                text = [*prompt, *expected[:at]]
                near = nearness(logits(text), sampling, len(text), token, rng)
                found.differences.append(Difference(number, at, expected[at], token, near))
            found.questions, found.tokens = found.questions + 1, found.tokens + len(expected)
    return found


def nearness(logits: Float32, sampling: Sampling, position: int, token: int, rng: random.Random) -> float | None:
    """Return the smallest of :data:`CHANGES` that makes ``token`` the choice in one of 64 random tries.

    It covers ties of the likeliest token, of sampling noise and of top-p's edge alike. None if no change does it.

    Args:
        logits: ``[vocab_size]``.
        position: absolute position of the token, for the sampling noise.
    """
    noise = np.random.default_rng(rng.getrandbits(64))
    for change in CHANGES:
        for _ in range(_TRIES):
            moved = logits + noise.uniform(-change, change, len(logits)).astype(np.float32)
            if choose(moved, sampling, position) == token:
                return change
    return None


def _differing(
    engine: BlockingEngine, prompt: Sequence[int], expected: Sequence[int], sampling: Sampling, rng: random.Random
) -> list[tuple[int, int]]:
    """Return positions in the answer at which the engine chooses another token, and its choices."""
    sequence, at, places = new_sequence(), 0, []
    while at < len(expected):
        draft = [_perhaps_wrong(token, rng) for token in expected[at : at + rng.choice(_LENGTHS)]]
        job = engine.run(Job(sequence, [*prompt, *expected[:at]], sampling, draft, chain(len(draft))))
        assert job.token is not None
        for token in (*draft[: len(job.path)], job.token):
            if at == len(expected):
                break
            if token != expected[at]:
                places.append((at, token))
                at += 1
                break
            at += 1
    engine.release(sequence)
    return places


def _perhaps_wrong(token: int, rng: random.Random) -> int:
    return token if rng.random() >= _WRONG else max(0, token - 1)


def main() -> int:
    """Compare vLLM with transformers in float32 and print one JSON object."""
    from moa_server.engine.load import prepare_vllm

    parser = argparse.ArgumentParser(description="Compare vLLM's texts with those of the transformers engine.")
    parser.add_argument("--model", help="target: the built-in default, a folder, or a Hub id")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="Spec-Bench JSON lines (default: built-in)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens of an answer at most")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the targets")
    args = parser.parse_args()
    prepare_vllm(args.threads)
    # Imported late: all of this brings torch, which must find the prepared environment.
    from moa_bench.options import questions_of
    from moa_bench.questions import prompts_of
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_runtime.manifest import TOKENIZER_FILE
    from moa_runtime.tokenizer import ChatTokenizer
    from moa_server.engine.baseline import next_logits
    from moa_server.engine.torch_engine import load_torch_engine
    from moa_server.engine.vllm.engine import VllmEngine

    questions = questions_of(args)
    reference = load_torch_engine(args.model or DEFAULT_TARGET, None, dtype="float32")
    target = reference.target
    tokenizer = ChatTokenizer(
        target.folder / TOKENIZER_FILE, target.chat_template, target.special_tokens, target.stop_tokens
    )
    other = VllmEngine.load(str(target.folder), None, dtype="float32", threads=args.threads)
    logits = functools.partial(next_logits, reference)
    with contextlib.closing(reference), contextlib.closing(other):
        prompts = [prompt.tokens for prompt in prompts_of(questions, tokenizer, other.max_context)[0]]
        found = {
            name: compare(prompts, (reference, other), logits, sampling, args.max_new_tokens)
            for name, sampling in (("greedy", Sampling()), ("sampled", _SAMPLED))
        }
    print(json.dumps({name: asdict(each) for name, each in found.items()}))
    return int(any(difference.beyond_rounding for each in found.values() for difference in each.differences))


if __name__ == "__main__":
    sys.exit(main())
