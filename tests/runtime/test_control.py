"""How long drafts become: fixed, and as long as they pay."""

from __future__ import annotations

import math
import random
from argparse import ArgumentTypeError

import pytest

from moa_runtime.control import Controller, FixedLength, RoundOutcome, Throughput, controller_for, draft_length_of


def length_of(controller: Controller, probability: float) -> int:
    """Of a draft each of whose tokens the drafter holds as likely."""
    drafted = 0
    while controller.goes_on(drafted, drafted * math.log(probability)):
        drafted += 1
    return drafted


def learnt(
    *, step_s: float, round_trip_s: float, probability: float, verify_s: float = 0.0, rounds: int = 200
) -> tuple[Throughput, float]:
    """A controller after rounds whose drafted tokens are right as often as the drafter says, and the tokens a second
    of the last half of them."""
    rng = random.Random(1)
    controller, tokens, seconds = Throughput(), 0, 0.0
    for number in range(rounds):
        drafted = length_of(controller, probability)
        accepted = next((at for at in range(drafted) if rng.random() > probability), drafted)
        draft_s, trip_s = drafted * step_s, round_trip_s + drafted * verify_s
        controller.observe(RoundOutcome(drafted, accepted, drafted, draft_s, trip_s))
        if number >= rounds // 2:
            tokens, seconds = tokens + accepted + 1, seconds + draft_s + trip_s
    return controller, tokens / seconds


def rate_of(length: int, *, step_s: float, round_trip_s: float, probability: float, verify_s: float = 0.0) -> float:
    """Tokens a second of drafts that are always as long."""
    return sum(probability**at for at in range(length + 1)) / (length * (step_s + verify_s) + round_trip_s)


LINKS = [(0.005, 0.02), (0.005, 0.3), (0.02, 0.05), (0.001, 0.1)]


@pytest.mark.parametrize("probability", [0.4, 0.7, 0.9])
@pytest.mark.parametrize(("step_s", "round_trip_s"), LINKS)
def test_drafts_become_as_long_as_is_best(step_s: float, round_trip_s: float, probability: float) -> None:
    conditions = {"step_s": step_s, "round_trip_s": round_trip_s, "probability": probability}
    best = max(rate_of(length, **conditions) for length in range(1, 17))
    assert learnt(**conditions)[1] > 0.85 * best  # 100 rounds of chance


def test_a_slow_link_makes_drafts_longer_and_a_slow_device_shorter() -> None:
    near, _ = learnt(step_s=0.005, round_trip_s=0.02, probability=0.7)
    far, _ = learnt(step_s=0.005, round_trip_s=0.5, probability=0.7)
    slow, _ = learnt(step_s=0.05, round_trip_s=0.5, probability=0.7)
    assert length_of(far, 0.7) > length_of(slow, 0.7) > length_of(Throughput(longest=1), 0.7) == 1
    assert length_of(far, 0.7) > length_of(near, 0.7)


def test_a_drafter_in_doubt_asks_sooner() -> None:
    for controller in (Throughput(), learnt(step_s=0.005, round_trip_s=0.1, probability=0.7)[0]):
        lengths = [length_of(controller, probability) for probability in (0.2, 0.5, 0.8, 0.99)]
        assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == 16


def test_a_target_that_feels_every_token_makes_drafts_shorter() -> None:
    """The drafter is in doubt now and then, so drafts differ, and so do the round trips."""
    lengths, rng = [], random.Random(2)
    for verify_s in (0.0, 0.03):
        controller = Throughput()
        for _ in range(300):
            drafted = length_of(controller, rng.choice((0.3, 0.6, 0.8, 0.95)))
            trip_s = 0.1 + verify_s * drafted + rng.gauss(0, 0.005)
            controller.observe(RoundOutcome(drafted, drafted // 2, drafted, 0.005 * drafted, trip_s))
        lengths.append([length_of(controller, probability) for probability in (0.6, 0.8, 0.95)])
    assert all(dear < cheap for cheap, dear in zip(*lengths, strict=True))


def test_one_token_is_always_drafted_and_never_more_than_the_longest() -> None:
    hopeless, _ = learnt(step_s=1.0, round_trip_s=0.001, probability=0.05)
    assert length_of(hopeless, 0.05) == 1
    assert length_of(Throughput(longest=5), 1.0) == 5


def test_rounds_without_steps_teach_it_nothing_impossible() -> None:
    """A draft that was copied took no step, and so no time; an unanswered prompt no round."""
    controller = Throughput()
    controller.observe(RoundOutcome(8, 8, 0, 0.0, 0.0))
    assert controller.goes_on(1, math.log(0.9))
    assert not controller.goes_on(1, math.log(1e-6))


def test_a_fixed_length_is_fixed() -> None:
    fixed = FixedLength(3)
    fixed.observe(RoundOutcome(3, 0, 3, 9.0, 0.001))
    assert length_of(fixed, 0.001) == 3 and FixedLength(0).goes_on(0, 0.0) is False


def test_a_length_on_the_command_line() -> None:
    assert isinstance(controller_for(draft_length_of("auto")), Throughput)
    assert controller_for(draft_length_of("4")) == FixedLength(4)
    with pytest.raises(ArgumentTypeError, match="expected a whole number or auto, not 'many'"):
        draft_length_of("many")
