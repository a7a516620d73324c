"""``--timeline``: what device and verifier did and when, in one file."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moa_runtime.timeline import NO_TIMELINE, Timeline, read_sink, write_timeline


def add_timeline_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write what device and verifier did and when, as a Chrome trace (JSON) that Perfetto opens; of a verifier "
        "that was not started here only the device's end is known",
    )


@dataclass(frozen=True)
class Recording:
    """Where both ends write down what they do.

    Attributes:
        device: for this process.
        verifier_options: of ``moa-serve``, so that the verifier does the same.
    """

    device: Timeline = NO_TIMELINE
    verifier_options: Sequence[str] = ()


@contextlib.contextmanager
def recording(args: argparse.Namespace, process: str = "device") -> Iterator[Recording]:
    """Record while the context is open, and write the file at its end, whatever ends it.

    Without ``--timeline`` nothing is recorded.

    Args:
        process: what the drawing calls this process.

    Raises:
        MoaError: the file cannot be written.
    """
    if args.timeline is None:
        yield Recording()
        return
    with tempfile.TemporaryDirectory(prefix="moa-timeline-") as scratch:
        sink = Path(scratch) / "verifier.json"
        device = Timeline(process)
        try:
            yield Recording(device, ("--timeline", str(sink)))
        finally:
            write_timeline(args.timeline, [*device.events, *(read_sink(sink) if sink.exists() else [])])
