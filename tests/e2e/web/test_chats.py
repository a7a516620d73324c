"""TypeScript clients on links that are cut, with verifiers and programs that are killed: the text is the target's."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import background_link
from support.system.killed import Setting, VerifierProgram, check
from support.web.happenings import Client

pytestmark = pytest.mark.skipif(os.name == "nt", reason="forks and signals")

_ROUND_TRIP_MS = 10
#: Of a conversation, at most.
_HAPPENINGS = 6


@pytest.fixture
def tiny(tiny_target: Path, tiny_drafter: Path, web_bundle: Path, tmp_path: Path, unused_port: int) -> Setting:
    options = ("--model", str(tiny_target), "--drafter", str(tiny_drafter))
    return Setting(tmp_path, web_bundle, unused_port, options, 0.0, 64)


def converse(compiled: Path, setting: Setting, conversations: int, seed: int) -> Counter[str]:
    """Have so many conversations, one after the other, and check what came of them; returns what happened meanwhile."""
    rng, happened, program = random.Random(seed), Counter[str](), VerifierProgram(setting)
    try:
        with background_link(with_round_trip(_ROUND_TRIP_MS), "127.0.0.1", setting.port) as link:
            for number in range(conversations):
                try:
                    client = Client(compiled, program, link, number, rng.randrange(2**32))
                    client.live(rng.randint(1, _HAPPENINGS))
                    check(program, number)
                except Exception as error:
                    raise AssertionError(f"seed {seed}, conversation {number}: {error}") from error
                happened += client.happened
    finally:
        program.close()
    assert "Traceback" not in program.log and "moa-serve: error" not in program.log, program.log
    print(f"{conversations} conversations, {sum(happened.values())} happenings: {dict(happened)}")
    return happened


def test_ten_conversations_to_which_things_happen(compiled: Path, tiny: Setting) -> None:
    assert sum(converse(compiled, replace(tiny, temperature=0.8), 10, 1).values()) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_hundred_conversations_to_which_things_happen(compiled: Path, tiny: Setting, temperature: float) -> None:
    happened = converse(compiled, replace(tiny, temperature=temperature), 100, random.randrange(2**32))
    assert min(happened.values()) > 0 and len(happened) == len(Client.HAPPENINGS)
