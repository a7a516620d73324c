"""The window's settings on disk, and what the command line says instead."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from moa_chat.desktop.profile import Profile, Settings
from support.refusals import refused


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return Profile(tmp_path / "profile")


def test_settings_are_read_as_they_were_written_and_are_their_owners_alone(profile: Profile) -> None:
    settings = Settings(server="wss://models.example", token="very secret")
    profile.save(settings)
    assert profile.load() == settings and "very secret" not in repr(profile.load())
    [path] = profile.folder.iterdir()
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(profile.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ([], Settings()),
        ({"zoom": "large", "token": 5, "new": 1}, Settings()),
        # From before there were recommendations: 0 was the default, and other temperatures were chosen.
        ({"temperature": 0.7}, Settings(recommended=False, temperature=0.7)),
        ({"temperature": 0.0, "zoom": "large"}, Settings()),
    ],
)
def test_a_missing_or_mistyped_setting_gets_its_default(profile: Profile, stored, read) -> None:
    (profile.folder / "settings.json").write_text(json.dumps(stored))
    assert profile.load() == read


@pytest.mark.parametrize("content", [b"", b'{"server": "wss://models.ex', b"[" * 100_000, b"\xff\xfe"])
def test_damaged_settings_are_kept_under_another_name(profile: Profile, content: bytes) -> None:
    path = profile.folder / "settings.json"
    path.write_bytes(content)
    assert profile.load() == Settings()
    profile.save(Settings())
    [aside] = [each for each in profile.folder.iterdir() if each != path]
    assert aside.name.startswith("settings-damaged-") and aside.read_bytes() == content


def test_a_profile_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("cannot_write"):
        Profile(tmp_path / "file" / "profile")
