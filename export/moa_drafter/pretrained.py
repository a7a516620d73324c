"""The trained drafters for the default target in this package: folders ``weights/NAME``. Needs no torch.

:data:`moa_runtime.options.DRAFTERS` describes the names.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from moa_drafter.config import CONFIG_FILE, TORCH_WEIGHTS_FILE, WEIGHTS_FILE, CheckpointError
from moa_runtime.options import DEFAULT_DRAFTER, DRAFTERS, DrafterName
from moa_runtime.paths import expanded

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
    """Return the folder of the checkpoint that a user named.

    A Path is a folder, and so is a text with a slash if there is one, else it may be a name on the Hub, which is
    fetched. Other texts are a name in :data:`moa_runtime.options.DRAFTERS` if they are one, else a folder; None is the
    default.

    Raises:
        CheckpointError: there is none; the message lists the names.
    """
    if given is None:
        return shipped_checkpoint()
    if isinstance(given, Path) or any(slash in given for slash in (os.sep, os.altsep) if slash):
        place = expanded(given)
        return _from_hub(given) if isinstance(given, str) and not place.exists() else place
    if given in DRAFTERS:
        try:
            return shipped_checkpoint(given)
        except CheckpointError as error:
            folder = f" (the folder is .{os.sep}{given})" if Path(given).is_dir() else ""
            raise CheckpointError(f"{error}{folder}", code=error.code) from None
    if not Path(given).exists():
        raise CheckpointError(f"{given} is no folder and no drafter's name: {_choice()}", code="unknown_drafter")
    return Path(given)


def _from_hub(hub_id: str) -> Path:
    from moa_decoder.errors import TargetError  # late: a program's --help needs none of this
    from moa_drafter.target_source import fetch_hub_files, hub_answers, is_hub_id

    if not is_hub_id(hub_id):
        return expanded(hub_id)
    try:
        reachable = functools.cache(hub_answers)
        folder = fetch_hub_files(hub_id, (CONFIG_FILE,), reachable=reachable)
        names = WEIGHTS_FILE, TORCH_WEIGHTS_FILE
        for name in names:
            if not any((folder / each).is_file() for each in names):
                fetch_hub_files(hub_id, (name,), revision=folder.name, reachable=reachable)
    except TargetError as error:
        raise CheckpointError(str(error), code=error.code) from error
    return folder


def _choice() -> str:
    return f"a drafter is sssd, none, a folder, a Hub id, or one of {', '.join(shipped_names())}"
