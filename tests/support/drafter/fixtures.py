"""These tests say what is done where vLLM is not installed, also where it is."""

from __future__ import annotations

import pytest

from moa_drafter.training import generation


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_is_there", lambda: False)
