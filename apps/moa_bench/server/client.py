"""One client: a process of its own that loads the bundle once and then works window by window."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from moa_bench.server.modes import Asked, Workload, chat, stream
from moa_bench.server.record import ClientRecord, Recorder
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError


@dataclass(frozen=True)
class Window:
    """An order to work in one of the MODES, for so many seconds from its receipt on."""

    mode: str
    seconds: float
    asked: Asked


@dataclass(frozen=True)
class Ready:
    """The client is loaded and waits for windows."""


@dataclass(frozen=True)
class Failed:
    """The client cannot go on; the sentence says why."""

    reason: str


def run_client(connection: Connection, bundle_folder: Path, work: Workload) -> None:
    """The process: sends Ready, then a ClientRecord for each Window it receives, or Failed as its last word.

    Ends when the other end of ``connection`` is closed.
    """
    try:
        bundle = Bundle.open(bundle_folder)
        backend = load_backend(bundle, threads=1)
        connection.send(Ready())
        while True:
            window: Window = connection.recv()
            recorder = Recorder(window.seconds)
            if window.mode == "stream":
                answering = stream(window.asked, work, recorder)
            else:
                answering = chat(bundle, backend, window.asked, work, window.mode, recorder)
            connection.send(asyncio.run(_until_over(answering, window.seconds, recorder)))
    except (EOFError, BrokenPipeError):
        return
    except MoaError as error:
        connection.send(Failed(str(error)))


async def _until_over(answering: Coroutine[None, None, None], seconds: float, recorder: Recorder) -> ClientRecord:
    task = asyncio.create_task(answering)
    ended, _ = await asyncio.wait({task}, timeout=seconds)
    for early in ended:
        early.result()  # it only ends by raising
    record = recorder.record()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return record
