"""A verifier that has nothing under way ends at once, whatever its engine has imported."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from moa_runtime.session.events import Sampling
from moa_server.settings import Settings
from support.server.edge_running import eventually
from support.server.running import TIMEOUT_S, Client, Verifier, moa_serve, serving
from support.toy_engine import ToyEngine

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")

COUNT = 24

#: moa-serve with a toy. What an engine leaves behind says so where Python takes it apart, and where it ends in order.
PROGRAM = """
import atexit, os, sys
import moa_server.cli as cli
from support.toy_engine import ToyEngine

class Left:
    def __del__(self):
        os.write(2, b"taken apart ")

def load(options):
    global left
    left = Left()
    atexit.register(print, "in order", end="")
    return ToyEngine()

cli.load_engine = load
sys.exit(cli.main())
"""


@pytest.mark.parametrize("streamed", [False, True], ids=["drafted", "streamed"])
def test_chats_that_have_finished_their_answers_are_not_waited_for(streamed):
    engine = ToyEngine()
    with serving(engine, Settings(), drain_seconds=100 * TIMEOUT_S) as verifier:
        clients = [Client(verifier, engine) for _ in range(4)]
        for number, client in enumerate(clients):
            client.connect()
            client.session.prompt([5 + number, 6, 7], Sampling(), COUNT)
            if streamed:
                client.session.grant_credit(COUNT + 3)
            client.rounds(lambda tokens: [])
            assert client.finished
        verifier.server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: verifier.server.should_exit)


def test_python_does_not_take_apart_what_has_served():
    beside_toys = Path(__file__).parents[2]
    options = ("--no-drafts", "--drain-seconds", 1000)
    with moa_serve(*options, program=PROGRAM, cwd=beside_toys) as (process, ready):
        assert Verifier(None, ready["port"], "").decode([5], 3, Sampling())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=2 * TIMEOUT_S)
    assert (process.returncode, out, err) == (0, "in order", "")
