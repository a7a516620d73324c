"""Where moa-edge keeps what it can make again (cache) and what it cannot (data)."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path

from moa_runtime.options import DrafterName, drafter_option


def expanded(path: Path | str) -> Path:
    """With ``~`` as the home folder; that of a user who is not there stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises there


def cache_dir() -> Path:
    """The user's cache folder for moa-edge; ``MOA_EDGE_CACHE`` overrides the platform's convention."""
    override = os.environ.get("MOA_EDGE_CACHE")
    if override:
        return expanded(override)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = _local_app_data()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "moa-edge"


def data_dir() -> Path:
    """The user's data folder for moa-edge; ``MOA_EDGE_PROFILE`` overrides the platform's convention."""
    override = os.environ.get("MOA_EDGE_PROFILE")
    if override:
        return expanded(override)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    elif sys.platform == "win32":
        base = _local_app_data()
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "moa-edge"


def default_bundle() -> Path:
    """The bundle used when none is named: where ``moa-export`` writes and ``moa-chat`` looks."""
    return expanded(os.environ.get("MOA_EDGE_BUNDLE") or cache_dir() / "bundles" / "default")


def bundle_of_drafter(name: DrafterName | None) -> Path:
    """The bundle used for a drafter where none is named: the default one, or for another graph one of its own in the
    cache folder."""
    return cache_dir() / "bundles" / name if name and drafter_option(name) else default_bundle()


def free_name(path: Path, word: str) -> Path:
    """A name beside ``path`` that no file has: ``chat.json`` becomes ``chat-WORD-2026-01-31-120000.json``."""
    stem = f"{path.stem}-{word}-{datetime.now():%Y-%m-%d-%H%M%S}"
    free, number = path.with_name(f"{stem}{path.suffix}"), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{stem}-{number}{path.suffix}")
    return free


def _local_app_data() -> Path:
    return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
