"""The files of the vectors: one JSON value per line, compressed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data"


def text_of(values: Iterable[Any]) -> str:
    """The lines of a file."""
    return "".join(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n" for value in values)


def write(name: str, values: Iterable[Any]) -> bool:
    """Write a file if its lines have changed; return whether they have."""
    path = FOLDER / f"{name}.jsonl.gz"
    text = text_of(values)
    if path.exists() and gzip.decompress(path.read_bytes()).decode() == text:
        return False  # another zlib compresses otherwise
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return True


def read(name: str) -> Iterator[Any]:
    """The values of a file; none if there is no such file."""
    path = FOLDER / f"{name}.jsonl.gz"
    for line in gzip.decompress(path.read_bytes()).decode().splitlines() if path.exists() else ():
        yield json.loads(line)
