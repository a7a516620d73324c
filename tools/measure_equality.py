"""Compare the text that the verifier's engine writes from drafts with the text that it writes token by token.

    python tools/measure_equality.py --device cuda --dtype bfloat16,float32 --questions spec_bench.jsonl --limit 40
    python tools/measure_equality.py --shape smollm2-135m --device cuda       # random weights, random prompts
    python tools/measure_equality.py --device cuda --pass fused --rows 128    # all products padded to 128 rows

Each answer is written greedily, alone and token by token. Then drafts of it are verified, of up to 16 tokens, a fifth
of them wrong: alone, and eight sessions in a step. Where another token is chosen the place is listed and the session
continues after the expected one, so whole answers are compared. An answer with such a place is one whose text would
have differed from there on. ``again_differs`` counts answers that a second plain decoding changes.

``same_bits`` groups, for each operation of the passes, the numbers of rows that give a row the same bits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from moa_drafter.config import head_size
from moa_drafter.target import Target, load_target
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import chain
from moa_server.engine.base import StepRequest, new_sequence
from moa_server.engine.baseline import decode, next_logits
from moa_server.engine.engine import LocalEngine
from moa_server.engine.fused_llama import FusedLlama
from moa_server.engine.invariance import is_invariant
from moa_server.engine.torch_engine import torch_engine
from random_target import SHAPES, random_target

_LENGTHS = (0, 1, 2, 4, 8, 16)
_WRONG = 0.2
_AGAIN = 4
#: Numbers of rows to compare operations over: one, and numbers that the fused pass rounds up to.
_ROWS = (1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)


@dataclass
class Answer:
    """A prompt, and the answer as written token by token."""

    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True)
class Place:
    """A position at which another token than the expected one was chosen.

    Attributes:
        answer: its number, from 0.
        position: of the token in the answer, from 0.
        gap: logit of the expected token minus that of the chosen one, computed again in chunks of 128 tokens.
    """

    answer: int
    position: int
    gap: float


def verify_drafts(engine: LocalEngine, answers: Sequence[Answer], beside: int) -> list[Place]:
    """Let ``beside`` sessions at a time write the answers from drafts; return where they choose another token."""
    places = []
    for first in range(0, len(answers), beside):
        rng = random.Random(first)
        written = {number: 0 for number in range(first, min(first + beside, len(answers)))}
        sequences = {number: new_sequence() for number in written}
        while open_ := [number for number in written if written[number] < len(answers[number].expected)]:
            requests = []
            for number in open_:
                answer, at = answers[number], written[number]
                right = answer.expected[at : at + rng.choice(_LENGTHS)]
                draft = [token if rng.random() >= _WRONG else max(0, token - 1) for token in right]
                prefix = [*answer.prompt, *answer.expected[:at]]
                requests.append(StepRequest(sequences[number], prefix, draft, chain(len(draft)), Sampling()))
            for number, request, outcome in zip(open_, requests, engine.step_now(requests), strict=True):
                expected = answers[number].expected[written[number] :]
                chosen = [*(request.draft[index] for index in outcome.path), outcome.token][: len(expected)]
                agreed = next((i for i, token in enumerate(chosen) if token != expected[i]), len(chosen))
                if agreed < len(chosen):
                    logits = next_logits(engine, [*request.prefix, *expected[:agreed]])
                    gap = float(logits[expected[agreed]] - logits[chosen[agreed]])
                    places.append(Place(number, written[number] + agreed, gap))
                    agreed += 1  # after the expected one
                written[number] += agreed
        for sequence in sequences.values():
            engine.release(sequence)
    return places


def figures(answers: Sequence[Answer], places: Sequence[Place]) -> dict[str, Any]:
    """Count answers and tokens that differ; list where answers first do, and sum up the gaps."""
    first: dict[int, int] = {}
    for place in places:
        first[place.answer] = min(place.position, first.get(place.answer, place.position))
    return {
        "answers": len(answers),
        "tokens": sum(len(answer.expected) for answer in answers),
        "differing_answers": len(first),
        "differing_tokens": len(places),
        "first_at": sorted(first.values()),
        "largest_gap": round(max((abs(place.gap) for place in places), default=0.0), 5),
        "median_gap": round(statistics.median([abs(place.gap) for place in places] or [0.0]), 5),
    }


def plain_answers(engine: LocalEngine, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Answer]:
    """Write each answer alone and token by token."""
    return [
        Answer(prompt, [each.token for each in decode(engine, prompt, Sampling(), max_new_tokens)])
        for prompt in prompts
    ]


def prompts_for(options: argparse.Namespace, target: Target) -> list[list[int]]:
    """Return token ids of questions in the chat template, or random ones."""
    if options.questions is None:
        rng = random.Random(0)
        vocab_size = target.config.vocab_size
        return [[rng.randrange(vocab_size) for _ in range(rng.randint(20, 200))] for _ in range(options.limit)]
    lines = options.questions.read_text("utf-8").splitlines()[: options.limit]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    encode = target.tokenizer.apply_chat_template
    return [encode(chat, add_generation_prompt=True, return_dict=False)[-options.longest :] for chat in chats]


@torch.inference_mode()
def same_bits(target: Target, dtype: torch.dtype) -> dict[str, list[list[int]]]:
    """Group numbers of rows by operation: within a group, common rows have the same bits.

    In bfloat16 two orders of a sum often round to the same number, so groups may be too large there.
    """
    config, device = target.config, target.device
    layer, head = target.layers[0], target.model.get_output_embeddings()
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, head_size(config)
    most, blocks = max(_ROWS), 9  # of 64 keys

    def random_(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=kind)

    def attend(rows: int) -> Tensor:
        mask = torch.ones(rows, 512 + rows, dtype=torch.bool, device=device).tril(512)
        seen = [half[:, :, : 512 + rows] for half in halves]
        return functional.scaled_dot_product_attention(queries[:, :, :rows], *seen, attn_mask=mask)[0].transpose(0, 1)

    torch.manual_seed(0)
    wide = {"kind": torch.float32}
    states, inner = random_(most, config.hidden_size), random_(most, config.intermediate_size)
    scores, keys, weights = (
        random_(blocks * kv_heads, *rest, **wide) for rest in ((most, size), (size, 64), (most, 64))
    )
    queries, halves = random_(1, heads, most, size), [random_(1, heads, 512 + most, size) for _ in range(2)]
    operations: dict[str, Callable[[int], Tensor]] = {
        "norm": lambda rows: torch.linalg.vector_norm(states[:rows].float(), dim=-1),
        "fused pass: queries by keys": lambda rows: torch.bmm(scores[:, :rows], keys).transpose(0, 1),
        "fused pass: weights by values": lambda rows: torch.bmm(weights[:, :rows], keys.mT).transpose(0, 1),
        "fused pass: sum of weights": lambda rows: weights[:, :rows].sum(-1).transpose(0, 1),
        "general pass: attention": attend,
    }
    attention, mlp = layer.self_attn, layer.mlp
    matrices = {
        "qkv": torch.cat([each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]),
        "gate and up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight,
        "head": head.weight,
    }
    for name, matrix in matrices.items():
        source = inner if matrix.shape[1] == config.intermediate_size else states
        operations[f"product: {name}"] = lambda rows, m=matrix, x=source: functional.linear(x[:rows], m)
    groups: dict[str, list[list[int]]] = {}
    for name, run in operations.items():
        groups[name] = []
        for rows in _ROWS:
            result = run(rows)
            own = next((group for group in groups[name] if _begins_with(result, run(group[-1]))), None)
            groups[name].append([rows]) if own is None else own.append(rows)
    return groups


def _begins_with(longer: Tensor, shorter: Tensor) -> bool:
    return torch.equal(longer[: len(shorter)], shorter)


def compare(target: Target, name: str, options: argparse.Namespace, dtype: str) -> None:
    """Compare one pass in one dtype, and print the figures."""
    with ExitStack() as patches:
        if name == "general":
            patches.enter_context(patch("moa_server.engine.torch_engine.misfit", return_value="forced"))
        if options.rows:  # one shape for all products, so libraries sum every row in the same order
            patches.enter_context(patch("moa_server.engine.fused_llama.padded", lambda rows: max(rows, options.rows)))
            patches.enter_context(patch("moa_server.engine.engine.CHUNK", options.rows))
        engine = torch_engine(target, dtype=dtype, max_context=1024)
        row: dict[str, Any] = {"pass": type(engine.target_pass).__name__, "dtype": dtype, "rows": options.rows}
        row["device"] = str(target.device)
        if isinstance(engine.target_pass, FusedLlama):
            row["is_invariant"] = is_invariant(engine.target_pass, target.config.vocab_size, 1024)
        prompts = prompts_for(options, target)
        answers = plain_answers(engine, prompts, options.max_new_tokens)
        again = plain_answers(engine, prompts[:_AGAIN], options.max_new_tokens)
        row["again_differs"] = sum(a.expected != b.expected for a, b in zip(again, answers, strict=False))
        for beside in (1, 8):
            row[f"beside_{beside}"] = figures(answers, verify_drafts(engine, answers, beside))
        engine.close()
    _print(row, options.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; return exit status 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="target (default %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or both (default %(default)s)")
    parser.add_argument("--pass", dest="passes", default="fused,general", help="passes (default %(default)s)")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="pad the products of the fused pass to N rows")
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="as Spec-Bench has them (default: random tokens)"
    )
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts (default %(default)s)")
    parser.add_argument("--longest", type=int, default=400, metavar="N", help="of a prompt (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures, a JSON object a line")
    options = parser.parse_args(argv)
    for dtype in options.dtype.split(","):
        kind = getattr(torch, dtype)
        if options.shape:
            target = random_target(options.shape, options.device, kind)
        else:
            target = load_target(options.model, device=options.device, dtype=kind)
        _print({"same_bits": same_bits(target, kind), "dtype": dtype}, options.json)
        for name in filter(None, options.passes.split(",")):
            compare(target, name, options, dtype)
    return 0


def _print(row: dict[str, Any], file: Path | None) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if file is not None:
        with file.open("a") as out:
            out.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
