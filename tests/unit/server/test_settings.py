"""The options of ``moa-serve``."""

from __future__ import annotations

import pytest

from moa_server.engine.base import Capabilities
from moa_server.engine.dtypes import MOST_RATIO
from moa_server.settings import ServeError, parser, settings_of
from support.refusals import refused


def test_the_help_can_be_printed():
    assert f"{MOST_RATIO - 1:.0%}" in parser().format_help()


@pytest.mark.parametrize("memory", ["nan", "-1"])
def test_a_memory_that_is_none_is_refused(memory):
    with refused("out_of_range", ServeError):
        settings_of(parser().parse_args([f"--memory={memory}"]))
    assert settings_of(parser().parse_args(["--memory=inf"]))


@pytest.mark.parametrize(
    "option",
    ["idle-seconds=1e300", "keep-seconds=inf", "away-seconds=nan", f"max-frame-bytes={2**64}", "threads=1025"],
)
def test_a_number_that_no_welcome_can_tell_or_no_machine_has_is_refused(option):
    """A Welcome that cannot be sent would end each session."""
    with refused("out_of_range", ServeError):
        settings_of(parser().parse_args([f"--{option}"]))
    assert settings_of(parser().parse_args(["--keep-seconds", str(2**31 - 1)])).limits(10, Capabilities()).to_message()
