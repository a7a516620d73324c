"""Folders of moa-edge: a cache of what it can make again, and data that it cannot."""

from __future__ import annotations

import errno
import os
import sys
from datetime import datetime
from pathlib import Path

from moa_runtime.errors import MoaError, reason_of
from moa_runtime.options import DrafterName, drafter_option


def expanded(path: Path | str) -> Path:
    """Expand ``~``; that of an unknown user stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises there


def resolved(path: Path) -> Path:
    """Return the absolute path without links; raise OSError if the links form a circle."""
    try:
        return path.resolve()
    except RuntimeError as error:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def cache_dir() -> Path:
    """The user's cache folder for moa-edge; ``MOA_EDGE_CACHE`` overrides the platform's convention."""
    return _user_folder("MOA_EDGE_CACHE", "Library/Caches", "XDG_CACHE_HOME", ".cache")


def check_cache() -> None:
    """Make the cache folder before anything is written into it; raise MoaError if nothing can be.

    One that holds all that is needed may be read-only: it is not checked before.
    """
    place = cache_dir()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        text = f"models cannot be kept in {place}: {reason_of(error)}; set MOA_EDGE_CACHE to a folder of your own"
        raise MoaError(text, code="cache_refused") from error


def data_dir() -> Path:
    """The user's data folder for moa-edge; ``MOA_EDGE_PROFILE`` overrides the platform's convention."""
    return _user_folder("MOA_EDGE_PROFILE", "Library/Application Support", "XDG_DATA_HOME", ".local/share")


def default_bundle() -> Path:
    """The bundle used when none is named, which ``moa-export`` writes and ``moa-chat`` reads."""
    return expanded(os.environ.get("MOA_EDGE_BUNDLE") or cache_dir() / "bundles" / "default")


def bundle_of_drafter(name: DrafterName | None) -> Path:
    """The bundle used for a drafter when none is named: the default one, or in the cache folder that of its graph."""
    return cache_dir() / "bundles" / name if name and drafter_option(name) else default_bundle()


def free_name(path: Path, word: str) -> Path:
    """Return a free name beside ``path``: ``chat.json`` becomes ``chat-WORD-2026-01-31-120000.json``."""
    stem = f"{path.stem}-{word}-{datetime.now():%Y-%m-%d-%H%M%S}"
    free, number = path.with_name(f"{stem}{path.suffix}"), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{stem}-{number}{path.suffix}")
    return free


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        text = "there is no home folder: set HOME, or MOA_EDGE_CACHE and MOA_EDGE_PROFILE to folders of your own"
        raise MoaError(text, code="no_home") from error


def _user_folder(override: str, mac: str, linux_variable: str, linux: str) -> Path:
    """Return the folder of the environment variable ``override``, or else the platform's."""
    if named := os.environ.get(override):
        return expanded(named)
    if sys.platform == "darwin":
        base = _home() / mac
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData/Local")
    else:
        base = Path(os.environ.get(linux_variable) or _home() / linux)
    return base / "moa-edge"
