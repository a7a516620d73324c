"""Who may download when: places, those that give way, and the pace of all together. Without a network."""

from __future__ import annotations

import pytest

from moa_server.web.site import Downloads

KB = 1 << 10


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ended():
    """Names of those whose connection was closed."""
    return []


@pytest.fixture
def begin(ended, clock):
    """A function that begins a download, of a network of its own where none is named."""
    downloads = Downloads(most=4, bytes_per_second=1000 * KB, clock=clock)

    def beginning(name: str, network: str = ""):
        return downloads.begin(network or name, lambda: ended.append(name))

    beginning.downloads = downloads
    return beginning


def test_so_many_and_no_more(begin, ended):
    running = [begin(name) for name in "abcd"]
    assert all(running) and begin("e") is None and len(begin.downloads) == 4 and not ended
    begin.downloads.over(running[0])
    begin.downloads.over(running[0])  # again does no harm
    assert begin("e") and begin("f") is None


def test_of_one_network_half_of_them(begin):
    assert begin("a", "net") and begin("b", "net") and begin("c", "net") is None
    assert begin("d") and begin("e") and begin("f") is None


def read(begin, download, clock, rate: int, seconds: int) -> None:
    """A reader of so many bytes a second, from the clock's time on."""
    for _ in range(seconds):
        clock.now += 1
        begin.downloads.wait_s(download, rate)


def test_who_stands_still_gives_way_the_oldest_first(begin, ended, clock):
    begin("a"), begin("b")
    quick = begin("quick")
    clock.now = 5.0
    begin("new")
    assert begin("early") is None
    read(begin, quick, clock, 100 * KB, 6)
    assert begin("another") and ended == ["a"]
    assert begin("one more") and ended == ["a", "b"]
    assert begin("too many") is None  # the rest reads, or was not there for ten seconds


def test_who_only_filled_the_buffers_gives_way_too(begin, ended, clock):
    trickle, steady = begin("trickle", "net"), begin("steady", "net")
    for each in (trickle, steady):
        begin.downloads.wait_s(each, 4000 * KB)  # what the system takes of it
    for _ in range(22):
        clock.now += 1
        begin.downloads.wait_s(trickle, 8 * KB)
        begin.downloads.wait_s(steady, 40 * KB)
    assert begin("next", "net") and ended == ["trickle"]


def test_a_connection_that_was_ended_is_over_once(begin, ended, clock):
    running = [begin(name) for name in "abcd"]
    clock.now = 10.0
    assert begin("e") and ended == ["a"]
    begin.downloads.over(running[0])  # its own end comes later
    assert len(begin.downloads) == 4


def test_a_crowded_network_gives_way_to_itself_alone(begin, ended, clock):
    begin("other")
    begin("a", "net"), begin("b", "net")
    clock.now = 10.0
    assert begin("c", "net") and ended == ["a"]


def test_all_together_keep_a_pace(begin, clock):
    a, b, wait_s = begin("a"), begin("b"), begin.downloads.wait_s
    assert wait_s(a, 125 * KB) == 0  # what was saved up
    assert wait_s(b, 500 * KB) == 0
    assert wait_s(a, 1) == pytest.approx(0.5)
    clock.now = 100.0
    assert wait_s(b, 1) == 0
