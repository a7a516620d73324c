"""``moa-train``: train a drafter for a target, on text that the target writes itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moa_drafter.training.settings import FIELDS, TYPES, checked
from moa_drafter.vllm_environment import set_variables
from moa_runtime.cli_main import OptionParser, add_version, run_program
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

# By a part of the name of a setting's type, the first that fits: type and metavar of its flag.
_KINDS = (
    ("Path", (str, "PATH")),
    ("dict", (str, "KIND=WEIGHT")),
    ("int", (int, "N")),
    ("float", (float, "X")),
    ("str", (str, "NAME")),
)


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="moa-train",
        description="Train a drafter. Without --data the target first writes prompts and answers itself. "
        "Interrupted runs continue with --resume.",
    )
    add_version(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; the checkpoint is OUT/drafter")
    parser.add_argument("--config", type=Path, metavar="YAML", help="settings of the run; flags override them")
    parser.add_argument("--resume", action="store_true", help="continue the run in OUT with its own settings")
    parser.add_argument(
        "--pause-after", type=float, metavar="MINUTES", help="save and stop after about this long; see --resume"
    )
    parser.add_argument("--device", default=None, help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--dry-run", action="store_true", help="print what would be done, and stop")
    task.add_argument("--write-only", action="store_true", help="write the conversations, and stop")
    task.add_argument("--self-check", action="store_true", help="10 steps: the loss must fall; speed, shares of time")
    task.add_argument("--profile", action="store_true", help="measure the parts of 50 steps")
    settings = parser.add_argument_group("settings, each also a key of the YAML file (with _ for -)")
    for key, field in FIELDS.items():
        options: dict[str, Any] = {"dest": key, "default": None, "help": _help(field)}
        if TYPES[key] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            if key in ("data", "mix"):
                options["nargs"] = "+"
            kind = next(kind for text, kind in _KINDS if text in str(TYPES[key]))
            options["type"], options["metavar"] = kind
        settings.add_argument(f"--{key.replace('_', '-')}", **options)
    return parser


def _help(field: Any) -> str:
    text, default = field.metadata["help"], field.default
    shown = "default" not in text and isinstance(default, int | float | str) and not isinstance(default, bool)
    text = f"{text} (default {default})" if shown else text
    return text.replace("%", "%%")


def main(argv: Sequence[str] | None = None) -> int:
    stopped = "stopped; continue with --resume and the same --out"
    return run_program("moa-train", lambda: _run(build_parser().parse_args(argv)), stopped=stopped)


def _run(args: argparse.Namespace) -> int:
    require_extra("train", "moa-train")
    set_variables()
    # Imported late, so that --help answers at once, and torch finds the variables.
    from moa_drafter.training.cli import Command

    given = {key: getattr(args, key) for key in FIELDS if getattr(args, key) is not None}
    if "mix" in given:
        given["mix"] = _weights(given["mix"])
    if args.pause_after is not None and not args.pause_after > 0:
        raise MoaError(f"--pause-after must be positive, not {args.pause_after}", code="out_of_range")
    command = Command(
        out=args.out,
        config=args.config,
        flags=checked(given),
        resume=args.resume,
        pause_after=args.pause_after,
        device=args.device,
    )
    task = next((name for name in ("dry_run", "write_only", "self_check", "profile") if getattr(args, name)), "train")
    result = getattr(command, task)()
    if result is None:  # another process reports
        return 0
    print(json.dumps(result) if args.json else command.describe(result))
    if result.get("finished") is False:
        print(f"moa-train: paused; continue with --resume --out {args.out}", file=sys.stderr)
    if result.get("failed"):
        print(f"moa-train: {result['failed']}", file=sys.stderr)
        return 1
    return 0


def _weights(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``["code=2", "chat=1"]``."""
    found = dict(pair.partition("=")[::2] for pair in pairs)
    if not all(found.values()):
        raise MoaError(f"--mix must be given as kind=weight, not {' '.join(pairs)}", code="wrong_type")
    return found


if __name__ == "__main__":
    sys.exit(main())
