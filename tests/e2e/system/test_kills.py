"""Verifier and client are killed at random moments, and started again: nothing is lost, and the text is the target's.

``MOA_KILLS_TARGET=default`` runs the slow test on the default target, whose bundle must be where ``moa-export`` writes.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moa_runtime.paths import default_bundle
from support.system.killed import Programs, Setting, check

pytestmark = pytest.mark.skipif(os.name == "nt", reason="forks and signals")

_TIMEOUT_S = 300.0


def kill_both(setting: Setting, kills: int, pause_s: float, seed: int) -> None:
    """Kill each program a number of times, at most ``pause_s`` seconds apart, and check the results."""
    rng = random.Random(seed)
    fates = ["client"] * kills + ["verifier"] * kills
    rng.shuffle(fates)
    programs = Programs(setting)
    try:
        for who in fates:
            time.sleep(pause_s * rng.random())
            programs.kill(who)
        programs.finish(_TIMEOUT_S)
        conversations = sum(1 for _ in setting.folder.glob("done-*"))
        for conversation in range(conversations):
            check(programs, conversation)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        programs.close()
    assert "Traceback" not in programs.log and "moa-serve: error" not in programs.log, programs.log
    print(f"{kills} + {kills} kills, {conversations} conversations")


@pytest.fixture
def tiny(tiny_target: Path, tiny_drafter: Path, onnx_bundle: Path, tmp_path: Path, unused_port: int) -> Setting:
    options = ("--model", str(tiny_target), "--drafter", str(tiny_drafter))
    return Setting(tmp_path, onnx_bundle, unused_port, options, 0.0, 120)


def test_killed_a_few_times(tiny: Setting) -> None:
    kill_both(tiny, 2, 1.5, 1)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_killed_a_hundred_times(tiny: Setting, temperature: float) -> None:
    setting, kills, pause_s = replace(tiny, temperature=temperature), 100, 2.0
    if os.environ.get("MOA_KILLS_TARGET") == "default":
        setting, kills, pause_s = replace(setting, bundle=default_bundle(), options=(), length=96), 10, 12.0
    kill_both(setting, kills, pause_s, random.randrange(2**32))
