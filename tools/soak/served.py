"""A real moa-serve process, and what the system says of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from moa_runtime.cli_main import own_program
from moa_runtime.manifest import Fingerprints
from moa_server.web.certificate import own_certificate
from soak.raw import Target

_COMMAND = own_program("moa_server.cli")


@dataclass
class Served:
    """A running verifier.

    Attributes:
        log: the file that has its stderr.
    """

    target: Target
    process: psutil.Process
    log: Path

    @property
    def memory(self) -> int:
        """Bytes of physical memory."""
        return int(self.process.memory_info().rss)

    @property
    def descriptors(self) -> int:
        return int(self.process.num_fds())

    @property
    def processes(self) -> int:
        """Those that it started, and that these did."""
        return len(self.process.children(recursive=True))

    @property
    def running(self) -> bool:
        return bool(self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE)


@contextlib.contextmanager
def served(log: Path, options: Sequence[str], vocabulary: int, context: int, *, tls: bool = False) -> Iterator[Served]:
    """Start a verifier on a free port, and end it with SIGTERM.

    Args:
        options: of moa-serve.
        vocabulary, context: sizes of its target.
        tls: whether it has a certificate, which is made beside the log.

    Raises:
        RuntimeError: it did not start, or did not end as it should.
    """
    if tls:
        certificate = str(own_certificate(log.parent, []).file)
        options = [*options, "--tls-cert", certificate, "--tls-key", certificate]
    with log.open("w") as stderr:
        command = [*_COMMAND, "--port", "0", "--json", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the verifier did not start: {log.read_text()}")
            ready = json.loads(line)
            target = Target(ready["port"], Fingerprints(**ready["fingerprints"]), vocabulary, context, tls)
            target.verifier.http("GET", "/healthz").raise_for_status()
            yield Served(target, psutil.Process(process.pid), log)
            process.terminate()
            if process.wait(30):
                raise RuntimeError(f"the verifier ended with status {process.returncode}")
        finally:
            process.kill()
            process.wait()
