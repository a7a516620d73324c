"""The window's settings on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from moa_chat.desktop.profile import Profile, Settings


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    profile = Profile(tmp_path / "profile")
    settings = Settings(server="wss://models.example", token="secret")
    profile.save(settings)
    assert profile.load() == settings and len(list(profile.folder.iterdir())) == 1


@pytest.mark.parametrize("content", ['{"server": "wss://models.ex', "[" * 100_000, b"\xff\xfe"])
def test_damaged_ones_are_kept_under_another_name(tmp_path: Path, content: str | bytes) -> None:
    profile = Profile(tmp_path / "profile")
    path = profile.folder / "settings.json"
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(content)
    assert profile.load() == Settings()
    profile.save(Settings())
    [aside] = [each for each in profile.folder.iterdir() if each != path]
    assert aside.name.startswith("settings-damaged-") and aside.read_bytes() == content
