"""Who holds a connection: ceilings, and what is overdue, without a network."""

from __future__ import annotations

import contextlib
import socket

import pytest

from moa_runtime.errors import MoaError
from moa_server.edge.connection_limits import EdgeLimits, Place, Places
from moa_server.edge.server import ceiling

KB = 1 << 10
LIMITS = EdgeLimits(send_seconds=30, close_seconds=5, write_buffer_bytes=1000 * KB)


class Transport:
    """What a place asks of its transport."""

    waiting = 0
    closing = aborted = ended = False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.aborted = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def opened():
    """A function that opens places, each with a transport, and its clock."""
    with contextlib.ExitStack() as stack:
        clock = Clock()

        def opening(
            count: int = 1, limits: EdgeLimits = LIMITS, hosts: tuple[str, ...] = ()
        ) -> tuple[Places, list[Place]]:
            places, made = Places(limits, 20, clock), []
            for number in range(count):
                connected, other = socket.socketpair()
                stack.enter_context(connected), stack.enter_context(other)
                made.append(places.enter(connected, hosts[number] if hosts else "127.0.0.1"))
                made[-1].transport = Transport()
                made[-1].set_deadline(None)
            return places, made

        opening.clock = clock
        yield opening


def test_a_slow_reader_is_no_offender_and_one_that_stops_is(opened):
    places, (place,) = opened()
    transport = place.transport
    transport.waiting = 640 * KB
    place.write_paused(True)
    for _ in range(9):
        opened.clock.now += 29
        transport.waiting -= 64 * KB
        places.sweep()
    assert not transport.aborted
    opened.clock.now += 29
    places.sweep()
    assert not transport.aborted
    opened.clock.now += 1
    transport.waiting -= 10
    places.sweep()
    assert transport.aborted


def test_a_buffer_that_empties_in_between_is_forgiven(opened):
    places, (place,) = opened()
    place.transport.waiting = 100 * KB
    for _ in range(10):
        place.write_paused(True)
        opened.clock.now += 20
        places.sweep()
        place.write_paused(False)
    assert not place.transport.aborted


def test_a_closed_connection_sends_what_waits_as_long_as_it_is_read(opened):
    places, (place,) = opened()
    transport = place.transport
    transport.waiting, transport.closing = 640 * KB, True
    for _ in range(9):
        places.sweep()
        opened.clock.now += 29
        transport.waiting -= 64 * KB
        places.sweep()
    assert not transport.aborted
    opened.clock.now += 30
    places.sweep()
    assert transport.aborted


def test_a_closed_connection_with_nothing_to_send_ends_soon(opened):
    places, (place,) = opened()
    place.transport.closing = True
    places.sweep()
    opened.clock.now += 4
    places.sweep()
    assert not place.transport.aborted
    opened.clock.now += 1
    places.sweep()
    assert place.transport.aborted


def test_a_peer_has_its_time_to_close_from_when_the_last_byte_is_sent(opened):
    places, (place,) = opened()
    transport = place.transport
    transport.waiting = 10 * KB
    assert place.linger() and transport.ended
    for _ in range(2):
        places.sweep()
        opened.clock.now += 9
    transport.waiting = 0
    places.sweep()
    opened.clock.now += 4
    places.sweep()
    assert not transport.aborted
    opened.clock.now += 1
    places.sweep()
    assert transport.aborted


def test_the_bound_of_what_waits_leaves_room_for_the_largest_message(opened):
    _, (place,) = opened()
    place.transport.waiting = 5000 * KB
    place.check_write_buffer(5000 * KB)
    assert not place.transport.aborted
    place.transport.waiting = 6000 * KB
    place.check_write_buffer()
    assert not place.transport.aborted
    place.transport.waiting += 1
    place.check_write_buffer()
    assert place.transport.aborted


def test_one_that_cannot_be_closed_does_not_keep_others(opened, caplog):
    places, made = opened(2)

    def broken() -> None:
        raise RuntimeError("broken")

    for place in made:
        place.on_deadline = broken
        place.set_deadline(1)
    opened.clock.now = 1.0
    places.sweep()
    assert all(place.transport.aborted for place in made)
    assert len(caplog.records) == 1


def test_an_eighth_of_the_places_is_never_busy(opened):
    places, made = opened(20)
    assert [place.begin() for place in made] == [True] * 18 + [False] * 2
    made[0].wait()
    assert made[-1].begin() and places.busy == 18
    for place in made:
        place.leave()
        place.leave()
    assert places.busy == len(places) == 0


def test_networks_are_counted_as_one_subscriber_has_them(opened):
    limits = EdgeLimits(per_address=1)
    hosts = ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "fe80::1%eth0", "")
    _, made = opened(len(hosts), limits, hosts)
    assert [place.ending for place in made] == [True] + [False] * 6


def test_the_ceiling_lies_below_the_descriptor_limit():
    assert ceiling(2048, None) == ceiling(2048, 65536) == 2048
    assert ceiling(2048, 1024) == 1024 - 128
    with pytest.raises(MoaError, match="may open only 64 files and connections"):
        ceiling(2048, 64)
