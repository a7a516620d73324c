"""The results that a folder holds, as ``moa-bench ... --json`` printed them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moa_bench.benchmarks import BENCHMARKS
from moa_bench.result import RESULT_VERSION
from moa_runtime.errors import MoaError

# What every result of :func:`moa_bench.result.result_of` has, and the page shows.
_ENVELOPE: dict[str, type | tuple[type, ...]] = {
    "version": int,
    "partial": bool,
    "problem": (str, type(None)),
    "settings": dict,
    "fingerprints": dict,
    "seconds": (int, float),
    "measured_at": str,
    "machine": dict,
    "versions": dict,
}


@dataclass(frozen=True)
class StoredResult:
    """One benchmark's result and the name of its file."""

    file: str
    result: dict[str, Any]

    @property
    def benchmark(self) -> str:
        return str(self.result["benchmark"])


@dataclass(frozen=True)
class LeftOut:
    """A file that the report does not show, and why, in half a sentence."""

    name: str
    reason: str


class NoResultError(Exception):
    """A file holds no result that could be shown: why, in half a sentence."""


def read_results(folder: Path) -> tuple[list[StoredResult], list[LeftOut]]:
    """The results in ``folder/*.json``, benchmark by benchmark, each one's in the order of measuring.

    Raises:
        MoaError: no such folder, or a result written by a newer version.
    """
    if not folder.is_dir():
        raise MoaError(f"there is no folder {folder}: name the one that holds what moa-bench --json printed")
    results, left_out = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            results.append(StoredResult(path.name, _read(path)))
        except NoResultError as problem:
            left_out.append(LeftOut(path.name, str(problem)))
    results.sort(key=lambda stored: (BENCHMARKS.index(stored.benchmark), stored.result["measured_at"]))
    return results, left_out


def _read(path: Path) -> dict[str, Any]:
    """Raises NoResultError; MoaError where a newer version wrote it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoResultError(f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also text that is no UTF-8
        raise NoResultError("it is no JSON") from error
    if not isinstance(found, dict) or not {"benchmark", "version"} <= found.keys():
        raise NoResultError("it is no result of moa-bench")
    benchmark, version = found["benchmark"], found["version"]
    if isinstance(version, int) and version > RESULT_VERSION:
        raise MoaError(
            f"{path.name} was written by a newer moa-bench (results of version {version}; this one knows up to "
            f"{RESULT_VERSION}): update moa-edge, or take the file out of the folder"
        )
    if benchmark not in BENCHMARKS:
        raise NoResultError(f"moa-bench has no benchmark {benchmark!r}")
    for key, kind in _ENVELOPE.items():
        if not isinstance(found.get(key), kind):
            raise NoResultError(f"it is damaged: {key!r} is missing or of the wrong kind")
    return found
