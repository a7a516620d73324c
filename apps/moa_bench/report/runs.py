"""Measuring what a folder of results lacks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from moa_bench.benchmarks import BENCHMARKS
from moa_bench.report.files import write_atomically
from moa_bench.report.stored import read_results
from moa_runtime.errors import MoaError

_PROGRAM = (sys.executable, "-c", "import sys; from moa_bench.cli import main; sys.exit(main())")
# Settings for a first look in minutes.
_SMALL: dict[str, tuple[str, ...]] = {
    "accept": ("--max-new-tokens", "64"),
    "device": ("--contexts", "128,512,1024", "--repeats", "20", "--max-new-tokens", "24"),
    "network": ("--profiles", "fios,lte", "--max-new-tokens", "24"),
    "offline": ("--lengths", "16,32,64"),
    "server": ("--sessions", "1,2", "--seconds", "5", "--repeats", "1"),
}


def measure_missing(folder: Path, questions: Path, limit: int) -> list[str]:
    """Run each benchmark that ``folder`` has no result of, in a small way, into ``folder/<benchmark>.json``.

    Each runs in a process of its own, which writes its messages and its progress to this one's stderr. What
    one measured before it failed is kept, as a partial result.

    Returns:
        the benchmarks that left no result.

    Raises:
        MoaError: no such folder, or ``folder/<benchmark>.json`` is there and holds something else.
        KeyboardInterrupt: after the benchmark that ran has stopped; it leaves no result.
    """
    from moa_drafter.progress import Progress

    present = {stored.benchmark for stored in read_results(folder)[0]}
    places = {name: folder / f"{name}.json" for name in BENCHMARKS if name not in present}
    for name, place in places.items():
        if place.exists():
            raise MoaError(f"{place} is in the way: it holds no result of {name}, so move or mend it")
    failed: list[str] = []
    if not places:
        return failed
    with Progress(places.items(), desc="report", unit="benchmark") as progress:
        for name, place in progress:
            progress.set_postfix_str(name)
            options = ("--questions", str(questions), "--limit", str(limit), *_SMALL.get(name, ()))
            printed = _output((*_PROGRAM, name, "--json", *options))
            if _is_json(printed):
                write_atomically(place, printed)
            else:
                failed.append(name)
    return failed


def _output(command: tuple[str, ...]) -> str:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        # Ctrl-C in the terminal reaches only this process, which hands it on once: a benchmark that is
        # told twice is disturbed while it stops its own verifier.
        start_new_session=True,
    )
    try:
        return process.communicate()[0]
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise


def _is_json(printed: str) -> bool:
    try:
        json.loads(printed)
    except ValueError:
        return False
    return True
