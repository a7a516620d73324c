"""Compare the answers of a target in 4 and 8 bits with those in float32, on a processor.

    python tools/compare_types.py --questions spec_bench_dev.jsonl --types int4,int8

Each question is answered greedily in float32 and in each type. ``perplexity_ratio`` is the perplexity of float32's
answers in a type by that in float32, ``equal_answers`` the share of answers with the same tokens, ``equal_tokens`` the
mean share of an answer's tokens before the first other one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from moa_bench.options import names_of, questions_of
from moa_bench.questions import prompts_of
from moa_bench.result import rounded
from moa_drafter.progress import Progress
from moa_drafter.target_source import DEFAULT_TARGET
from moa_runtime.cli_main import run_program
from moa_runtime.manifest import TOKENIZER_FILE
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.tokens import common_length
from moa_server.engine.baseline import decode, log_probabilities
from moa_server.engine.engine import LocalEngine
from moa_server.engine.load import load_local

_TYPES = ("int4", "int8")


class TypeFigures:
    """Figures of one type.

    Args:
        engine: of the target in this type.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self._loss: list[float] = []
        self._equal: list[float] = []

    def add(self, prompt: Sequence[int], expected: Sequence[int], scores: np.ndarray, most: int) -> None:
        """Take a question, float32's answer and its log-probabilities in float32; ``most`` tokens are written."""
        own = [token.token for token in decode(self.engine, prompt, Sampling(), most)]
        self._loss += list(scores - log_probabilities(self.engine, prompt, expected))
        self._equal.append(common_length(own, expected) / max(len(own), len(expected)))

    def figures(self) -> dict[str, Any]:
        """Sum up."""
        return {
            "perplexity_ratio": round(exp(float(np.mean(self._loss))), 4),
            "equal_answers": rounded(sum(share == 1 for share in self._equal) / len(self._equal)),
            "equal_tokens": rounded(float(np.mean(self._equal))),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="Compare a target's answers in 4 and 8 bits with those in float32.")
    parser.add_argument("--model", default=DEFAULT_TARGET, help="target: the built-in default, a folder or a Hub id")
    parser.add_argument("--types", default=",".join(_TYPES), metavar="TYPE,...", help="(default %(default)s)")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="Spec-Bench JSON lines (default: built-in)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(default %(default)s)")
    args = parser.parse_args(argv)
    return run_program("compare_types", lambda: _compare(args))


def _compare(args: argparse.Namespace) -> int:
    types, questions = names_of("--types", "type", args.types, _TYPES), questions_of(args)
    with contextlib.ExitStack() as running:
        engines = {}
        for dtype in ("float32", *types):
            engine = load_local(args.model, None, dtype=dtype, threads=args.threads, accept_rounding=True)
            engines[dtype] = running.enter_context(contextlib.closing(engine))
        exact = engines.pop("float32")
        target = exact.target
        tokenizer = ChatTokenizer(
            target.folder / TOKENIZER_FILE, target.chat_template, target.special_tokens, target.stop_tokens
        )
        prompts, _ = prompts_of(questions, tokenizer, exact.max_context)
        found, tokens = {dtype: TypeFigures(engine) for dtype, engine in engines.items()}, 0
        for prompt in Progress(prompts, desc="compare", unit="question"):
            expected = [token.token for token in decode(exact, prompt.tokens, Sampling(), args.max_new_tokens)]
            scores = log_probabilities(exact, prompt.tokens, expected)
            tokens += len(expected)
            for each in found.values():
                each.add(prompt.tokens, expected, scores, args.max_new_tokens)
    result = {"questions": len(prompts), "tokens": tokens}
    print(json.dumps(result | {dtype: each.figures() for dtype, each in found.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
