"""Attacks on a verifier in a process of its own: an honest session goes on, and nothing grows."""

from __future__ import annotations

import multiprocessing

import psutil
import pytest
from test_endings import TESTS

from moa_runtime.session.events import Sampling
from support.server.attacks import MEMBERS, STRANGERS, attack_until
from support.server.edge_running import eventually
from support.server.running import Client, Verifier, moa_serve
from support.toy_engine import PRINTS, ToyEngine
from support.toy_engine import plain as toy_plain

#: A fork of a program that has imported everything begins at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["support.server.attacks"])
PROGRAM = "from support.server.verifier_process import main; main()"
LENGTH = 8


@pytest.fixture(scope="module")
def victim():
    with moa_serve(program=PROGRAM, cwd=TESTS) as (running, ready):
        yield psutil.Process(running.pid), ready["port"]
        assert running.poll() is None


def answer(port: int, prompt: list[int]) -> list[int]:
    client = Client(Verifier(None, port, ""), ToyEngine())
    client.connect()
    client.session.prompt(prompt, Sampling(), LENGTH)
    client.rounds(lambda tokens: [])
    client.socket.close()
    assert not client.faults
    return client.session.committed


@pytest.mark.parametrize("name", [*STRANGERS, *list(MEMBERS)[1:]])  # the first is that of a stranger, without a token
def test_an_honest_session_goes_on(victim, name):
    process, port = victim
    prompt = [5, 6, 7]
    expected = [*prompt, *toy_plain(ToyEngine(), prompt, LENGTH)]
    assert answer(port, prompt) == expected
    memory, descriptors = process.memory_info().rss, process.num_fds()
    stop = FORKS.Event()
    attacking = FORKS.Process(target=attack_until, args=(name, port, PRINTS, stop), daemon=True)
    attacking.start()
    try:
        eventually(lambda: process.num_fds() > descriptors)  # it has begun
        for _ in range(3):
            assert answer(port, prompt) == expected
        assert attacking.is_alive()
    finally:
        stop.set()
        attacking.join(5)
        attacking.kill()
    assert answer(port, prompt) == expected
    eventually(lambda: process.num_fds() <= descriptors + 2)
    assert process.memory_info().rss < memory + (150 << 20)
