"""Where moa-edge keeps what it can make again (cache)."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder for moa-edge; ``MOA_EDGE_CACHE`` overrides the platform's convention."""
    override = os.environ.get("MOA_EDGE_CACHE")
    if override:
        return Path(override).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "moa-edge"


def default_bundle() -> Path:
    """The bundle used when none is named: where ``moa-export`` writes and ``moa-chat`` looks."""
    return Path(os.environ.get("MOA_EDGE_BUNDLE") or cache_dir() / "bundles" / "default").expanduser()
