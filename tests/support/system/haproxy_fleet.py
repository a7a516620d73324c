"""Two ``moa-serve`` processes behind HAProxy with the shipped configuration."""

from __future__ import annotations

import contextlib
import csv
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moa_chat.local_verifier import LocalVerifier, local_verifier
from moa_runtime.transport import Endpoint
from support.system.replica_fleet import REPLICAS, wait_for

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "haproxy.cfg"
_HOST = "127.0.0.1"
_STOP_SECONDS = 5.0
_DRAINED, _KILLED = 0, 1  # numbers of the verifiers


class HaproxyFleet:
    """Implement :class:`~system.replica_fleet.Fleet`. A verifier that has ended is started again on its own port."""

    def __init__(
        self, stack: contextlib.ExitStack, endpoint: Endpoint, ports: Sequence[int], stats: Path, options: Sequence[str]
    ) -> None:
        self.endpoint = endpoint
        self._stack, self._ports, self._stats, self._options = stack, ports, stats, options
        self._verifiers: list[LocalVerifier] = [self._start(port) for port in ports]
        self._gone = _DRAINED

    def drain(self) -> None:
        self._end(_DRAINED, signal.SIGTERM)

    def kill(self) -> None:
        self._end(_KILLED, signal.SIGKILL)

    def replace(self) -> None:
        self._verifiers[self._gone] = self._start(self._ports[self._gone])
        wait_for("HAProxy had not found the restarted verifier", self.whole)

    def whole(self) -> bool:
        """Whether HAProxy considers all verifiers healthy."""
        return self._up() == REPLICAS

    def _end(self, number: int, how: signal.Signals) -> None:
        verifier, self._gone = self._verifiers[number], number
        os.kill(verifier.pid, how)
        wait_for("a verifier had not ended", lambda: verifier.problem is not None)
        wait_for("HAProxy still considered an ended verifier healthy", lambda: self._up() == REPLICAS - 1)

    def _start(self, port: int) -> LocalVerifier:
        verifier = local_verifier([*self._options, "--port", str(port)], token=self.endpoint.token)
        return self._stack.enter_context(verifier)

    def _up(self) -> int:
        """Number of verifiers that HAProxy considers healthy."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(self._stats))
            asking.sendall(b"show stat\n")
            table = b"".join(iter(lambda: asking.recv(1 << 16), b"")).decode().removeprefix("# ")
        servers = [row for row in csv.DictReader(table.splitlines()) if row["pxname"] == "verifiers"]
        return sum(row["status"] == "UP" for row in servers if row["svname"] != "BACKEND")


def find_haproxy() -> str | None:
    """Return the program's path, also if it is outside an ordinary user's PATH; None if it is not installed."""
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextlib.contextmanager
def behind_haproxy(options: Mapping[str, object]) -> Iterator[HaproxyFleet]:
    """Run two verifiers with these options of ``moa-serve`` behind HAProxy while the context is open."""
    program = find_haproxy()
    assert program is not None, "haproxy is not installed"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moa-")))
        listening, *ports = _free_ports(1 + REPLICAS)
        endpoint = Endpoint(f"ws://{_HOST}:{listening}", secrets.token_urlsafe(24))
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        fleet = HaproxyFleet(stack, endpoint, ports, folder / "stats", words)
        addresses = {f"MOA_VERIFIER_{number}": f"{_HOST}:{port}" for number, port in enumerate(ports, 1)}
        stack.enter_context(_haproxy(program, folder, {"MOA_LISTEN": f"{_HOST}:{listening}"} | addresses))
        wait_for("HAProxy had not found the verifiers", fleet.whole)
        yield fleet


@contextlib.contextmanager
def _haproxy(program: str, folder: Path, addresses: dict[str, str]) -> Iterator[None]:
    """Run HAProxy with a statistics socket ``stats`` in the folder."""
    questions, log = folder / "questions.cfg", folder / "log"
    questions.write_text(f"global\n    stats socket {folder / 'stats'} mode 600 level admin\n")
    command = [program, "-db", "-f", str(CONFIGURATION), "-f", str(questions)]
    with log.open("wb") as said:
        process = subprocess.Popen(command, env={**os.environ, **addresses}, stdout=said, stderr=said)
    try:
        wait_for("HAProxy had not started", lambda: (folder / "stats").exists() or process.poll() is not None)
        assert process.poll() is None, f"HAProxy did not start: {log.read_text().strip()}"
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    """Return ports of this machine that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in listening]
