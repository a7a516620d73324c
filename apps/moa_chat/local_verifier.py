"""A verifier, and if need be a bundle, made on this machine: for ``moa-chat --local`` and for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from moa_chat import strings
from moa_runtime.bundle import MANIFEST_FILE, make_bundle
from moa_runtime.cli_main import own_program
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DrafterName
from moa_runtime.paths import bundle_of_drafter
from moa_runtime.transport import Endpoint

#: Options of ``moa-serve`` for a verifier of this machine: it ends with the program that holds its standard input open.
SERVE_HERE = ("--json", "--port", "0", "--until-stdin-ends")

_START_SECONDS = 600.0  # the first start fetches the target
_EVERY_S = 60.0
_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class LocalVerifier:
    """A verifier that runs on this machine: its endpoint, its process, and its log."""

    endpoint: Endpoint
    _process: subprocess.Popen[bytes]
    _log: IO[bytes]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def problem(self) -> MoaError | None:
        """The error with which it ended by itself; None while it runs."""
        if self._process.poll() is None:
            return None
        return _ended("the verifier on this machine ended", self._process, self._log)


def ensure_bundle(drafter: DrafterName | None = None) -> None:
    """Export the bundle for a drafter if it is not there, progress on stderr. Raises MoaError if that fails."""
    folder = bundle_of_drafter(drafter)
    if not (folder / MANIFEST_FILE).exists():
        make_bundle(folder, "onnx", "--local", "a minute or more", drafter)


@contextlib.contextmanager
def local_verifier(
    options: Sequence[str] = (), *, cpus: set[int] | None = None, token: str | None = None
) -> Iterator[LocalVerifier]:
    """Run a verifier on a free port of this machine while the context is open, with ``options`` of ``moa-serve``, on
    all ``cpus`` if none are given, and with a token of its own unless one is given. Raises MoaError if it does not
    start, as when the server's packages are not installed."""
    require_extra("server", "--local (moa-serve)")
    print(strings.STARTING_LOCAL, file=sys.stderr, flush=True)
    token = token or secrets.token_urlsafe(24)  # other users of this machine reach its port too
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            own_program("moa_server.cli", *SERVE_HERE, *options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,  # its messages would end up in the middle of the answers
            env={**os.environ, "MOA_TOKEN": token},
            # Ctrl-C in this terminal stops an answer, and must not reach the verifier.
            start_new_session=os.name == "posix",
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        try:
            if cpus is not None:
                os.sched_setaffinity(process.pid, cpus)
            yield LocalVerifier(Endpoint(_ready_url(process, log), token), process, log)
        finally:
            _stop(process)


def _ready_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Wait for the verifier's ready line, and return its URL."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    began = time.monotonic()
    while (waited := time.monotonic() - began) < _START_SECONDS:
        try:
            line = lines.get(timeout=min(_EVERY_S, _START_SECONDS - waited))
        except queue.Empty:
            print(strings.STILL_STARTING.format(time.monotonic() - began), file=sys.stderr, flush=True)
            continue
        if not line:
            break
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["url"])
    else:
        raise MoaError(f"the verifier was not ready within {_START_SECONDS:g} s", code="timed_out")
    process.wait(_STOP_SECONDS)
    raise _ended("the verifier did not start", process, log)


def _ended(what: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> MoaError:
    log.seek(0)
    words, code = last_error(log.read(), process.returncode)
    return MoaError(f"{what}: {words}", code=code or "verifier_ended")


def last_error(stderr: bytes, status: int) -> tuple[str, str | None]:
    """Return the sentence of :func:`~moa_runtime.cli_main.run_program`, or the exit status, and the code."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    found = re.fullmatch(r"(?:.*?error: )?(.*?)(?:  \[(\w+)\])?", lines[-1]) if lines else None
    return (found[1], found[2]) if found else (f"exit status {status}", None)


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Read to the end, also after the ready line, so that the pipe never fills up."""
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()  # not before: its end would reach the verifier sooner than the signal
