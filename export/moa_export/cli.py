"""``moa-export``: turn a drafter and its target into a bundle for devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_export.errors import ExportError, ParityError
from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra
from moa_runtime.paths import default_bundle

if TYPE_CHECKING:
    from moa_export.pipeline import Report

_LATER = ("coreml", "executorch")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input, 1 for an export that failed its check."""
    args = _parser().parse_args(argv)
    try:
        report = _export(args)
    except MoaError as error:
        print(f"moa-export: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, ParityError) else 2
    except KeyboardInterrupt:
        print("moa-export: interrupted, nothing was written", file=sys.stderr)
        return 130
    for note in report.notes:
        print(f"moa-export: note: {note}", file=sys.stderr)
    print(json.dumps(_as_json(report)) if args.json else _as_table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moa-export", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--target", required=True, choices=("onnx", *_LATER), help="what to export for")
    parser.add_argument(
        "--out", type=Path, default=default_bundle(), metavar="DIR", help="the bundle's folder (default: %(default)s)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="target model: built-in name, Hub id or folder (default smollm2-135m-instruct)"
    )
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="moa-train checkpoint (default: the shipped one)")
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _export(args: argparse.Namespace) -> Report:
    from moa_export.bundle_writer import check_output

    if args.target in _LATER:
        raise ExportError(f"--target {args.target} comes in a later version; --target onnx is available")
    check_output(args.out, force=args.force)
    require_extra("export", "moa-export")

    # Seconds of imports, and not there on a device: only now.
    from moa_drafter.checkpoint import shipped_checkpoint
    from moa_drafter.target import DEFAULT_TARGET
    from moa_export.pipeline import export_bundle
    from moa_export.recipe import Recipe

    def say(stage: str) -> None:
        if not args.quiet and sys.stderr.isatty():
            print(f"moa-export: {stage} ...", file=sys.stderr, flush=True)

    return export_bundle(
        args.out,
        model=args.model or DEFAULT_TARGET,
        drafter_folder=args.drafter or shipped_checkpoint(),
        recipe=Recipe(),
        force=args.force,
        say=say,
    )


def _as_json(report: Report) -> dict[str, Any]:
    onnx = {"bytes": report.bytes, "seconds": round(report.seconds, 1), "parity": report.parity.to_dict()}
    return {"bundle": str(report.bundle), "targets": {"onnx": onnx}}


def _as_table(report: Report) -> str:
    parity = report.parity
    rows = {
        "bundle": str(report.bundle),
        "size": f"{report.bytes / 1e6:.1f} MB",
        "time": f"{report.seconds:.1f} s",
        "parity over": f"{parity.queries} queries",
        "log-prob error": f"mean {parity.mean_logprob_error:.4f}, max {parity.max_logprob_error:.4f} nats",
        "top-1 agreement": f"{parity.top1_agreement:.1%}",
        "top-k overlap": f"{parity.top_k_overlap:.1%}",
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


if __name__ == "__main__":
    sys.exit(main())
