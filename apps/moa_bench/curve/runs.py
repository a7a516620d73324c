"""Reading the logs of training runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moa_runtime.errors import MoaError

LOG_FILE = "log.jsonl"
_NUMBERS = ("tokens", "tau")


def read_run(argument: str) -> tuple[str, list[dict[str, Any]]]:
    """A run's name and its evaluations, by tokens.

    Args:
        argument: ``PATH`` or ``NAME=PATH``, of a folder that ``moa-train`` wrote or of its ``log.jsonl``. Without a
            name it is the folder's. An evaluation may lack its ``loss`` (nats), which is then None: tau can be measured
            where no loss is.

    Raises:
        MoaError: no log there, or a line that is no evaluation (named by number).
    """
    name, _, rest = argument.rpartition("=")
    path = Path(rest)
    log = path / LOG_FILE if path.is_dir() else path
    try:
        lines = log.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MoaError(f"cannot read {log}: {error}; expected what moa-train writes as OUT/{LOG_FILE}") from error
    found = [_evaluation(line, f"{log}, line {number}") for number, line in enumerate(lines, 1)]
    if not found:
        raise MoaError(f"{log} holds no evaluation yet: train until the first one")
    return name or (path if path.is_dir() else path.parent).resolve().name, sorted(found, key=lambda e: e["tokens"])


def _evaluation(line: str, where: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
        numbers = {name: float(raw[name]) for name in _NUMBERS}
        loss = None if raw.get("loss") is None else float(raw["loss"])
        depths = [None if share is None else float(share) for share in raw["accuracy_by_depth"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MoaError(f"{where}: expected an evaluation with {', '.join(_NUMBERS)} and accuracy_by_depth") from error
    return {**numbers, "tokens": int(numbers["tokens"]), "loss": loss, "accuracy_by_depth": depths}
