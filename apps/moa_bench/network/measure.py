"""The network benchmark: every question over every connection in every mode, one after the other."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from moa_bench.link import LinkProfile
from moa_bench.network import paired
from moa_bench.network.answer import Answer, Mode, Turn
from moa_bench.network.ask import ask
from moa_bench.network.settings import NetworkSettings
from moa_bench.network.tally import Tally
from moa_bench.prompts import Prompt
from moa_bench.verifier import Verifier

_SWITCH_S = 0.0005


class Results:
    """What was measured so far, whole answers only.

    Attributes:
        tallies: by profile and mode.
        seconds: wall time, loading and warming up not included.
    """

    def __init__(self, profiles: Iterable[str], modes: Sequence[str]) -> None:
        self.tallies = {profile: {mode: Tally() for mode in modes} for profile in profiles}
        self.seconds = 0.0

    @property
    def answers(self) -> int:
        return sum(tally.answers for modes in self.tallies.values() for tally in modes.values())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain figures for JSON, by profile and mode."""
        return {
            profile: {mode: tally.as_dict() for mode, tally in modes.items()} for profile, modes in self.tallies.items()
        }

    def paired(self) -> dict[str, dict[str, Any]]:
        """By profile, see :func:`moa_bench.network.paired.of_auto`; without profiles where there is nothing to pair."""
        found = {
            profile: paired.of_auto({mode: tally.seconds_a_token for mode, tally in modes.items()})
            for profile, modes in self.tallies.items()
        }
        return {profile: ratios for profile, ratios in found.items() if ratios is not None}


def warm_up(prompt: Prompt, verifier: Verifier, modes: Mapping[str, Mode], settings: NetworkSettings) -> None:
    """Ask once in each mode without an emulator: first times are slow, and this is when misfits show.

    Raises:
        MoaError: bundle and verifier do not belong together, or the verifier refuses.
    """
    turn = _turn(prompt, verifier, settings)
    for mode in modes.values():
        ask(verifier, None, mode, turn, settings.answer_timeout_s)


def measure(
    prompts: Sequence[Prompt],
    verifier: Verifier,
    profiles: Mapping[str, LinkProfile | None],
    modes: Mapping[str, Mode],
    settings: NetworkSettings,
    results: Results,
    on_answer: Callable[[str, str, Turn, Answer], None] = lambda profile, mode, turn, answer: None,
) -> None:
    """Count every answer into ``results``; what was counted stays there, whatever is raised.

    The order of the modes rotates from question to question, so that none always profits from what the
    machine has just done, and slow changes of the machine's speed hit all alike.

    Args:
        profiles: None for the way there is, without an emulator.
        on_answer: called with each answer's profile, mode and question, and the answer.

    Raises:
        VerifierGoneError: the verifier died.
        MoaError: it refused, or an answer took too long.
    """
    began = time.monotonic()
    try:
        with _quick_thread_switches():
            for number, prompt in enumerate(prompts):
                turn = _turn(prompt, verifier, settings)
                for profile, link in profiles.items():
                    for mode in _rotated(list(modes), number):
                        outcome = ask(verifier, link, modes[mode], turn, settings.answer_timeout_s)
                        results.tallies[profile][mode].add(outcome)
                        on_answer(profile, mode, turn, outcome.answer)
    finally:
        results.seconds = time.monotonic() - began


def _turn(prompt: Prompt, verifier: Verifier, settings: NetworkSettings) -> Turn:
    reference = verifier.decode(prompt.tokens, settings.max_new_tokens, settings.sampling)
    return Turn(prompt.text, prompt.tokens, reference)


def _rotated(names: list[str], by: int) -> list[str]:
    start = by % len(names)
    return names[start:] + names[:start]


@contextlib.contextmanager
def _quick_thread_switches() -> Iterator[None]:
    """The link's thread has to keep time beside the drafter's; Python's own 5 ms are a fast link's round trip."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
