"""The simulation against ``moa-bench server``: fitted to some numbers of sessions, compared at the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moa_bench.forecast.answers import Question
from moa_bench.forecast.drafts import Drafts
from moa_bench.forecast.read import read_as
from moa_bench.forecast.times import Times
from moa_bench.forecast.window import closed
from moa_bench.result import rounded
from moa_bench.server.figures import figures_of
from moa_bench.server.measure import Load
from moa_runtime.errors import MoaError

#: Figures of a load that are compared, by the keys that ``moa-bench server`` gives them.
COMPARED = (("tokens_per_s",), ("ms_per_token", "mean"), ("ms_per_token", "p95"), ("ttft_ms", "mean"))
#: Each factor is looked for between these, by halving the step so many times.
_RANGE, _HALVINGS = 4.0, 5


@dataclass(frozen=True)
class Factors:
    """What is fitted: so many times as long as was measured takes ...

    Attributes:
        target, server_drafter, device: a step of each.
        rows: a memory row, beyond what the target's factor says.
        verdict_ms: milliseconds of the verifier for each verdict, besides.
    """

    target: float = 1.0
    server_drafter: float = 1.0
    device: float = 1.0
    rows: float = 1.0
    verdict_ms: float = 1.0

    def of(self, times: Times) -> Times:
        """The times of the machine that was observed."""
        scaled = times.scaled(target=self.target, server_drafter=self.server_drafter, device=self.device)
        return replace(scaled, row_s=self.rows * scaled.row_s, verdict_s=self.verdict_ms / 1000)


@dataclass(frozen=True)
class Observed:
    """A result of ``moa-bench server``.

    Attributes:
        loads: figures of each number of sessions and mode.
        seconds: of a window.
        most_tokens: of an answer.
        client_cpus: processors that all clients shared; None for one each.
    """

    loads: Mapping[tuple[int, str], Mapping[str, Any]]
    seconds: float
    most_tokens: int
    client_cpus: int | None = None

    @property
    def sessions(self) -> list[int]:
        """Numbers of sessions, each once."""
        return sorted({count for count, _ in self.loads})

    @classmethod
    def read(cls, path: Path) -> Observed:
        """Raises MoaError: no such file, or none of this kind."""
        return read_as(path, cls._of, "is no result of moa-bench server --json")

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Observed:
        """Raises ValueError, KeyError, TypeError or AttributeError: this is none."""
        if raw["benchmark"] != "server":
            raise ValueError
        loads = {
            (int(count), mode): figures
            for count, modes in raw["sessions"].items()
            for mode, figures in modes.items()
            if figures["tokens_per_s"]
        }
        settings = raw["settings"]
        return cls(loads, float(settings["seconds"]), int(settings["max_new_tokens"]), settings["client_cpus"])


@dataclass(frozen=True)
class Comparison:
    """One figure of one load.

    Attributes:
        fitted: whether the factors were fitted to this load.
        error: how much larger the simulation's is, as a share.
    """

    sessions: int
    mode: str
    figure: str
    fitted: bool
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "simulated": rounded(self.simulated), "error": rounded(self.error)}


class Validation:
    """Fits factors to the loads of ``fit_to`` sessions, and compares all loads.

    Args:
        times: as measured, before the factors.
        questions: that the clients asked, in their order, with the lengths of the answers.
        on_load: called for each load that is compared, with its number of sessions.
        repeats: windows of each load, with another seed each.

    Raises:
        MoaError: a number of sessions that was not observed, or nothing is left to compare with.
    """

    def __init__(
        self,
        observed: Observed,
        times: Times,
        drafts: Drafts,
        questions: Sequence[Question],
        fit_to: Sequence[int],
        on_load: Callable[[int], object] = lambda sessions: None,
        repeats: int = 2,
    ) -> None:
        missing = sorted(set(fit_to) - set(observed.sessions))
        if missing or not set(observed.sessions) - set(fit_to):
            there = ", ".join(map(str, observed.sessions))
            raise MoaError(f"the result has {there} sessions: fit to some of them, and leave others to compare with")
        self._observed, self._times, self._drafts = observed, times, drafts
        self._questions, self._fit_to, self._on_load = questions, set(fit_to), on_load
        self._repeats = repeats

    def fit(self, on_trial: Callable[[], None] = lambda: None) -> Factors:
        """The factors with which the simulation comes nearest: one after the other, in ever smaller steps.

        Args:
            on_trial: called for each set of factors that was tried.
        """
        best = Factors()
        least = self._miss(best)
        on_trial()
        for halving in range(_HALVINGS):
            step = _RANGE ** (1 / 2**halving)
            for name in self._names():
                for factor in (1 / step, step):
                    tried = replace(best, **{name: getattr(best, name) * factor})
                    miss = self._miss(tried)
                    on_trial()
                    if miss < least:
                        best, least = tried, miss
        return best

    @property
    def trials(self) -> int:
        """Sets of factors that a fit tries."""
        return 1 + _HALVINGS * 2 * len(self._names())

    def compared(self, factors: Factors) -> list[Comparison]:
        """All figures of all loads."""
        found: list[Comparison] = []
        for load in self._observed.loads:
            found += self._of_load(load, factors)
            self._on_load(load[0])
        return found

    def _names(self) -> list[str]:
        """Factors that the observed modes tell anything of."""
        modes = {mode for count, mode in self._observed.loads if count in self._fit_to}
        names = ["target", "verdict_ms"]
        names += ["server_drafter"] if modes & {"server", "auto"} else []
        names += ["device"] if modes & {"device", "auto"} else []
        return names + (["rows"] if modes - {"stream"} else [])

    def _miss(self, factors: Factors) -> float:
        """Sum of squared logarithms of what the fitted loads' figures are off by."""
        loads = [load for load in self._observed.loads if load[0] in self._fit_to]
        found = [each for load in loads for each in self._of_load(load, factors)]
        return sum(math.log(max(1e-9, each.simulated) / each.measured) ** 2 for each in found)

    def _of_load(self, load: tuple[int, str], factors: Factors) -> Iterator[Comparison]:
        sessions, mode = load
        times, seconds = factors.of(self._times), self._observed.seconds
        asked, cpus = self._questions, self._observed.client_cpus
        windows = [
            closed(times, self._drafts, asked, mode, sessions, seconds, seed, client_cpus=cpus)
            for seed in range(self._repeats)
        ]
        figures = figures_of({Load(sessions, mode): windows}, seconds, 1)["sessions"][str(sessions)][mode]
        for keys in COMPARED:
            measured, simulated = _figure(self._observed.loads[load], keys), _figure(figures, keys)
            if measured:
                fitted = sessions in self._fit_to
                yield Comparison(sessions, mode, " ".join(keys), fitted, measured, simulated or 0.0)


def summary(comparisons: Sequence[Comparison], *, fitted: bool) -> dict[str, dict[str, float | None]]:
    """Of each figure, the median and the largest error, whatever its sign."""
    found: dict[str, dict[str, float | None]] = {}
    for keys in COMPARED:
        name = " ".join(keys)
        errors = [abs(each.error) for each in comparisons if each.fitted is fitted and each.figure == name]
        if errors:
            found[name] = {"median": rounded(statistics.median(errors)), "worst": rounded(max(errors))}
    return found


def _figure(figures: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    found: Any = figures
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else float(found)
