"""Who may download when: places, those that give way, and the pace of all together. Without a network."""

from __future__ import annotations

import pytest

from moa_server.downloads import Downloads

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


def test_who_reads_slowly_gives_way_the_oldest_first(begin, ended, clock):
    quick, slow, slower = begin("quick"), begin("slow"), begin("slower")
    clock.now = 1.0
    begin("new")
    clock.now = 5.5
    quick.sent(6 * 32 * KB)
    slow.sent(5 * 32 * KB)
    slower.sent(1)
    assert begin("another") and ended == ["slow"]
    assert begin("one more") and ended == ["slow", "slower"]
    assert begin("too many") is None  # the rest is quick, or was not there for five seconds
    clock.now = 6.0
    assert begin("later") and ended == ["slow", "slower", "new"]
    begin.downloads.over(slow)  # the connection's own end comes later
    assert len(begin.downloads) == 4


def test_a_crowded_network_gives_way_to_itself_alone(begin, ended, clock):
    begin("other")
    begin("a", "net"), begin("b", "net")
    clock.now = 10.0
    assert begin("c", "net") and ended == ["a"]


def test_all_together_keep_a_pace(begin, clock):
    downloads = begin.downloads
    assert downloads.wait_s(125 * KB) == 0  # what was saved up
    assert downloads.wait_s(500 * KB) == 0
    assert downloads.wait_s(1) == pytest.approx(0.5)
    clock.now = 100.0
    assert downloads.wait_s(1) == 0
