"""Our programs as processes of their own, with the tiny target."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moa_runtime.cli_main import own_program

TOKEN = "secret"


@dataclass
class Running:
    """A program that serves, and what its ready line says."""

    process: subprocess.Popen
    url: str
    port: int


@contextlib.contextmanager
def _serving(command: list[str], **options) -> Iterator[Running]:
    environment = {**os.environ, "MOA_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options) as process:
        try:
            line = process.stdout.readline()
            assert line, f"{command} ended with {process.wait()}"
            ready = json.loads(line)
            yield Running(process, ready["url"], ready["port"])
        finally:
            process.kill()


@contextlib.contextmanager
def verifier(target: Path, drafter: Path, port: int = 0, options: Sequence[str] = ()) -> Iterator[Running]:
    """``moa-serve``."""
    models = ["--model", str(target), "--drafter", str(drafter)]
    command = own_program("moa_server.cli", *models, "--json", "--port", str(port), "--threads", "1", *options)
    with _serving(command) as running:
        yield running


def chat(bundle: Path, url: str, *arguments: str) -> list[str]:
    """The command line of ``moa-chat``."""
    return own_program("moa_chat.cli", "--server", url, "--bundle", str(bundle), "--threads", "1", *arguments)


@contextlib.contextmanager
def gateway(bundle: Path, verifier_url: str, *arguments: str) -> Iterator[Running]:
    """``moa-chat --serve``; its lines on stderr are in ``process.stderr``."""
    command = chat(bundle, verifier_url, "--serve", "127.0.0.1:0", "--json", *arguments)
    with _serving(command, stderr=subprocess.PIPE) as running:
        yield running
