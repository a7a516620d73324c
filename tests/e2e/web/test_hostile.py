"""The TypeScript client against servers that do what no verifier does: it says what Python's says, and asks on.

See tests/integration/system/test_hostile_messages.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.system.test_hostile_messages import MESSAGES
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.system.hostile import Peer, Server, listening

_WITHIN_S = 60.0
_MOST_BYTES = 200 << 20  # that a server may cost
_HEAP_MB = 600  # of the program, at most


class HostileClient:
    """A program in Node that asks one server after the other, and dies of an uncaught error."""

    def __init__(self, web: Path) -> None:
        command = ["node", f"--max-old-space-size={_HEAP_MB}", str(web / "dist" / "test" / "hostile_client.js")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def outcome(self, server: Server) -> str:
        """What a user hears of it."""

        async def run() -> str:
            async with listening(server) as port:
                return await asyncio.wait_for(asyncio.to_thread(self._ask, port), _WITHIN_S)

        told = json.loads(asyncio.run(run()))
        assert told["bytes"] < _MOST_BYTES
        said: str = told["said"]
        assert said.isprintable() and len(said) < 700
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, port: int) -> str:
        assert self._process.stdin and self._process.stdout
        print(port, file=self._process.stdin, flush=True)
        return self._process.stdout.readline() or pytest.fail("the client has died: see what it wrote")


@pytest.fixture(scope="module")
def client(compiled: Path) -> Iterator[HostileClient]:
    running = HostileClient(compiled)
    yield running
    running.close()


@pytest.mark.parametrize("case", range(len(MESSAGES)))
def test_messages_that_no_verifier_sends(case: int, client: HostileClient) -> None:
    wrong, said = MESSAGES[case]
    said = re.sub(r"^refused: \\\[\S+\] ?", "refused: ", said)  # codes are Python's
    assert re.match(said, heard := client.outcome(Server(**wrong))), heard


async def _flood(peer: Peer, message: bytes) -> None:
    while True:
        peer.frame(message)
        await peer.flush()


_WELCOME = wire.ServerMessage(welcome=wire.Welcome(protocol_version=2, limits=wire.Limits(max_context=200)))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"", "refused: the server sent an event this version does not know"),
        (_WELCOME.SerializeToString(), "waits|offline: |failed: "),
        (b"\0" * (5 << 20), "refused: the verifier sent a frame of 5242880 bytes"),
    ],
)
def test_a_flood_in_the_place_of_a_welcome(message: bytes, said: str, client: HostileClient) -> None:
    heard = client.outcome(Server(greeted=lambda peer: _flood(peer, message)))
    assert re.match(said, heard), heard
