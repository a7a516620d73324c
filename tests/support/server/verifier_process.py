"""A verifier with the toy engine in a process of its own, until a signal comes; its peers may take long to close.

Prints a line with its port when clients may connect, and at the end one with the number of tokens it has committed.
"""

from __future__ import annotations

import json
import re
import socket

from moa_server.app import Verifier
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.edge.process_exit import ProcessExit
from moa_server.process import VerifierServer
from moa_server.settings import Settings
from support.toy_engine import ToyEngine


def main() -> None:
    end = ProcessExit()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = VerifierServer(
            Verifier(ToyEngine(delay_s=(0.001, 0.0)), Settings(away_seconds=0)),
            limits=EdgeLimits(close_seconds=300.0),
            drain_seconds=60.0,
            on_ready=lambda: print(json.dumps({"port": listening.getsockname()[1]}), flush=True),
        )
        server.run(listening)
    text = server.verifier.metrics.text().decode()
    print(int(float(re.search(r'^moa_tokens_total\{kind="committed"\} (.*)$', text, re.MULTILINE)[1])))
    end.served = True
