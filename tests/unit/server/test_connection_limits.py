"""Which connections are ended: ceilings and deadlines, without a network."""

from __future__ import annotations

from functools import partial

from moa_server.edge.connection_limits import ConnectionSlots, EdgeLimits
from moa_server.edge.server import ceiling
from support.refusals import refused

PEERS = [("127.0.0.1", str(port)) for port in range(20)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def slots(limits: EdgeLimits | None = None) -> tuple[ConnectionSlots, Clock]:
    clock = Clock()
    return ConnectionSlots(limits or EdgeLimits(), 20, clock), clock


def test_an_eighth_of_the_slots_is_never_busy():
    made, _ = slots()
    assert [made.begin(peer) for peer in PEERS] == [True] * 18 + [False] * 2
    made.finish(PEERS[0])
    assert made.begin(PEERS[-1]) and made.busy == 18


def test_a_connection_waits_from_its_start_or_its_last_answer():
    made, clock = slots(EdgeLimits(header_seconds=10))
    assert made.overdue(dict.fromkeys(PEERS[:2], 0)) == []
    made.begin(PEERS[0])
    clock.now = 9
    made.finish(PEERS[0])
    clock.now = 10
    assert made.overdue(dict.fromkeys(PEERS[:2], 0)) == [PEERS[1]]
    clock.now = 19
    assert made.overdue({PEERS[0]: 0}) == [PEERS[0]] and len(made) == 1
    assert made.overdue({}) == [] and len(made) == 0


def test_time_in_which_the_process_was_stopped_is_not_counted():
    made, clock = slots(EdgeLimits(header_seconds=10))
    made.overdue({PEERS[0]: 0})
    clock.now = 3600.0
    made.excuse(3595.0)
    assert made.overdue({PEERS[0]: 0}) == []
    clock.now = 3606.0
    assert made.overdue({PEERS[0]: 0}) == [PEERS[0]]


def test_those_that_have_waited_longest_give_way_and_busy_ones_do_not():
    made, clock = slots()
    for peer in PEERS[:17]:
        made.begin(peer)
    waiting = PEERS[17:]
    for clock.now, peer in enumerate(waiting):
        made.overdue(dict.fromkeys([*PEERS[:17], *waiting[: waiting.index(peer) + 1]], 0))
    assert made.overdue(dict.fromkeys(PEERS, 0)) == waiting[:1]


def test_connections_that_are_closed_do_not_push_others_out():
    made, _ = slots(EdgeLimits(per_address=2))
    assert made.overdue({PEERS[0]: 0, PEERS[1]: 0, **dict.fromkeys(PEERS[2:], None)}) == []
    assert len(made.overdue(dict.fromkeys(PEERS, 0))) == 18


def test_a_websocket_may_send_what_the_app_takes_and_little_else():
    made, _ = slots(EdgeLimits(unused_bytes=1000))
    made.begin(PEERS[0], websocket=True)
    made.begin(PEERS[1])
    sent = dict.fromkeys(PEERS[:2], 1000)
    assert made.overdue(sent) == []
    sent = dict.fromkeys(PEERS[:2], 1001)
    assert made.overdue(sent) == [PEERS[0]]
    made.take(PEERS[0], 1)
    assert made.overdue(sent) == []


def test_bodies_give_way_to_others_of_their_network_or_of_the_largest():
    made, ended = slots(EdgeLimits(per_address=3))[0], []
    large = [("10.0.0.2", port) for port in "1234"]
    peers = [("10.0.0.1", "1"), *large, ("10.0.0.3", "1"), ("10.0.0.4", "1")]
    for peer in peers:
        assert made.begin(peer)
        made.body_begins(peer, partial(ended.append, peer))
    assert ended == large[:2]  # 20 places: at most 5 bodies
    assert made.busy == 5, "those that gave way are not busy, though their requests have not ended"
    for peer in peers:
        made.finish(peer)
    assert made.busy == 0


def test_bodies_that_come_in_one_burst_do_not_make_all_connections_busy():
    made, ended = slots(EdgeLimits())[0], []
    for port in range(300):
        assert made.begin(("10.0.0.1", str(port)))
        made.body_begins(("10.0.0.1", str(port)), partial(ended.append, port))
    assert made.begin(("10.0.0.2", "1"), websocket=True)


def test_an_ipv6_network_counts_as_one_client():
    hosts = ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "fe80::1%eth0", "")
    made, _ = slots(EdgeLimits(per_address=1))
    assert len(made.overdue({(host, "1"): 0 for host in hosts})) == 1


def test_the_ceiling_lies_below_the_descriptor_limit():
    assert ceiling(2048, None) == ceiling(2048, 65536) == 2048
    assert ceiling(2048, 1024) == (1024 - 128) // 2
    with refused("too_few_descriptors") as error:
        ceiling(2048, 64)
    assert "64" in str(error.value)
