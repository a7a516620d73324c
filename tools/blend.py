"""Average the weights of several trained drafters, which can draft better than each (model soups, arXiv 2203.05482).

    python tools/blend.py eight/drafter nine/drafter --out blended

The checkpoints must descend from one another, or from the same weights: the mean of unrelated ones is useless.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moa_drafter.checkpoint import load_checkpoint, save_checkpoint
from moa_drafter.drafter import Drafter
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError


@torch.no_grad()
def blend(folders: Sequence[Path]) -> Drafter:
    """Return a drafter with the mean of the weights, in float32, and of the sharpness of the checkpoints.

    Raises:
        MoaError: a checkpoint that cannot be loaded, or drafters of different shapes, targets or vocabularies.
    """
    first, *others = [load_checkpoint(folder) for folder in folders]
    for folder, other in zip(folders[1:], others, strict=True):
        if replace(other.config, sharpness=first.config.sharpness) != first.config:
            raise MoaError(
                f"{folder} cannot be blended with {folders[0]}: config.json says another drafter or target",
                code="mismatch",
            )
        if not torch.equal(other.draft_to_target, first.draft_to_target):
            raise MoaError(f"{folder} cannot be blended with {folders[0]}: it drafts other tokens", code="mismatch")
    drafters = [first, *others]
    for own, *rest in zip(*(drafter.parameters() for drafter in drafters), strict=True):
        own.copy_(torch.stack([own, *rest]).mean(0))
    mean = sum(drafter.config.sharpness for drafter in drafters) / len(drafters)
    first.config = replace(first.config, sharpness=round(mean, 3))
    return first


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tools/blend.py", description="Average the weights of related drafters."
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="checkpoints, at least two")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the mean is written")
    args = parser.parse_args(argv)
    return run_program(parser.prog, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if len(args.folders) < 2:
        raise MoaError("one checkpoint is its own mean: name at least two", code="too_few")
    save_checkpoint(blend(args.folders), args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
