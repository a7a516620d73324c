"""Clients that write all the time, in a process of their own.

Usage: ``python writing_clients.py PORT COUNT``. Prints a line when all of them are being answered, and at the end the
codes of their close frames and the number of tokens that they have got, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time

from websockets.exceptions import ConnectionClosed

from moa_runtime.session.events import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.server.running import Client, Verifier
from support.toy_engine import ToyEngine

_PING = wire.ClientMessage(ping=wire.Ping()).SerializeToString()
_PAUSE_S = 0.005
_LENGTH = 900


class Writing(Client):
    """A client whose answer comes unrequested; ``code`` is that of the close frame, None without one."""

    code: int | None = None

    def __init__(self, port: int, prompt: list[int]) -> None:
        super().__init__(Verifier(None, port, ""), ToyEngine())
        self.connect()
        self.session.prompt(prompt, Sampling(), _LENGTH)
        self.session.grant_credit(_LENGTH)
        while len(self.session.committed) <= len(prompt):
            self.exchange()

    def write_until_closed(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.socket.send(_PING)
                time.sleep(_PAUSE_S)

    def read_until_closed(self) -> None:
        try:
            while True:
                self.events += self.session.receive(self.socket.recv())
        except ConnectionClosed as closed:
            self.code = closed.rcvd.code if closed.rcvd else None


def main(port: int, count: int) -> None:
    prompts = [[5 + number, 6, 7] for number in range(count)]
    clients = [Writing(port, prompt) for prompt in prompts]
    works = [work for each in clients for work in (each.read_until_closed, each.write_until_closed)]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()
    tokens = sum(len(each.session.committed) for each in clients) - sum(map(len, prompts))
    print(json.dumps({"codes": [client.code for client in clients], "tokens": tokens}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
