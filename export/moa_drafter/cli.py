"""``moa-train``: train a drafter for a target, on text that the target writes itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra

DEFAULT_CONVERSATIONS = 2000
DEFAULT_STEPS = 3000


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moa-train",
        description="Train a Mixture of Attentions drafter. Without --data the target first writes prompts and "
        "answers itself. Interrupted runs go on with --resume.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; the checkpoint is OUT/drafter")
    parser.add_argument("--model", default=None, help="target: the built-in default, a folder, or a Hub id")
    parser.add_argument("--data", type=Path, nargs="+", help="token stores (JSON lines of {p, r} token ids, .gz too)")
    parser.add_argument("--init", type=Path, metavar="FOLDER", help="a checkpoint to train on, with longer futures")
    parser.add_argument("--prompts", type=Path, help="JSON lines of prompts for the target to answer")
    parser.add_argument(
        "--conversations",
        type=int,
        help=f"how many to write, or to use of --data (default {DEFAULT_CONVERSATIONS}, all)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"optimiser steps (default {DEFAULT_STEPS})")
    length.add_argument("--minutes", type=float, help="train for about this long, the data not counted")
    parser.add_argument("--step-tokens", type=int, default=640, help="tokens in one step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="highest rate (default %(default)s)")
    parser.add_argument(
        "--draft-vocab", type=int, default=16384, help="tokens that can be drafted (default %(default)s)"
    )
    parser.add_argument("--lsa-layers", type=int, default=6, help="target layers that are seen (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: measured")
    parser.add_argument("--resume", action="store_true", help="continue the run in OUT")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        result = _train(args)
    except MoaError as error:
        print(f"moa-train: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"moa-train: stopped; go on with --resume --out {args.out}", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0


def _train(args: argparse.Namespace) -> dict[str, object]:
    require_extra("train", "moa-train")
    # Imported late, so that --help answers at once.
    import torch
    from tqdm import tqdm

    from moa_drafter.precision import fastest_dtype
    from moa_drafter.target import DEFAULT_TARGET, load_target
    from moa_drafter.training.generate import GenerateSettings, generate_conversations
    from moa_drafter.training.run import RunSettings, train_run
    from moa_drafter.training.trainer import TrainSettings

    _check_positive(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = fastest_dtype(device) if args.dtype == "auto" else getattr(torch, args.dtype)
    target = load_target(args.model or DEFAULT_TARGET, device=device, dtype=dtype)
    args.out.mkdir(parents=True, exist_ok=True)
    files = args.data
    if files is None:
        files = [args.out / "conversations.jsonl"]
        wanted = args.conversations or DEFAULT_CONVERSATIONS
        with tqdm(total=wanted, desc="writing", unit="conv", disable=None) as bar:
            generate_conversations(
                target,
                files[0],
                GenerateSettings(conversations=wanted, batch_size=min(64, wanted), seed=args.seed),
                prompts=args.prompts,
                report=lambda held: bar.update(held - bar.n),
            )
    elif args.prompts:
        raise MoaError("--prompts and --data exclude each other: --data already holds answers")
    settings = RunSettings(
        TrainSettings(
            steps=0 if args.minutes else args.steps or DEFAULT_STEPS,
            step_tokens=args.step_tokens,
            learning_rate=args.learning_rate,
            seed=args.seed,
            bfloat16=dtype == torch.bfloat16,
            continued=args.init is not None,
        ),
        draft_vocab_size=args.draft_vocab,
        lsa_layers=args.lsa_layers,
        conversations=args.conversations,
        minutes=args.minutes,
        initial=args.init,
    )
    with tqdm(desc="training", unit="step", disable=None) as bar:

        def report(figures: dict[str, float], steps: int) -> None:
            bar.total = steps
            bar.set_postfix(
                loss=f"{figures['loss']:.3f}", tokens_s=f"{figures['tokens_per_second']:.0f}", refresh=False
            )
            bar.update(int(figures["step"]) - bar.n)

        evaluation = train_run(target, files, args.out, settings, resume=args.resume, report=report)
    return {"checkpoint": str(args.out / "drafter"), **evaluation}


def _check_positive(args: argparse.Namespace) -> None:
    for name in ("conversations", "steps", "minutes", "step_tokens", "learning_rate", "draft_vocab", "lsa_layers"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise MoaError(f"--{name.replace('_', '-')} must be positive, not {value}")


def _print_table(result: dict[str, object]) -> None:
    print(f"drafter      {result['checkpoint']}")
    print(f"steps        {result['step']} ({result['tokens']} tokens)")
    print(f"loss         {result['loss']:.4f} nats (held out)")
    print(f"tau          {result['tau']:.3f} (greedy chain of 6, held-out answers)")
    print("depth        " + " ".join(f"{depth:6d}" for depth in range(1, 7)))
    depths = result["accuracy_by_depth"]
    assert isinstance(depths, list)
    print("accuracy     " + " ".join("     -" if value is None else f"{value:6.3f}" for value in depths))
