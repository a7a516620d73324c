"""Which connections are ended: ceilings and deadlines, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from unittest.mock import Mock

import pytest

from moa_server.edge.connection_limits import ConnectionSlot, ConnectionSlots, EdgeLimits
from moa_server.edge.server import ceiling
from support.refusals import refused

KB = 1 << 10
LIMITS = EdgeLimits(send_seconds=30, close_seconds=5, write_buffer_bytes=1000 * KB)


def transport() -> Mock:
    """A transport for which ``waiting`` bytes are unsent."""
    made = Mock(spec=asyncio.Transport, waiting=0)
    made.get_write_buffer_size.side_effect = lambda: made.waiting
    made.is_closing.return_value = False
    return made


class Opened:
    """Slots, each with a transport; their clock reads ``now``."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.now, self._stack = 0.0, stack

    def open(self, count=1, limits=LIMITS, hosts=()) -> tuple[ConnectionSlots, list[ConnectionSlot]]:
        self.slots, made = ConnectionSlots(limits, 20, lambda: self.now), []
        for number in range(count):
            connected, other = socket.socketpair()
            self._stack.enter_context(connected), self._stack.enter_context(other)
            made.append(self.slots.enter(connected, hosts[number] if hosts else "127.0.0.1"))
            made[-1].transport = transport()
            made[-1].set_deadline(None)
        return self.slots, made

    def after(self, seconds: float) -> None:
        """Check the deadlines that much later."""
        self.now += seconds
        self.slots.sweep()


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield Opened(stack)


@pytest.mark.parametrize("closing", [False, True])
def test_a_slow_reader_is_kept_and_one_that_stops_is_ended(opened, closing):
    _, (slot,) = opened.open()
    transport = slot.transport
    transport.waiting, transport.is_closing.return_value = 640 * KB, closing
    if not closing:
        slot.write_paused(True)
    opened.after(0)
    for _ in range(9):
        transport.waiting -= 64 * KB
        opened.after(29)
    if not closing:  # a buffer that empties in between is forgiven
        slot.write_paused(False)
        opened.after(29)
        slot.write_paused(True)
        opened.after(0)
    opened.after(29)
    assert not transport.abort.called
    transport.waiting -= 10
    opened.after(1)
    assert transport.abort.called


@pytest.mark.parametrize("lingers", [False, True])
def test_a_closed_connection_has_its_time_to_close_from_the_last_sent_byte(opened, lingers):
    _, (slot,) = opened.open()
    transport = slot.transport
    if lingers:
        transport.waiting = 10 * KB
        assert slot.linger() and transport.write_eof.called
        for _ in range(2):
            opened.after(9)
        transport.waiting = 0
    else:
        transport.is_closing.return_value = True
    opened.after(0)
    opened.after(4)
    assert not transport.abort.called
    opened.after(1)
    assert transport.abort.called


def test_the_limit_of_unsent_data_leaves_room_for_the_largest_message(opened):
    _, (slot,) = opened.open()
    for waiting, sent, aborted in ((5000, 5000, False), (6000, 0, False), (6001, 0, True)):
        slot.transport.waiting = waiting * KB
        slot.check_write_buffer(sent * KB)
        assert slot.transport.abort.called is aborted


def test_a_connection_that_cannot_be_closed_does_not_keep_others(opened, caplog):
    _, made = opened.open(2)

    def broken() -> None:
        raise RuntimeError("broken")

    for slot in made:
        slot.on_deadline = broken
        slot.set_deadline(1)
    opened.after(1)
    assert all(slot.transport.abort.called for slot in made) and len(caplog.records) == 1


def test_an_eighth_of_the_slots_is_never_busy(opened):
    slots, made = opened.open(20)
    assert [slot.begin() for slot in made] == [True] * 18 + [False] * 2
    made[0].wait()
    assert made[-1].begin() and slots.busy == 18
    for slot in made:
        slot.leave()
        slot.leave()
    assert slots.busy == len(slots) == 0


def test_an_ipv6_network_counts_as_one_client(opened):
    hosts = ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "fe80::1%eth0", "")
    _, made = opened.open(len(hosts), EdgeLimits(per_address=1), hosts)
    assert [slot.ending for slot in made] == [True] + [False] * 6


def test_the_ceiling_lies_below_the_descriptor_limit():
    assert ceiling(2048, None) == ceiling(2048, 65536) == 2048
    assert ceiling(2048, 1024) == 1024 - 128
    with refused("too_few_descriptors") as error:
        ceiling(2048, 64)
    assert "64" in str(error.value)
