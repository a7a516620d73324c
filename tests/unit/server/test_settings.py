"""The options of ``moa-serve``."""

from __future__ import annotations

from moa_server.engine.dtypes import MOST_RATIO
from moa_server.settings import parser


def test_the_help_can_be_printed():
    assert f"{MOST_RATIO - 1:.0%}" in parser().format_help()
