"""A scenario with each of the three who may draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moa_bench.placement.scenarios import Scenario
from moa_bench.placement.simulate import Held, hold
from moa_bench.result import rounded
from moa_bench.shapes.replay import Replay
from moa_runtime.options import DRAFTINGS, Drafting


@dataclass(frozen=True)
class Outcome:
    """What became of a scenario, by who was to draft."""

    scenario: Scenario
    held: dict[Drafting, Held]

    @property
    def best(self) -> Drafting:
        """Of the device alone and the server alone."""
        return min(("device", "server"), key=lambda drafting: self.held[drafting].seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ms = {drafting: rounded(1000 * each.seconds / each.tokens) for drafting, each in self.held.items()}
        auto = self.held["auto"]
        return {
            **self.scenario.as_dict(),
            "ms_per_token": ms,
            "best": self.best,
            "ratio": rounded(auto.seconds / self.held[self.best].seconds),
            "pushed": rounded(auto.pushed),
        }


def compared(replays: Sequence[Replay], scenario: Scenario) -> Outcome:
    """Have all three write the scenario's answers.

    Raises:
        AssertionError: they wrote different texts.
    """
    held = {drafting: hold(replays, scenario, drafting) for drafting in DRAFTINGS}
    assert len({each.text for each in held.values()}) == 1, "whoever drafts, the text is the target's"
    return Outcome(scenario, held)
