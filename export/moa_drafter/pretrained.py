"""The trained drafters for the default target that this package holds, by name. Needs no torch.

The checkpoint of the name is the folder ``weights/NAME``. What a name means, and when it is right, says
:data:`moa_runtime.options.DRAFTERS`.
"""

from __future__ import annotations

import os
from pathlib import Path

from moa_drafter.config import CONFIG_FILE, CheckpointError
from moa_runtime.options import DEFAULT_DRAFTER, DRAFTERS, DrafterName

WEIGHTS = Path(__file__).parent / "weights"


def shipped_names() -> tuple[DrafterName, ...]:
    """Those there are weights of, the default first."""
    return tuple(name for name in DRAFTERS if (WEIGHTS / name / CONFIG_FILE).is_file())


def offered_names() -> tuple[DrafterName, ...]:
    """Those that can draft here: the shipped ones, and those that need no weights."""
    shipped = shipped_names()
    return tuple(name for name, kind in DRAFTERS.items() if name in shipped or not kind.has_graph)


def shipped_checkpoint(name: str = DEFAULT_DRAFTER) -> Path:
    """The folder of a trained drafter.

    Raises:
        CheckpointError: there are no weights of that name; the message lists those there are.
    """
    if name not in shipped_names():
        raise CheckpointError(f"there are no weights of a drafter {name}: {_choice()}")
    return WEIGHTS / name


def checkpoint_of(given: str | Path | None) -> Path:
    """The folder of the checkpoint that a user named.

    Args:
        given: a word is a shipped drafter's name where it is one of :data:`moa_runtime.options.DRAFTERS`, and a
            folder otherwise; a text with a slash, and a :class:`~pathlib.Path`, are a folder; None is the default.

    Raises:
        CheckpointError: no such folder, or no weights of that name; the message lists the names there are.
    """
    if given is None:
        return shipped_checkpoint()
    if isinstance(given, Path) or any(slash in given for slash in (os.sep, os.altsep) if slash):
        return Path(given)
    if given in DRAFTERS:
        try:
            return shipped_checkpoint(given)
        except CheckpointError as error:
            folder = f" (the folder is .{os.sep}{given})" if Path(given).is_dir() else ""
            raise CheckpointError(f"{error}{folder}") from None
    if not Path(given).exists():
        raise CheckpointError(f"there is no checkpoint folder {given}, nor a drafter of that name: {_choice()}")
    return Path(given)


def _choice() -> str:
    return f"shipped are {', '.join(shipped_names()) or 'none'}"
