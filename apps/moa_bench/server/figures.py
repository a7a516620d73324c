"""From what clients noted to the figures of one load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moa_bench.latency import mean_ms, percentile_ms, token_latencies
from moa_bench.result import rounded
from moa_bench.server.measure import Load, WindowResult


def figures_of(
    windows: Mapping[Load, Sequence[WindowResult]], seconds: float, client_cpus: int
) -> dict[str, dict[str, Any]]:
    """``sessions.<N>.<mode>``, and ``speedup.<N>``: tokens per second of each other mode over those streamed.

    Where several engines are compared it is ``<engine> <mode>``, and all are compared with the first one's streaming.

    Args:
        seconds: of each window.
        client_cpus: processors that all clients share.
    """
    sessions: dict[str, dict[str, Any]] = {}
    for load, measured in windows.items():
        sessions.setdefault(str(load.clients), {})[load.name] = _load_figures(load, measured, seconds, client_cpus)
    base = next((load.name for load in windows if load.mode == "stream"), "")
    return {"sessions": sessions, "speedup": {clients: _speedup(modes, base) for clients, modes in sessions.items()}}


def _load_figures(load: Load, windows: Sequence[WindowResult], seconds: float, client_cpus: int) -> dict[str, Any]:
    """All windows of one load together; see the benchmark's --help for what the figures mean."""
    clients = [client for window in windows for client in window.clients]
    answers = [answer for client in clients for answer in client.answers]
    begun = [answer for answer in answers if answer.bursts]
    first_tokens = [answer.bursts[0].at - answer.asked_at for answer in begun]
    latencies = [latency for answer in begun for latency in token_latencies(answer.bursts)]
    verdicts = sum(len(answer.bursts) - 1 for answer in begun)
    by_window = [_tokens(window) for window in windows]
    tokens = sum(by_window)
    memories = [window.peak_memory for window in windows if window.peak_memory is not None]
    cpu_s = sum(window.cpu_s or 0.0 for window in windows)
    time_measured = seconds * len(windows)
    return {
        "tokens": tokens,
        "answers": len(answers),
        "tokens_per_s": rounded(tokens / time_measured),
        "tokens_per_s_by_window": [rounded(count / seconds) for count in by_window],
        "tokens_per_cpu_s": rounded(tokens / cpu_s) if cpu_s else None,
        "ms_per_token": {
            "mean": mean_ms(latencies),
            "p50": percentile_ms(latencies, 50),
            "p95": percentile_ms(latencies, 95),
        },
        "ttft_ms": {"mean": mean_ms(first_tokens), "p95": percentile_ms(first_tokens, 95)},
        "passes_per_token": rounded(sum(window.passes for window in windows) / tokens) if tokens else None,
        "tokens_per_round": rounded(len(latencies) / verdicts) if load.mode != "stream" and verdicts else None,
        "peak_memory_mb": round(max(memories) / 1e6, 1) if memories else None,
        "client_cpu_share": rounded(sum(client.cpu_s for client in clients) / (time_measured * client_cpus)),
    }


def _tokens(window: WindowResult) -> int:
    return sum(burst.tokens for client in window.clients for answer in client.answers for burst in answer.bursts)


def _speedup(modes: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, float]:
    """Of each other mode against ``base``; without those that wrote nothing."""
    speeds = {mode: figures["tokens_per_s"] for mode, figures in modes.items() if figures.get("tokens_per_s")}
    streamed = speeds.pop(base, None)
    return {} if streamed is None else {mode: round(speed / streamed, 4) for mode, speed in speeds.items()}
