"""Options that choose which links a benchmark emulates."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from moa_bench.link.profiles import PROFILES, LinkProfile, get_profile
from moa_bench.link.traces import read_trace
from moa_runtime.errors import MoaError
from moa_runtime.transport import Endpoint

DIRECT = "direct"
DEFAULT_PROFILES = "fios,cable,lte,4g"
TRACE = "trace"


def add_link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profiles",
        metavar="NAMES",
        help=f"links to emulate, separated by commas: {', '.join(PROFILES)}, or {DIRECT} for no emulation "
        f"(default {DEFAULT_PROFILES}; none with --trace)",
    )
    parser.add_argument(
        "--trace",
        nargs=2,
        type=Path,
        metavar=("UP", "DOWN"),
        help="also emulate a recorded link: two trace files of Mahimahi, towards the verifier and towards the client; "
        "each line is the time in ms at which one packet of 1500 bytes passes",
    )
    parser.add_argument(
        "--round-trip-ms",
        type=float,
        metavar="MS",
        help="delay added to each round trip of the recorded link, which the trace files leave out (default 0)",
    )


def link_names(args: argparse.Namespace) -> list[str]:
    """What was asked for, in order and each once: names of profiles, perhaps ``direct``, perhaps ``trace``."""
    if args.profiles is None and args.trace:
        return [TRACE]
    listed = DEFAULT_PROFILES if args.profiles is None else args.profiles
    names = [name.strip() for name in listed.split(",")]
    return list(dict.fromkeys([*names, *([TRACE] if args.trace else [])]))


def profiles_of(args: argparse.Namespace) -> list[LinkProfile]:
    """The links to emulate, in the order in which they were named, the recorded one last; ``direct`` is left out.

    Raises:
        MoaError: no such profile, a trace that cannot be read, or a round trip that no link can have.
    """
    round_trip_ms = 0.0 if args.round_trip_ms is None else args.round_trip_ms
    if args.round_trip_ms is not None and not args.trace:
        raise MoaError("--round-trip-ms belongs to --trace: the named profiles have round trips of their own")
    if not 0 <= round_trip_ms < math.inf:
        raise MoaError(f"--round-trip-ms must be 0 or more, not {round_trip_ms:g}")
    recorded = [_recorded(*args.trace, round_trip_ms)] if args.trace else []
    taken = {DIRECT, *(profile.name for profile in recorded)}
    return [*(get_profile(name) for name in link_names(args) if name not in taken), *recorded]


def check_without_tls(endpoint: Endpoint | None, instead: str) -> None:
    """Raises MoaError: no emulated link can lead to this verifier; ``instead`` says what to do."""
    if endpoint is not None and endpoint.address.startswith("wss:"):
        raise MoaError(
            f"{endpoint.address} speaks TLS, and its certificate is not for the address of an emulated link: {instead}"
        )


def _recorded(up: Path, down: Path, round_trip_ms: float) -> LinkProfile:
    return LinkProfile(TRACE, None, None, round_trip_ms, up_trace=read_trace(up), down_trace=read_trace(down))
