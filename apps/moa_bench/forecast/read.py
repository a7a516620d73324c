"""Files that the forecast reads: a sentence for each that cannot be read, or is of another kind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moa_runtime.errors import MoaError

T = TypeVar("T")


def read_as(path: Path, make: Callable[[Any], T], otherwise: str) -> T:
    """What ``make`` makes of a JSON file.

    Args:
        make: raises ValueError, KeyError, TypeError or AttributeError for what is of another kind.
        otherwise: what is said then, behind the path.

    Raises:
        MoaError: no such file, or none of this kind.
    """
    try:
        return make(json.loads(path.read_text()))
    except OSError as error:
        raise MoaError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MoaError(f"{path} {otherwise}") from error


def check_shares(shares: Sequence[Any]) -> None:
    """Raises ValueError: not all are finite numbers of 0 or more, or all are 0."""
    check_numbers(shares)
    if not sum(shares) > 0:
        raise ValueError(shares)


def check_numbers(numbers: Sequence[Any]) -> None:
    """Raises ValueError: not all are finite and 0 or more."""
    if not all(_is_number(number) and number >= 0 for number in numbers):
        raise ValueError(numbers)


def check_counts(counts: Sequence[Any], least: int = 0) -> None:
    """Raises ValueError: not all are whole numbers of at least ``least``."""
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= least for count in counts):
        raise ValueError(counts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
