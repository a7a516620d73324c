"""The soak, five minutes of it; ``make soak`` takes half an hour."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soak.run import soak


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_nothing_grows_breaks_or_differs_while_clients_flood_hang_and_lie(tmp_path: Path) -> None:
    assert not soak(300.0, tmp_path).problems
