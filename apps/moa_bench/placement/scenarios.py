"""A device, a link and a verifier, told by their times, which may change in the middle."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moa_bench.shapes.draw import log_uniform, some_answers

#: Of a scenario's answers together.
TOKENS = 600
#: What may happen to a scenario half-way.
CHANGES = ("none", "link slower", "link faster", "verifier busy", "verifier free")


@dataclass(frozen=True)
class Times:
    """All in seconds.

    Attributes:
        step_s, query_s: a step of the device's drafter, and each node that it continues.
        server_step_s, server_query_s: the same of the server's; None for a server that only decodes.
        pass_s, token_s: a pass of the target, and each token that it is over.
        queue_s: how long each pass waits for others.
        trip_s: there and back, without the target; each way takes up to ``jitter`` times its half longer.
    """

    step_s: float
    query_s: float
    server_step_s: float | None
    server_query_s: float
    pass_s: float
    token_s: float
    queue_s: float
    trip_s: float
    jitter: float


@dataclass(frozen=True)
class Scenario:
    """Times before and after ``change``, and the answers of a conversation, by number."""

    seed: int
    before: Times
    after: Times
    change: str
    answers: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, times in milliseconds."""
        return {"change": self.change, "answers": self.answers, "ms": _ms(self.before), "later_ms": _ms(self.after)}


def scenarios(count: int, seed: int, lengths: Sequence[int]) -> Iterator[Scenario]:
    """So many, drawn at random; all times are log-uniform. A step of the device takes 0.5 to 20 ms and each node that
    it continues 0.03 to 0.3 of that; a pass of the target 3 to 60 ms, each token 0.0002 to 0.1 of that; the server's
    own step 0.03 to 0.4 of a pass, in two of three scenarios; a round trip 1 to 300 ms. Of three, one verifier is busy,
    and lets every pass wait for one to four others; in two of five scenarios link or verifier change.

    Args:
        lengths: tokens of each answer there is; a scenario takes some until they have :data:`TOKENS`.
    """
    rng = random.Random(seed)
    for number in range(count):
        step_s, pass_s = log_uniform(rng, 0.0005, 0.02), log_uniform(rng, 0.003, 0.06)
        server_step_s = pass_s * log_uniform(rng, 0.03, 0.4) if rng.random() < 2 / 3 else None
        times = Times(
            step_s=step_s,
            query_s=step_s * log_uniform(rng, 0.03, 0.3),
            server_step_s=server_step_s,
            server_query_s=(server_step_s or 0.0) * log_uniform(rng, 0.03, 0.3),
            pass_s=pass_s,
            token_s=pass_s * log_uniform(rng, 0.0002, 0.1),
            queue_s=pass_s * rng.uniform(1, 4) if rng.random() < 1 / 3 else 0.0,
            trip_s=log_uniform(rng, 0.001, 0.3),
            jitter=rng.uniform(0, 0.5),
        )
        change = rng.choice(CHANGES[1:]) if rng.random() < 0.4 else CHANGES[0]
        factor = log_uniform(rng, 2, 20)
        after = {
            "none": times,
            "link slower": replace(times, trip_s=min(0.3, times.trip_s * factor)),
            "link faster": replace(times, trip_s=max(0.001, times.trip_s / factor)),
            "verifier busy": replace(times, queue_s=times.queue_s + pass_s * rng.uniform(1, 4)),
            "verifier free": replace(times, queue_s=0.0),
        }[change]
        yield Scenario(number + seed, times, after, change, some_answers(rng, lengths, TOKENS))


def _ms(times: Times) -> dict[str, float | None]:
    return {
        name.removesuffix("_s"): value if name == "jitter" or value is None else round(1000 * value, 4)
        for name, value in asdict(times).items()
    }
