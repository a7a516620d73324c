"""A machine and drafts by hand, for the tests of the forecast."""

from __future__ import annotations

from moa_bench.forecast.drafts import Drafts, Shape
from moa_bench.forecast.times import DrafterTimes, StepTimes, Times

TIMES = Times(
    target=StepTimes(0.02, 0.001, 0.0, 0.0),
    server_drafter=DrafterTimes(0.002, 0.0002),
    device=DrafterTimes(0.001, 0.0001),
    row_s=0.0002,
    verdict_s=0.001,
    most_sequences=64,
    cache_tokens=1 << 20,
)
NOTHING = Shape("nothing", 0, 0, (), {"all": [1.0]})
CHAIN = Shape("chain of 2", 2, 2, (1, 1), {"all": [1.0, 1.0, 2.0]})
TREE = Shape("tree of 6", 6, 3, (1, 2, 2), {"all": [1.0, 1.0, 1.0, 1.0]})
DRAFTS = Drafts("by hand", {"all": 1.0}, [NOTHING, CHAIN, TREE])
