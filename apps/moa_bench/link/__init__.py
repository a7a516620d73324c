"""The link emulator: a slow, far, unreliable network between a client and a verifier on one machine."""

from moa_bench.link.profiles import PROFILES, LinkProfile, get_profile, random_outages, with_round_trip
from moa_bench.link.proxy import Link
from moa_bench.link.wire import Trace, read_trace

__all__ = ["PROFILES", "Link", "LinkProfile", "Trace", "get_profile", "random_outages", "read_trace", "with_round_trip"]
