"""``moa-bench engines`` on the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from typing import Any

from moa_bench.engines import present
from moa_bench.options import (
    add_command,
    add_question_options,
    check_at_least,
    questions_of,
    sampling_of,
)
from moa_bench.output import INTERRUPTED
from moa_bench.result import result_of
from moa_runtime.session.sampling import Sampling
from moa_server.options import DTYPES

_DESCRIPTION = """\
Compare the texts of moa-serve --engine vllm with those of the transformers engine, on the same target.

The transformers engine writes the answer to every question alone, greedily, and once more sampled. vLLM verifies drafts
of it: up to 16 tokens, a fifth of them wrong. Where it chooses another token the place is listed, and it goes on behind
the expected one, so whole answers are compared.

differing         places where the choices differ
beyond rounding   those at which no change of the logits by 0.001 leads to vLLM's choice; none may be in float32
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "engines", "whether vLLM writes what transformers writes", _DESCRIPTION, run)
    add_question_options(parser, required=False)
    parser.add_argument("--model", help="target: the built-in default, a folder, or a Hub id")
    parser.add_argument("--dtype", choices=DTYPES[1:], default=DTYPES[1], help="of the target (default %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="tokens of an answer at most (default %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="of sampled answers; 0 for greedy ones alone (default %(default)s)",
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="of sampled answers (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of sampled answers (default %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the targets (default: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Compare and print; whole answers only, marked as partial, when interrupted.

    Returns:
        exit status: 0; 1 where a difference in float32 is beyond rounding; 130 after an interruption.

    Raises:
        MoaError: bad input, or vLLM is missing or of another release.
    """
    from moa_server.vllm_engine.environment import prepare

    check_at_least(args, max_new_tokens=1, threads=1)
    sampled, questions = sampling_of(args), questions_of(args)
    prepare(args.threads)
    # Imported late: all of this brings torch, which must find what was prepared.
    from moa_bench.engines.measure import Results, compare
    from moa_bench.prompts import prompts_of
    from moa_drafter.progress import Progress
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_runtime.bundle import TOKENIZER_FILE
    from moa_runtime.tokenizer import ChatTokenizer
    from moa_server.scoring import next_logits
    from moa_server.transformers_engine import TransformersEngine
    from moa_server.vllm_engine.engine import VllmEngine

    samplings = {"greedy": Sampling(), **({"sampled": sampled} if sampled.temperature else {})}
    found, problem = {name: Results() for name in samplings}, ""
    reference = TransformersEngine.load(args.model or DEFAULT_TARGET, None, dtype=args.dtype)
    target = reference.target
    tokenizer = ChatTokenizer(
        target.folder / TOKENIZER_FILE, target.chat_template, target.special_tokens, target.stop_tokens
    )
    other = VllmEngine.load(str(target.folder), None, dtype=args.dtype, threads=args.threads)
    with contextlib.closing(reference), contextlib.closing(other):
        prompts, skipped = prompts_of(questions, tokenizer, other.max_context)
        began = time.monotonic()
        try:
            for name, sampling in samplings.items():
                asked = Progress(prompts, desc=name, unit="question")
                logits = functools.partial(next_logits, reference)
                compare(asked, (reference, other), logits, sampling, args.max_new_tokens, found[name])
        except KeyboardInterrupt:
            problem = INTERRUPTED
    figures = {name: _figures(results) for name, results in found.items()}
    result = result_of(
        "engines",
        {"samplings": figures, "skipped": [dataclasses.asdict(question) for question in skipped]},
        settings={
            "questions": args.questions.name if args.questions else "built-in",
            "limit": args.limit,
            "max_new_tokens": args.max_new_tokens,
            "dtype": args.dtype,
            "sampling": dataclasses.asdict(sampled),
        },
        fingerprints=reference.fingerprints,
        seconds=time.monotonic() - began,
        problem=problem,
    )
    print(json.dumps(result) if args.json else "\n\n".join(table.text() for table in present.tables(result)))
    if problem:
        print(f"moa-bench: partial result: {problem}", file=sys.stderr)
        return 130
    return int(args.dtype == DTYPES[1] and any(each["beyond_rounding"] for each in figures.values()))


def _figures(results: Any) -> dict[str, Any]:
    from moa_bench.engines.nearness import ROUNDING

    beyond = [place for place in results.places if place.nearness is None or place.nearness > ROUNDING]
    return {**dataclasses.asdict(results), "beyond_rounding": len(beyond)}
