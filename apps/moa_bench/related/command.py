"""``moa-bench related`` on the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from moa_bench.options import add_command
from moa_bench.questions import Question
from moa_bench.related.groups import groups_of, split
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.extras import require_extra

EARLIER, LATER = "earlier.jsonl", "later.jsonl"
_DESCRIPTION = f"""\
Make two question files of prompts, as of a user whose work repeats itself: {EARLIER} and {LATER} ask other
questions about the same texts. Prompts are about the same text where their longest line, of 300 characters or more,
is the same. What the target answers to the first file is what a datastore holds when the second is asked:

  moa-bench related prompts.jsonl.gz --out related
  moa-bench accept --questions related/{EARLIER} --replay --answers answers.jsonl
  moa-export datastore answers.jsonl --out texts.moadata
  moa-bench accept --questions related/{LATER} --replay --datastore texts.moadata --against sssd
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "related", "questions as of work that repeats itself", _DESCRIPTION, run)
    parser.add_argument("prompts", type=Path, metavar="PROMPTS", help="JSON lines, as moa-train --prompts reads them")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where both files are written")
    parser.add_argument("--texts", type=int, default=12, metavar="N", help="how many (default %(default)s)")
    parser.add_argument(
        "--each", type=int, default=6, metavar="N", help="questions about each, earlier and later (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write both files.

    Raises:
        MoaError: prompts that cannot be read, too few about the same text, or a file that cannot be written.
    """
    for name, least in (("texts", 1), ("each", 2)):
        if getattr(args, name) < least:
            raise MoaError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    require_extra("train", "moa-bench related")
    from moa_drafter.training.prompts import read_prompts

    prompts = (turns[0] for batch in read_prompts(args.prompts, 1) for turns in batch)
    enough = (group[: args.each] for group in groups_of(prompts) if len(group) >= args.each)
    groups = list(islice(enough, args.texts))
    if len(groups) < args.texts:
        raise MoaError(
            f"{args.prompts} has {len(groups)} texts with {args.each} questions each, not {args.texts}: give a smaller "
            "--texts or --each"
        )
    earlier, later = split(groups)
    _write(args.out, {EARLIER: _lines(earlier), LATER: _lines(later)})
    made = {"folder": str(args.out), "texts": len(groups), "earlier": len(earlier), "later": len(later)}
    if args.json:
        print(json.dumps(made))
    else:
        print(f"{args.out}: {len(earlier)} earlier and {len(later)} later questions about {len(groups)} texts")
    return 0


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files that are not there yet, or hold the same.

    Raises:
        MoaError: one holds something else, or cannot be written; nothing was written then.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = folder / name
            if path.exists() and path.read_bytes() != text.encode():
                raise MoaError(f"{path} is there already and holds something else: choose another --out")
        for name, text in texts.items():
            (folder / name).write_bytes(text.encode())
    except OSError as error:
        raise MoaError(f"the questions cannot be written into {folder}: {reason_of(error)}") from error


def _lines(questions: Sequence[Question]) -> str:
    raw = ({"question_id": each.id, "category": each.task, "turns": list(each.turns)} for each in questions)
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in raw)
