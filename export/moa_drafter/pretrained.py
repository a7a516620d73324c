"""The trained drafters for the default target in this package: folders ``weights/NAME``. Needs no torch.

:data:`moa_runtime.options.DRAFTERS` describes the names.
"""

from __future__ import annotations

import os
from pathlib import Path

from moa_drafter.config import CONFIG_FILE, CheckpointError
from moa_runtime.options import DEFAULT_DRAFTER, DRAFTERS, DrafterName

WEIGHTS = Path(__file__).parent / "weights"


def shipped_names() -> tuple[DrafterName, ...]:
    """Return the names that have weights, the default first."""
    return tuple(name for name in DRAFTERS if (WEIGHTS / name / CONFIG_FILE).is_file())


def offered_names() -> tuple[DrafterName, ...]:
    """Return the names that can draft here: the shipped ones, and those that need no weights."""
    shipped = shipped_names()
    return tuple(name for name, kind in DRAFTERS.items() if name in shipped or not kind.has_graph)


def shipped_checkpoint(name: str = DEFAULT_DRAFTER) -> Path:
    """Return the folder of a trained drafter. Raises CheckpointError, which lists the names, if it is not shipped."""
    if name not in shipped_names():
        raise CheckpointError(f"there are no weights of a drafter {name}: {_choice()}", code="unknown_drafter")
    return WEIGHTS / name


def checkpoint_of(given: str | Path | None) -> Path:
    """Return the folder of the checkpoint that a user named. Raises CheckpointError, which lists the names, if there is
    none. A text with a slash and a Path are a folder, other texts a name in :data:`moa_runtime.options.DRAFTERS` if
    they are one, else a folder; None is the default."""
    if given is None:
        return shipped_checkpoint()
    if isinstance(given, Path) or any(slash in given for slash in (os.sep, os.altsep) if slash):
        return Path(given)
    if given in DRAFTERS:
        try:
            return shipped_checkpoint(given)
        except CheckpointError as error:
            folder = f" (the folder is .{os.sep}{given})" if Path(given).is_dir() else ""
            raise CheckpointError(f"{error}{folder}", code=error.code) from None
    if not Path(given).exists():
        raise CheckpointError(f"{given} is no folder and no drafter's name: {_choice()}", code="unknown_drafter")
    return Path(given)


def _choice() -> str:
    return f"shipped are {', '.join(shipped_names()) or 'none'}"
