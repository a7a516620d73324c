"""Recorded links: the trace file, what a trace lets through, and the link that follows it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_bench.link import LinkProfile
from moa_bench.link.wire import PACKET_BYTES, Trace, TraceWire, read_trace
from moa_bench.network import add_link_options, link_names, profiles_of
from moa_runtime.errors import MoaError
from support.bench.linked import connected

# Half a second in which a packet passes every 5 ms, but for a gap.
GAP_MS = 200
GAPPED = Trace((*range(5, 301, 5), 300 + GAP_MS))

times = st.lists(st.integers(0, 60), min_size=1, max_size=12).map(sorted).filter(lambda found: found[-1] > 0).map(tuple)


def test_a_trace_says_how_long_and_how_fast_it_is() -> None:
    trace = Trace((0, 4, 4, 10))
    assert trace.seconds == 0.01
    assert trace.bits_per_s == 4 * 1500 * 8 / 0.01
    # When it is over, it begins again: its time 0 is at 10 ms, which is also its last opportunity.
    assert [round(1000 * trace.opportunity(number)) for number in range(7)] == [0, 4, 4, 10, 10, 14, 14]
    assert trace.most_bytes(0.0) == 2 * PACKET_BYTES
    assert trace.most_bytes(0.004) == 4 * PACKET_BYTES  # from 10 ms on: 10, 10, 14, 14
    assert trace.most_bytes(0.014) == 8 * PACKET_BYTES


@given(times, st.integers(0, 2000))
def test_the_next_opportunity_is_the_first_that_is_not_before(found: tuple[int, ...], tenths_ms: int) -> None:
    trace = Trace(found)
    seconds = tenths_ms / 10_000 + 1e-7  # no opportunity lies there, so rounding decides nothing
    number = trace.next_opportunity(seconds)
    assert trace.opportunity(number) >= seconds
    assert number == 0 or trace.opportunity(number - 1) < seconds


@settings(max_examples=40)
@given(times, st.lists(st.tuples(st.integers(0, 400), st.integers(1, PACKET_BYTES)), max_size=30).map(sorted))
def test_a_wire_passes_what_a_byte_by_byte_model_passes(
    found: tuple[int, ...], arrivals: list[tuple[int, int]]
) -> None:
    """`arrivals` are tenths of a millisecond and sizes."""
    trace, free = Trace(found), {}  # the room that is left, by opportunity
    wire, number = TraceWire(trace), 0
    for tenths_ms, size in arrivals:
        now = tenths_ms / 10_000 + 1e-7
        for _ in range(size):
            while trace.opportunity(number) < now or free.get(number) == 0:
                number += 1
            free[number] = free.get(number, PACKET_BYTES) - 1
        assert wire.transmit(size, now) == trace.opportunity(number)


def test_a_link_delivers_the_rate_and_the_gaps_of_its_trace() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with connected(LinkProfile("recorded", None, None, 20, down_trace=GAPPED)) as ends:
            ends.server.write(bytes(5 * int(GAPPED.bits_per_s * GAPPED.seconds / 8)))
            arrivals, gaps = [(loop.time(), 0)], []
            while len(gaps) < 4:
                data = await asyncio.wait_for(ends.client_reader.read(1 << 16), 5)
                arrivals.append((loop.time(), arrivals[-1][1] + len(data)))
                before, after = arrivals[-2:]
                if before[1] and after[0] - before[0] > GAP_MS / 2000:
                    gaps.append((before, after))
        lengths = [1000 * (after[0] - before[0]) for before, after in gaps]
        ends = [before for before, _ in gaps]  # the last arrivals before a gap, one repetition apart
        rates = [8 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(ends)]
        print(f"gaps {lengths} ms, rates {[rate / GAPPED.bits_per_s for rate in rates]} of the trace's")
        assert statistics.median(lengths) == pytest.approx(GAP_MS, rel=0.1, abs=3)
        assert statistics.median(rates) == pytest.approx(GAPPED.bits_per_s, rel=0.1)

    asyncio.run(main())


def test_a_trace_waits_for_the_first_connection_and_stands_still_in_an_outage() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        # Its one opportunity for long: already over, were the trace to run before the connection or in the outage.
        profile = LinkProfile("recorded", None, None, 0, up_trace=Trace((300, 30_000)))
        async with connected(profile, idle_s=0.4) as ends:
            ends.link.cut()
            ends.client.write(b"x" * PACKET_BYTES)
            await asyncio.sleep(0.4)
            ends.link.restore()
            restored = loop.time()
            await asyncio.wait_for(ends.server_reader.readexactly(PACKET_BYTES), 5)
            assert loop.time() - restored >= 0.1

    asyncio.run(main())


def test_a_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "link.up"
    path.write_text("0\n3\n3\n10\n")
    assert read_trace(path) == Trace((0, 3, 3, 10))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"1\n2\nthree\n", r"link\.up, line 3: expected a whole number of milliseconds, not 'three'"),
        (b"1\n-2\n", "line 2: expected a whole number"),
        (b"1\n\n2\n", "line 2: expected a whole number"),
        (b"1.5\n", "line 1: expected a whole number"),
        (b"\xff\xfe1\n", "line 1: expected a whole number"),
        (b"5\n4\n", "line 2: 4 ms is earlier than the 5 ms"),
        (b"", "is no trace"),
        (b"0\n0\n", "is no trace"),
    ],
)
def test_a_broken_trace_file_names_the_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "link.up"
    path.write_bytes(content)
    with pytest.raises(MoaError, match=said):
        read_trace(path)


def test_no_trace_file(tmp_path: Path) -> None:
    with pytest.raises(MoaError, match=r"cannot read the trace .*nowhere: No such file"):
        read_trace(tmp_path / "nowhere")


def test_a_direction_has_a_rate_or_a_trace() -> None:
    with pytest.raises(MoaError, match="'odd' has a rate beside a trace"):
        LinkProfile("odd", None, 1e6, 0, up_trace=GAPPED)


# -- options ---------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> list[str]:
    """`--trace` with two files."""
    files = [tmp_path / "up", tmp_path / "down"]
    for path, content in zip(files, ("7\n", "8\n9\n"), strict=True):
        path.write_text(content)
    return ["--trace", *map(str, files)]


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_link_options(parser)
    return parser.parse_args(argv)


def test_named_links_and_the_default() -> None:
    assert [profile.name for profile in profiles_of(parsed())] == ["fios", "cable", "lte", "4g"]
    args = parsed("--profiles", "direct, 3g,lan,3g")
    assert [profile.name for profile in profiles_of(args)] == ["3g", "lan"]
    assert link_names(args) == ["direct", "3g", "lan"]


def test_a_recorded_link_alone_and_beside_others(recorded: list[str]) -> None:
    (alone,) = profiles_of(parsed(*recorded))
    assert alone == LinkProfile("trace", None, None, 0, up_trace=Trace((7,)), down_trace=Trace((8, 9)))
    args = parsed("--profiles", "direct,lte", "--round-trip-ms", "35", *recorded)
    assert [(profile.name, profile.round_trip_ms) for profile in profiles_of(args)] == [("lte", 70), ("trace", 35)]
    assert link_names(args) == ["direct", "lte", "trace"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--profiles", "fios,wifi"], r"'wifi'.*lan, fios"),
        (["--profiles", ""], "''"),
        (["--profiles", "trace"], "'trace'"),
        (["--round-trip-ms", "5"], "--round-trip-ms belongs to --trace"),
        (["--trace", "nowhere", "nowhere"], "cannot read the trace nowhere"),
    ],
)
def test_impossible_links(argv: list[str], said: str) -> None:
    with pytest.raises(MoaError, match=said):
        profiles_of(parsed(*argv))


@pytest.mark.parametrize("ms", ["-1", "nan", "inf"])
def test_an_impossible_round_trip(recorded: list[str], ms: str) -> None:
    with pytest.raises(MoaError, match="--round-trip-ms must be 0 or more"):
        profiles_of(parsed(*recorded, f"--round-trip-ms={ms}"))
