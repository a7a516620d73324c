"""Named connections for the link emulator: how fast, how far and how reliable each one is.

Sources. `fios`, `cable`, `lte`, `4g`, `3g-fast` and `3g` are WebPageTest's published connectivity list (the menu of
webpagetest.org; most of it also in `www/settings/connectivity.ini.sample` of github.com/catchpoint/WebPageTest).
`lan` is that list's "Native" (no shaping). `5g` is not in it: its figures are the medians over 5G of one operator
(T-Mobile US, January to June 2024) in Ookla's Speedtest Connectivity Report, as told by rcrwireless.com and
broadbandbreakfast.com on 17 July 2024. `tunnel` and `flaky` are this project's own: `lte` with outages.

Times in the list are round trips; half of one is added in each direction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from moa_bench.link.wire import Trace
from moa_runtime.errors import MoaError

MBIT = 1_000_000


@dataclass(frozen=True)
class LinkProfile:
    """One connection, as its user would describe it.

    Args:
        name: what reports call it.
        down_bits_per_s: rate towards the client, bit/s of TCP payload; None for no limit.
        up_bits_per_s: rate towards the verifier, likewise.
        round_trip_ms: added delay, ms, half of it each way.
        jitter_ms: each one-way delay is drawn evenly from `round_trip_ms / 2 +- jitter_ms`, ms, never below 0.
        outages: `(start, duration)` in seconds after the first connection, in order and apart: nothing passes.
        down_trace: when bytes pass towards the client, instead of a rate, from the first connection on.
        up_trace: when bytes pass towards the verifier, likewise.
    """

    name: str
    down_bits_per_s: float | None
    up_bits_per_s: float | None
    round_trip_ms: float
    jitter_ms: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()
    down_trace: Trace | None = None
    up_trace: Trace | None = None


def random_outages(
    seed: int, mean_up_s: float, mean_down_s: float, until_s: float = 3600.0
) -> tuple[tuple[float, float], ...]:
    """Draw outages with exponential times, in seconds, the same for the same seed."""
    rng = random.Random(seed)
    outages: list[tuple[float, float]] = []
    at = rng.expovariate(1 / mean_up_s)
    while at < until_s:
        duration = rng.expovariate(1 / mean_down_s)
        outages.append((at, duration))
        at += duration + rng.expovariate(1 / mean_up_s)
    return tuple(outages)


def with_round_trip(ms: float) -> LinkProfile:
    """Make a connection of unlimited rate that adds ``ms`` to each round trip."""
    return LinkProfile(f"{ms:g}ms", None, None, ms)


_LTE = LinkProfile("lte", 12 * MBIT, 12 * MBIT, 70)

PROFILES: dict[str, LinkProfile] = {
    profile.name: profile
    for profile in (
        LinkProfile("lan", None, None, 0),
        LinkProfile("fios", 20 * MBIT, 5 * MBIT, 4),
        LinkProfile("cable", 5 * MBIT, 1 * MBIT, 28),
        LinkProfile("5g", 265.8 * MBIT, 14.56 * MBIT, 47),
        _LTE,
        LinkProfile("4g", 9 * MBIT, 9 * MBIT, 170),
        LinkProfile("3g-fast", 1.6 * MBIT, 0.768 * MBIT, 150),
        LinkProfile("3g", 1.6 * MBIT, 0.768 * MBIT, 300),
        replace(_LTE, name="tunnel", outages=((5.0, 20.0),)),
        replace(_LTE, name="flaky", outages=random_outages(seed=1, mean_up_s=10.0, mean_down_s=2.0)),
    )
}


def get_profile(name: str) -> LinkProfile:
    """Return the profile of that name. Raises MoaError if there is none; the message lists all names."""
    try:
        return PROFILES[name]
    except KeyError:
        message = f"unknown link profile {name!r}; choose one of {', '.join(PROFILES)}"
        raise MoaError(message, code="unknown_profile") from None
