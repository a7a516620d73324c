"""A verifier with the toy engine in a process of its own, until a signal comes; no client floods it.

Usage: ``python verifier_process.py CLOSE_SECONDS [CERTIFICATE KEY]``. Prints a line with its port when clients may
connect, and one with the number of tokens that it has committed when it ends.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from moa_server.app import Verifier
from moa_server.edge.connection_limits import EdgeLimits
from moa_server.process import VerifierServer
from moa_server.settings import Settings
from support.toy_engine import ToyEngine


def main(close_seconds: str, *tls: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = VerifierServer(
            Verifier(ToyEngine(delay_s=(0.001, 0.0)), Settings(away_seconds=0, max_waiting_frames=1 << 20)),
            limits=EdgeLimits(close_seconds=float(close_seconds)),
            drain_seconds=60.0,
            tls=(Path(tls[0]), Path(tls[1])) if tls else None,
            on_ready=lambda: print(listening.getsockname()[1], flush=True),
        )
        server.run(sockets=[listening])
    text = server.verifier.metrics.text().decode()
    print(int(float(re.search(r'^moa_tokens_total\{kind="committed"\} (.*)$', text, re.MULTILINE)[1])))


if __name__ == "__main__":
    main(*sys.argv[1:])
