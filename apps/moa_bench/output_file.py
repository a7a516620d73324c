"""Files that a benchmark writes: refused before the measurement where they could not be written after it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from moa_runtime.errors import MoaError, reason_of


def check_output_file(option: str, args: argparse.Namespace) -> None:
    """Refuse the file of ``--option``, if it is given, where it cannot be written or another option names it.

    Raises:
        MoaError: the option, its file and the reason.
    """
    path: Path | None = getattr(args, option)
    if path is None:
        return
    try:
        place = path.resolve()  # a link whose file is not there yet stays one
        fresh = not place.exists()
        place.open("ab").close()
        try:
            for other, named in _paths(args):
                if other != option and named.exists() and named.samefile(place):
                    raise MoaError(f"--{option} {path} is the file of --{other}, which would be lost: name another")
        finally:
            if fresh:
                place.unlink()
    except OSError as error:
        raise MoaError(f"--{option} {path} cannot be written: {reason_of(error)}") from error


def _paths(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """All paths that a command was given, by option."""
    for name, value in vars(args).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Path):
                yield name.replace("_", "-"), each
