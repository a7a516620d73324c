"""Folders of a user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moa_runtime.paths import cache_dir, data_dir, default_bundle, expanded
from support.refusals import refused


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such user")
@pytest.mark.parametrize("folder", [cache_dir, data_dir, default_bundle])
def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path]) -> None:
    """As in a container that runs with any user id: no HOME, no line in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "MOA_EDGE_CACHE", "MOA_EDGE_PROFILE", "MOA_EDGE_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    assert expanded("~/a") == Path("~/a")
    with refused("no_home"):
        folder()
    monkeypatch.setenv("MOA_EDGE_CACHE", "/a")
    monkeypatch.setenv("MOA_EDGE_PROFILE", "/b")
    assert folder() in (Path("/a"), Path("/b"), Path("/a/bundles/default"))
