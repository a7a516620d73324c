"""Durations of steps that an earlier process measured, so that a later one starts without measuring them again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from moa_runtime.atomic_file import replace_private
from moa_runtime.checked_file import read_checked
from moa_runtime.paths import cache_dir
from moa_server.engine.base import Engine
from moa_server.scheduling.step_cost import StepCost


def place_of(engine: Engine, threads: int | None) -> Path:
    """Return the file in the cache folder: one for each target, drafter, type and number of threads of a release."""
    parts = [version("moa-edge"), asdict(engine.fingerprints), engine.facts.dtype, threads, os.cpu_count()]
    return cache_dir() / "step_costs" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json"


def restore(file: Path, cost: StepCost) -> bool:
    """Take up what is kept; return whether there was something that could be read."""
    try:
        cost.restore(json.loads(read_checked(file)))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def keep(file: Path, cost: StepCost) -> None:
    """Write what was learnt, for the next start; a cache folder that cannot be written costs only time."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_private(file, [json.dumps(cost.state()).encode()])
