"""The benchmarks there are: each is a package with a ``command`` and a ``present`` module."""

from __future__ import annotations

import importlib
from typing import Any

BENCHMARKS = ("accept", "device", "network", "offline", "server")


def command_of(benchmark: str) -> Any:
    """Its ``command`` module: ``add_parser(commands)`` sets ``run``, arguments to exit status."""
    return importlib.import_module(f"moa_bench.{benchmark}.command")


def presentation_of(benchmark: str) -> Any:
    """Its ``present`` module, see :class:`moa_bench.output.Presentation`."""
    return importlib.import_module(f"moa_bench.{benchmark}.present")


def purpose_of(benchmark: str) -> str:
    """What it measures, one sentence: its package's docstring."""
    return importlib.import_module(f"moa_bench.{benchmark}").__doc__ or ""
