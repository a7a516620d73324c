"""Who holds a connection: ceilings, and what is overdue, without a network."""

from __future__ import annotations

import contextlib
import socket

import pytest

from moa_runtime.errors import MoaError
from moa_server.edge.connection_limits import ConnectionSlot, ConnectionSlots, EdgeLimits
from moa_server.edge.server import ceiling

KB = 1 << 10
LIMITS = EdgeLimits(send_seconds=30, close_seconds=5, write_buffer_bytes=1000 * KB)


class Transport:
    """What a slot asks of its transport."""

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
    """A function that opens slots, each with a transport, and its clock."""
    with contextlib.ExitStack() as stack:
        clock = Clock()

        def opening(
            count: int = 1, limits: EdgeLimits = LIMITS, hosts: tuple[str, ...] = ()
        ) -> tuple[ConnectionSlots, list[ConnectionSlot]]:
            slots, made = ConnectionSlots(limits, 20, clock), []
            for number in range(count):
                connected, other = socket.socketpair()
                stack.enter_context(connected), stack.enter_context(other)
                made.append(slots.enter(connected, hosts[number] if hosts else "127.0.0.1"))
                made[-1].transport = Transport()
                made[-1].set_deadline(None)
            return slots, made

        opening.clock = clock
        yield opening


def test_a_slow_reader_is_no_offender_and_one_that_stops_is(opened):
    slots, (slot,) = opened()
    transport = slot.transport
    transport.waiting = 640 * KB
    slot.write_paused(True)
    for _ in range(9):
        opened.clock.now += 29
        transport.waiting -= 64 * KB
        slots.sweep()
    assert not transport.aborted
    opened.clock.now += 29
    slots.sweep()
    assert not transport.aborted
    opened.clock.now += 1
    transport.waiting -= 10
    slots.sweep()
    assert transport.aborted


def test_a_buffer_that_empties_in_between_is_forgiven(opened):
    slots, (slot,) = opened()
    slot.transport.waiting = 100 * KB
    for _ in range(10):
        slot.write_paused(True)
        opened.clock.now += 20
        slots.sweep()
        slot.write_paused(False)
    assert not slot.transport.aborted


def test_a_closed_connection_sends_what_waits_as_long_as_it_is_read(opened):
    slots, (slot,) = opened()
    transport = slot.transport
    transport.waiting, transport.closing = 640 * KB, True
    for _ in range(9):
        slots.sweep()
        opened.clock.now += 29
        transport.waiting -= 64 * KB
        slots.sweep()
    assert not transport.aborted
    opened.clock.now += 30
    slots.sweep()
    assert transport.aborted


def test_a_closed_connection_with_nothing_to_send_ends_soon(opened):
    slots, (slot,) = opened()
    slot.transport.closing = True
    slots.sweep()
    opened.clock.now += 4
    slots.sweep()
    assert not slot.transport.aborted
    opened.clock.now += 1
    slots.sweep()
    assert slot.transport.aborted


def test_a_peer_has_its_time_to_close_from_when_the_last_byte_is_sent(opened):
    slots, (slot,) = opened()
    transport = slot.transport
    transport.waiting = 10 * KB
    assert slot.linger() and transport.ended
    for _ in range(2):
        slots.sweep()
        opened.clock.now += 9
    transport.waiting = 0
    slots.sweep()
    opened.clock.now += 4
    slots.sweep()
    assert not transport.aborted
    opened.clock.now += 1
    slots.sweep()
    assert transport.aborted


def test_the_bound_of_what_waits_leaves_room_for_the_largest_message(opened):
    _, (slot,) = opened()
    slot.transport.waiting = 5000 * KB
    slot.check_write_buffer(5000 * KB)
    assert not slot.transport.aborted
    slot.transport.waiting = 6000 * KB
    slot.check_write_buffer()
    assert not slot.transport.aborted
    slot.transport.waiting += 1
    slot.check_write_buffer()
    assert slot.transport.aborted


def test_one_that_cannot_be_closed_does_not_keep_others(opened, caplog):
    slots, made = opened(2)

    def broken() -> None:
        raise RuntimeError("broken")

    for slot in made:
        slot.on_deadline = broken
        slot.set_deadline(1)
    opened.clock.now = 1.0
    slots.sweep()
    assert all(slot.transport.aborted for slot in made)
    assert len(caplog.records) == 1


def test_an_eighth_of_the_places_is_never_busy(opened):
    slots, made = opened(20)
    assert [slot.begin() for slot in made] == [True] * 18 + [False] * 2
    made[0].wait()
    assert made[-1].begin() and slots.busy == 18
    for slot in made:
        slot.leave()
        slot.leave()
    assert slots.busy == len(slots) == 0


def test_networks_are_counted_as_one_subscriber_has_them(opened):
    limits = EdgeLimits(per_address=1)
    hosts = ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "fe80::1%eth0", "")
    _, made = opened(len(hosts), limits, hosts)
    assert [slot.ending for slot in made] == [True] + [False] * 6


def test_the_ceiling_lies_below_the_descriptor_limit():
    assert ceiling(2048, None) == ceiling(2048, 65536) == 2048
    assert ceiling(2048, 1024) == 1024 - 128
    with pytest.raises(MoaError, match="may open only 64 files and connections"):
        ceiling(2048, 64)
