"""Attacks on a verifier in a process of its own: an honest session goes on, and nothing grows."""

from __future__ import annotations

import multiprocessing
import threading

import psutil
import pytest
from test_endings import TESTS

from moa_runtime.session.events import Sampling
from support.server.attacks import MEMBERS, STRANGERS, Victim, keep_up
from support.server.edge_running import eventually
from support.server.running import Client, Verifier, moa_serve
from support.toy_engine import PRINTS, ToyEngine
from support.toy_engine import plain as toy_plain

CONNECTIONS = {"idle sockets": 300, "slow bodies": 300, "half handshakes": 300}
PROGRAM = "from support.server.verifier_process import main; main()"
LENGTH = 40


def attack(name: str, port: int, stop) -> None:
    """Attack until told to stop, from a process of one's own."""
    made, victim = {**STRANGERS, **MEMBERS}[name], Victim(port, PRINTS)

    def on() -> None:
        while not stop.is_set():
            keep_up(made, victim, 0.5)

    threads = [threading.Thread(target=on, daemon=True) for _ in range(CONNECTIONS.get(name, 4))]
    for thread in threads:
        thread.start()
    stop.wait()


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


@pytest.mark.parametrize("name", [*STRANGERS, *MEMBERS])
def test_an_honest_session_goes_on(victim, name):
    process, port = victim
    prompt = [5, 6, 7]
    expected = [*prompt, *toy_plain(ToyEngine(), prompt, LENGTH)]
    assert answer(port, prompt) == expected
    memory, descriptors = process.memory_info().rss, process.num_fds()
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    attacking = spawn.Process(target=attack, args=(name, port, stop), daemon=True)
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
