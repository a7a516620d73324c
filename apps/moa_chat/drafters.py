"""Which drafters there are to choose from, and whether a bundle has the chosen one."""

from __future__ import annotations

import argparse
from pathlib import Path

from moa_drafter.pretrained import offered_names
from moa_runtime.bundle import Bundle
from moa_runtime.options import DEFAULT_DRAFTER, DRAFTERS, DrafterName, OtherDrafterError


def drafters_help() -> str:
    """Each drafter that can be chosen, with what it is and when it is right."""
    kinds = "; ".join(f"{name}: {DRAFTERS[name].help}" for name in offered_names())
    return f"{kinds} (default: the bundle's own; that of the default bundle is {DEFAULT_DRAFTER})"


def drafter_name_of(text: str) -> str:
    """A drafter's name of a command line.

    Raises:
        argparse.ArgumentTypeError: a folder; other words are left to argparse, which lists the choices.
    """
    if text not in offered_names() and Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is a folder, and a name was expected: {', '.join(offered_names())}; for a checkpoint of your own "
            f"name its bundle with --bundle (`moa-export --target onnx --drafter {text} --out DIR` makes one)"
        )
    return text


def check_drafter(bundle: Bundle, name: DrafterName | None) -> None:
    """Refuse a bundle whose drafter is not the one that was asked for.

    Raises:
        OtherDrafterError: the message names both.
    """
    if name is None or not DRAFTERS[name].has_graph:
        return
    found = bundle.manifest.architecture
    if found != name:
        raise OtherDrafterError(bundle.folder, found, name)
