"""A program that exports a bundle, and reports its progress as JSON objects on stdout.

``moa-export`` draws its progress for people, on a terminal. The window needs the same as data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from moa_export.progress import Advance, Progress
from moa_runtime.cli_main import run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the export; return the exit status as :func:`~moa_runtime.cli_main.run_program` says."""
    parser = argparse.ArgumentParser(description="Export a bundle and report progress as JSON.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="target model (default: the built-in one)")
    parser.add_argument("--drafter", help="a shipped one's name, or a checkpoint's folder")
    options = parser.parse_args(argv)
    # The export sends everything that is written to stdout and stderr to a log, and this is not for it.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        return run_program("moa-export", lambda: _export(options, out))


def _export(options: argparse.Namespace, out: TextIO) -> int:
    # Seconds of imports, and loud ones.
    from moa_export.toolchain_log import quiet_toolchain, toolchain_log

    with quiet_toolchain(toolchain_log()):
        from moa_drafter.pretrained import checkpoint_of
        from moa_drafter.target_source import DEFAULT_TARGET
        from moa_export.pipeline import ExportSettings, export_bundle

        drafter = checkpoint_of(options.drafter)
        settings = ExportSettings(("onnx",), drafter, model=options.model or DEFAULT_TARGET, checked=False)
        export_bundle(options.out, settings, JsonProgress(out))
    return 0


class JsonProgress(Progress):
    """Prints ``{"stage": ..., "part": 0 to 1}`` for each step."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out, quiet=True)
        self._out = out

    @contextlib.contextmanager
    def stage(self, title: str, steps: int = 1) -> Iterator[Advance]:
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            self._say(title, min(done / steps, 1.0))

        self._say(title, 0.0)
        yield advance

    def _say(self, title: str, part: float) -> None:
        print(json.dumps({"stage": title, "part": part}), file=self._out, flush=True)
