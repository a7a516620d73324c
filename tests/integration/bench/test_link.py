"""The link emulator: delay, rate, traces, order, bounded queues, dead zones, and the options that choose it."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_bench.link import PROFILES, Link, LinkProfile, get_profile, random_outages, with_round_trip
from moa_bench.link.proxy import _Direction
from moa_bench.link.wire import PACKET_BYTES, WAITING_BYTES, RateWire, Trace, TraceWire, Wire, read_trace
from moa_bench.network import add_link_options, links_of
from moa_runtime.transport import Endpoint
from support.refusals import refused

QUIET_S = 0.3  # long enough to believe that nothing comes

# -- wires, by hand --------------------------------------------------------------------------------

times = st.lists(st.integers(0, 60), min_size=1, max_size=12).map(sorted).filter(lambda found: found[-1] > 0).map(tuple)


def test_a_trace_repeats_and_says_how_much_it_delivers() -> None:
    trace = Trace((0, 4, 4, 10))
    # When it is over, it begins again: its time 0 is at 10 ms, which is also its last opportunity.
    assert [round(1000 * trace.opportunity(number)) for number in range(7)] == [0, 4, 4, 10, 10, 14, 14]
    # From 10 ms on: 10, 10, 14, 14.
    assert [trace.most_bytes(ms / 1000) for ms in (0, 4, 14)] == [count * PACKET_BYTES for count in (2, 4, 8)]


@settings(max_examples=40)
@given(times, st.lists(st.tuples(st.integers(0, 400), st.integers(1, PACKET_BYTES)), max_size=30).map(sorted))
def test_a_wire_passes_what_a_byte_by_byte_model_passes(found, arrivals):
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


def test_a_rate_passes_chunks_one_after_the_other_and_a_long_delay_does_not_lower_it() -> None:
    wire = RateWire(8e6)  # a megabyte a second
    assert [wire.transmit(1000, now) for now in (5.0, 5.0, 5.0005, 6.0)] == pytest.approx([5.001, 5.002, 5.003, 6.001])
    # All that is under way for the delay may be, besides what waits.
    assert wire.queue_bytes(0.5) == wire.queue_bytes(0.0) + 500_000 and wire.queue_bytes(0.0) == WAITING_BYTES
    trace = Trace((1,))  # a packet a millisecond
    assert TraceWire(trace).queue_bytes(0.5) >= WAITING_BYTES + 500 * PACKET_BYTES
    assert Wire().transmit(10**9, 5.0) == 5.0


def test_a_direction_adds_its_delay_and_all_connections_share_its_wire() -> None:
    clock = SimpleNamespace(now=lambda: 5.0)
    direction = _Direction(clock, RateWire(8e6), 0.04, 0.0, "up")
    assert [direction.due(size) for size in (1000, 2000)] == pytest.approx([5.041, 5.043])
    jittery = _Direction(clock, Wire(), 0.04, 0.02, "up")
    delays = [jittery.due(1) - 5.0 for _ in range(200)]
    assert min(delays) < 0.025 and max(delays) > 0.055 and all(0.02 <= delay <= 0.06 for delay in delays)


# -- connections over real sockets -----------------------------------------------------------------


@dataclass
class Ends:
    """A connection through a link, seen from both ends, and the later connections that the verifier gets."""

    link: Link
    client_reader: asyncio.StreamReader
    client: asyncio.StreamWriter
    server_reader: asyncio.StreamReader
    server: asyncio.StreamWriter
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@asynccontextmanager
async def connected(profile: LinkProfile, idle_s: float = 0.0) -> AsyncIterator[Ends]:
    """``idle_s``: time before the link is first used."""
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        accepted.put_nowait((reader, writer))

    target = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with Link(profile, "127.0.0.1", target.sockets[0].getsockname()[1]) as link:
        await asyncio.sleep(idle_s)
        client_reader, client = await asyncio.open_connection("127.0.0.1", link.port)
        server_reader, server = await asyncio.wait_for(accepted.get(), 5)
        yield Ends(link, client_reader, client, server_reader, server, accepted)
        for writer in (client, *writers):
            writer.transport.abort()
    target.close()


def over_link(profile: LinkProfile, idle_s: float = 0.0):
    """Run an asynchronous test with the ends of a connection through a link."""

    def run(test) -> None:
        async def main() -> None:
            async with connected(profile, idle_s) as ends:
                await test(ends)

        asyncio.run(main())

    return run


async def hangs(awaitable) -> bool:
    """Whether nothing comes of it, neither data nor an error, for a while."""
    try:
        await asyncio.wait_for(awaitable, QUIET_S)
    except asyncio.TimeoutError:
        return True
    return False


async def exactly(reader: asyncio.StreamReader, size: int) -> bytes:
    return await asyncio.wait_for(reader.readexactly(size), 20)


@pytest.mark.parametrize("name", ["cable", "3g"])
def test_nothing_arrives_before_its_delay_and_rate_allow(name: str) -> None:
    profile = get_profile(name)

    async def test(ends: Ends) -> None:
        loop, size = asyncio.get_running_loop(), 40_000
        for writer, reader, rate in (
            (ends.client, ends.server_reader, profile.up_bits_per_s),
            (ends.server, ends.client_reader, profile.down_bits_per_s),
        ):
            sent = loop.time()
            writer.write(bytes(size))
            await exactly(reader, 1)
            assert loop.time() - sent >= profile.round_trip_ms / 2000
            await exactly(reader, size - 1)
            assert loop.time() - sent >= profile.round_trip_ms / 2000 + 8 * size / rate - 1e-3

    over_link(profile)(test)


def test_bytes_and_order_are_kept_and_counted() -> None:
    async def test(ends: Ends) -> None:
        rng = random.Random(7)
        sent = [rng.randbytes(rng.choice((1, 3, 100, 5000, 40_000))) for _ in range(60)]

        async def send(writer: asyncio.StreamWriter) -> None:
            for piece in sent:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(rng.random() * 0.005)
            writer.write_eof()

        up, down, *_ = await asyncio.gather(
            ends.server_reader.read(), ends.client_reader.read(), send(ends.client), send(ends.server)
        )
        assert up == down == b"".join(sent) and (ends.link.bytes_up, ends.link.bytes_down) == (len(up), len(down))

    over_link(LinkProfile("rough", 40e6, 40e6, 20, jitter_ms=8))(test)


@pytest.mark.parametrize("profile", [PROFILES["cable"], with_round_trip(60)], ids=lambda profile: profile.name)
def test_a_sender_into_a_dead_zone_is_blocked_and_nothing_is_lost(profile: LinkProfile) -> None:
    async def test(ends: Ends) -> None:
        # The sender's own kernel buffer is no part of the link.
        ends.server.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        ends.link.cut()
        rng, sent = random.Random(3), b""
        while len(sent) < 16_000_000:
            piece = rng.randbytes(32 * 1024)
            ends.server.write(piece)
            sent += piece
            if await hangs(ends.server.drain()):
                break
        assert len(sent) < 3_000_000 and ends.link.bytes_down == 0
        ends.link.restore()
        got = await exactly(ends.client_reader, len(sent))
        assert hashlib.sha256(got).digest() == hashlib.sha256(sent).digest()

    over_link(profile)(test)


def test_sockets_hang_in_a_dead_zone_and_continue_afterwards() -> None:
    async def test(ends: Ends) -> None:
        loop = asyncio.get_running_loop()
        ends.client.write(b"on its way, ")
        await asyncio.sleep(0.01)
        ends.link.cut()
        ends.client.write(b"and sent in the dark")
        ends.server.write(b"token")
        assert ends.link.is_cut
        assert await hangs(ends.server_reader.read(1))
        assert await hangs(ends.client_reader.read(1))
        assert (ends.link.bytes_up, ends.link.bytes_down) == (0, 0)
        ends.link.restore()
        start = loop.time()
        assert await exactly(ends.server_reader, 32) == b"on its way, and sent in the dark"
        assert loop.time() - start >= 0.045  # what was sent in the dark has the whole way before it
        assert await exactly(ends.client_reader, 5) == b"token"

    over_link(with_round_trip(100))(test)


def test_new_connections_in_a_dead_zone_pass_afterwards_unless_the_client_gave_up() -> None:
    async def test(ends: Ends) -> None:
        ends.link.cut()
        _, gave_up = await asyncio.open_connection("127.0.0.1", ends.link.port)
        gave_up.write(b"bye")
        gave_up.close()
        reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", ends.link.port), 5)
        writer.write(b"hello")
        assert await hangs(ends.accepted.get())
        ends.link.restore()
        server_reader, server = await asyncio.wait_for(ends.accepted.get(), 5)
        assert await exactly(server_reader, 5) == b"hello"
        server.write(b"welcome")
        assert await exactly(reader, 7) == b"welcome" and await hangs(ends.accepted.get())
        writer.transport.abort()

    over_link(PROFILES["lan"])(test)


def test_an_outage_begins_after_the_first_connection_and_nothing_passes_in_it() -> None:
    async def test(ends: Ends) -> None:
        loop, opened = asyncio.get_running_loop(), asyncio.get_running_loop().time()

        async def send() -> None:
            for number in range(60):
                ends.client.write(bytes([number]))
                await asyncio.sleep(0.02)

        sending, arrivals = asyncio.create_task(send()), []
        for number in range(60):
            assert await exactly(ends.server_reader, 1) == bytes([number])
            arrivals.append(loop.time() - opened)
        await sending
        # The widest gap between arrivals: it ends after the outage, and is nearly as long.
        gap, after = max((b - a, b) for a, b in itertools.pairwise(arrivals))
        assert gap >= 0.3 and after >= 0.75

    over_link(LinkProfile("gap", None, None, 20, outages=((0.3, 0.5),)), idle_s=0.4)(test)


def test_restore_does_not_end_an_outage_of_the_profile() -> None:
    async def test(ends: Ends) -> None:
        await asyncio.sleep(0.2)
        ends.link.cut()
        ends.link.restore()
        assert ends.link.is_cut

    over_link(LinkProfile("gap", None, None, 0, outages=((0.1, 30.0),)))(test)


def test_a_trace_waits_for_the_first_connection_and_stands_still_in_an_outage() -> None:
    async def test(ends: Ends) -> None:
        loop = asyncio.get_running_loop()
        ends.link.cut()
        ends.client.write(b"x" * PACKET_BYTES)
        await asyncio.sleep(0.4)
        ends.link.restore()
        restored = loop.time()
        await exactly(ends.server_reader, PACKET_BYTES)
        assert loop.time() - restored >= 0.1

    # Its one opportunity for long: already over, were the trace to run before the connection or in the outage.
    over_link(LinkProfile("recorded", None, None, 0, up_trace=Trace((300, 30_000))), idle_s=0.4)(test)


def test_an_end_and_a_break_reach_the_other_side() -> None:
    async def end(ends: Ends) -> None:
        ends.client.write(b"bye")
        ends.client.close()
        assert await asyncio.wait_for(ends.server_reader.read(), 5) == b"bye"

    async def broken(ends: Ends) -> None:
        ends.server.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ends.server.transport.abort()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(ends.client_reader.read(), 5)

    over_link(with_round_trip(20))(end)
    over_link(with_round_trip(20))(broken)


def test_reset_breaks_both_sides_and_new_connections_pass() -> None:
    async def test(ends: Ends) -> None:
        ends.client.write(b"x")
        await exactly(ends.server_reader, 1)
        ends.link.reset()
        for reader in (ends.client_reader, ends.server_reader):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 5)
        _, writer = await asyncio.open_connection("127.0.0.1", ends.link.port)
        await asyncio.wait_for(ends.accepted.get(), 5)
        writer.transport.abort()

    over_link(with_round_trip(20))(test)


def test_a_verifier_that_is_not_there_is_a_broken_connection() -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            async with Link(PROFILES["lan"], "127.0.0.1", unused.getsockname()[1]) as link:
                reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
                with pytest.raises(ConnectionResetError):
                    await asyncio.wait_for(reader.read(), 5)
                writer.transport.abort()

    asyncio.run(main())


# -- profiles, trace files, options ----------------------------------------------------------------


def test_random_outages_are_the_same_for_the_same_seed() -> None:
    assert random_outages(5, 10, 2) == random_outages(5, 10, 2) != random_outages(6, 10, 2)


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"1\n2\nthree\n", "not_a_number", 3),
        (b"1\n-2\n", "not_a_number", 2),
        (b"1\n\n2\n", "not_a_number", 2),
        (b"1.5\n", "not_a_number", 1),
        (b"\xff\xfe1\n", "not_a_number", 1),
        (b"5\n4\n", "out_of_order", 2),
        (b"", "no_trace", None),
        (b"0\n0\n", "no_trace", None),
    ],
)
def test_a_broken_trace_file_names_the_line(tmp_path: Path, content: bytes, code: str, line: int | None) -> None:
    path = tmp_path / "link.up"
    path.write_bytes(content)
    with refused(code) as caught:
        read_trace(path)
    assert line is None or f"{path}, line {line}:" in str(caught.value)


@pytest.fixture
def recorded(tmp_path: Path) -> list[str]:
    """`--trace` with two files."""
    files = [tmp_path / "up", tmp_path / "down"]
    for path, content in zip(files, ("7\n", "8\n9\n"), strict=True):
        path.write_text(content)
    return ["--trace", *map(str, files)]


def links(*argv: str, endpoint: Endpoint | None = None) -> dict[str, LinkProfile | None]:
    parser = argparse.ArgumentParser()
    add_link_options(parser)
    return links_of(parser.parse_args(argv), endpoint)


def test_links_are_named_in_order_and_once() -> None:
    assert list(links()) == ["fios", "cable", "lte", "4g"]
    assert links("--profiles", "direct, 3g,lan,3g") == {"direct": None, "3g": PROFILES["3g"], "lan": PROFILES["lan"]}


def test_a_recorded_link_stands_alone_or_after_others(recorded: list[str]) -> None:
    trace = LinkProfile("trace", None, None, 0, up_trace=Trace((7,)), down_trace=Trace((8, 9)))
    assert links(*recorded) == {"trace": trace}
    found = links("--profiles", "direct,lte", "--round-trip-ms", "35", *recorded)
    assert list(found) == ["direct", "lte", "trace"] and found["trace"].round_trip_ms == 35


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--profiles", "fios,wifi"], "unknown_profile"),
        (["--profiles", ""], "unknown_profile"),
        (["--profiles", "trace"], "unknown_profile"),
        (["--round-trip-ms", "5"], "contradiction"),
        (["--trace", "nowhere", "nowhere"], "not_readable"),
    ],
)
def test_impossible_links_are_refused(argv: list[str], code: str) -> None:
    with refused(code):
        links(*argv)


@pytest.mark.parametrize("ms", ["-1", "nan", "inf"])
def test_an_impossible_round_trip_is_refused(recorded: list[str], ms: str) -> None:
    with refused("out_of_range"):
        links(*recorded, f"--round-trip-ms={ms}")
