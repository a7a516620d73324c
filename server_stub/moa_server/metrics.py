"""Prometheus metrics of a verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moa_server.scheduling.scheduler import Step

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BINS = 20  # of probabilities


class _Watched(Collector):
    """A gauge, or a counter kept elsewhere, read at each scrape."""

    def __init__(self, family: Callable[..., Metric], name: str, text: str, value: Callable[[], float]) -> None:
        self._family, self._name, self._text, self._value = family, name, text, value

    def describe(self) -> Iterator[Metric]:
        yield self._family(self._name, self._text)

    def collect(self) -> Iterator[Metric]:
        yield self._family(self._name, self._text, value=self._value())


class Acceptance:
    """Drafted tokens of all rounds so far, by the calibrated probability that a token and all before it are right: in
    20 bins of 0.05, those that were offered when the step was planned, that were verified, and that were accepted."""

    def __init__(self) -> None:
        self._rounds = 0
        self._bins: dict[str, list[int]] = {kind: [0] * _BINS for kind in ("offered", "verified", "accepted")}

    def add(self, paths: Sequence[float], verified: Iterable[int], path: Iterable[int]) -> None:
        """Count a round: the probabilities of its draft, and the indices that were verified and accepted."""
        self._rounds += 1
        bins = [min(int(_BINS * probability), _BINS - 1) for probability in paths]
        for kind, indices in (("offered", range(len(paths))), ("verified", verified), ("accepted", path)):
            for index in indices:
                self._bins[kind][bins[index]] += 1

    def message(self) -> dict[str, Any]:
        """Return all counts."""
        return {"rounds": self._rounds, **self._bins}


class Metrics:
    """Metrics of one app, in a registry of their own, so that several apps can share a process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        ProcessCollector(registry=registry)  # memory, processor time, open files
        self._steps = Counter("moa_steps", "Steps of the engine.", registry=registry)
        self._tokens = Counter("moa_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self._rounds = Counter(
            "moa_rounds", "Verdicts after at least one drafted token was verified.", registry=registry
        )
        self._refusals = Counter("moa_refusals", "What was refused, by reason.", ["reason"], registry=registry)
        dropped = "Frames and requests without a result, by reason."
        self._dropped = Counter("moa_jobs_dropped", dropped, ["reason"], registry=registry)
        self._batch = histogram("moa_step_sequences", "Sequences in a step.", _COUNTS)
        self._sizes = histogram("moa_step_tokens", "Tokens in a step.", _TOKENS)
        self._took = histogram("moa_step_seconds", "Seconds that a step takes.", _SECONDS)
        self._queued = histogram("moa_queue_seconds", "Seconds from a frame to its first step.", _SECONDS)
        self._tau = histogram("moa_round_tokens", "Tokens that a round commits; sum by count is tau.", _COUNTS)
        self.acceptance = Acceptance()
        # Make the counters visible before the first event.
        for kind in ("prefill", "verified", "accepted", "committed"):
            self._tokens.labels(kind)
        for reason in ("left", "expired", "failed", "given up"):
            self._dropped.labels(reason)

    def tell_dtype(self, dtype: str) -> None:
        """Export the type of the target's numbers, as the label of a gauge that is 1."""
        Info("moa_target", "The target.", registry=self._registry).info({"dtype": dtype})

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        self._registry.register(_Watched(GaugeMetricFamily, name, text, value))

    def watch_count(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a counter that is read at each scrape; its name gets ``_total``."""
        self._registry.register(_Watched(CounterMetricFamily, name, text, value))

    def stepped(self, step: Step, began: float, ended: float) -> None:
        """Record a step; clock readings in seconds."""
        self._steps.inc()
        self._batch.observe(len(step.pieces))
        self._sizes.observe(step.tokens)
        self._took.observe(max(0.0, ended - began))
        self._tokens.labels("prefill").inc(sum(piece.prefill for piece in step.pieces))
        for piece in step.pieces:
            if not piece.waiting.started:
                self._queued.observe(max(0.0, began - piece.waiting.since))

    def decided(self, *, drafted: int, accepted: int, committed: int) -> None:
        """Record the verdict on a frame, or the token of a plain decoding; ``drafted`` tokens were verified."""
        self._tokens.labels("verified").inc(drafted)
        self._tokens.labels("accepted").inc(accepted)
        self._tokens.labels("committed").inc(committed)
        if drafted:
            self._rounds.inc()
            self._tau.observe(committed)

    def dropped(self, reason: str) -> None:
        """Record a job without a result: its client ``left`` or replaced it, it ``expired``, the engine ``failed``, or
        it was ``given up`` at shutdown."""
        self._dropped.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """Record a refusal."""
        self._refusals.labels(reason).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text
