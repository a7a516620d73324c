"""``moa-export``: turn a drafter and its target into a bundle for devices, or look at one."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_drafter.catalogue import default_drafter
from moa_drafter.config import FitError
from moa_drafter.pretrained import checkpoint_of
from moa_drafter.target_source import DEFAULT_TARGET, check_target, shown_name
from moa_export.bundle_commands import COMMANDS, DRAFTER_HELP, NPM_HELP, Row, format_rows
from moa_export.bundle_writer import check_output
from moa_export.datastore_command import datastore
from moa_export.errors import ExportError
from moa_export.plain_bundle import make_plain_bundle, note_of, plain_facts
from moa_export.recipe import DEFAULT_PRESET, PRESETS, Recipe, read_config, resolve
from moa_export.targets import TARGETS, extra_of
from moa_runtime.cli_main import OptionParser, add_version, run_program
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DEFAULT_DRAFTER, WITHOUT_GRAPH
from moa_runtime.paths import default_bundle

if TYPE_CHECKING:
    from moa_export.pipeline import ExportSettings, Made, Report

_EPILOG = """\
commands:
  moa-export inspect BUNDLE    what it holds, and how it was checked
  moa-export verify BUNDLE     check its files, and compare its graphs with PyTorch again
  moa-export diff A B          what differs between two bundles
  moa-export example BUNDLE    three steps in numbers, to check a port against
  moa-export datastore FILES   make a datastore of texts that answers may repeat, for moa-chat --datastore
"""
_COMMANDS = {**COMMANDS, "datastore": datastore}
_DEFAULT_TARGET, _NO_WRITER = "onnx", "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 for a check that failed (or bundles that differ), else as
    :func:`~moa_runtime.cli_main.run_program` says."""
    if argv is None:  # a program of its own: one that is told to end removes what it began
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program("moa-export", lambda: _run(words), stopped="interrupted, nothing was written")


def _run(words: list[str]) -> int:
    command = _COMMANDS.get(words[0]) if words else None
    if command is not None:
        return command(words[1:])
    parser = OptionParser(
        prog="moa-export",
        description="Turn a drafter and its target into a bundle for devices, and prove that nothing was lost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    _add_options(parser)
    return _export(parser.parse_args(words))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="NAME",
        help=f"what to export for: {', '.join(TARGETS)}, several with commas, or all (default {_DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--out", type=Path, default=default_bundle(), metavar="DIR", help="the bundle's folder (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="target model: built-in name, Hub id, folder or GGUF file (default smollm2-135m-instruct)",
    )
    usual = f"default: {DEFAULT_DRAFTER}, or the first that moa-serve --list-models has"
    plain = "sssd copies what was said before and none drafts nothing: both need no graph, and fit any target"
    parser.add_argument("--drafter", metavar="NAME|DIR", help=f"{DRAFTER_HELP}; {plain} ({usual})")
    parser.add_argument(
        "--offline-model",
        metavar="NAME",
        help="what writes while there is no verifier: target, a model's name or folder with the target's tokenizer, or "
        "none (default: the target if it has at most 500 million parameters)",
    )
    parser.add_argument(
        "--offline-bits",
        type=int,
        metavar="N",
        help="of its layers: 4 or 8 (default: a GGUF file's own, else 4, or 8 if 4 lose too much)",
    )
    recipe = parser.add_argument_group("recipe", "single options win over a preset, a preset over the file")
    recipe.add_argument("--preset", help=f"{', '.join(PRESETS)} (default {DEFAULT_PRESET}): 4, 8 or 32 bits")
    recipe.add_argument("--config", type=Path, metavar="YAML", help="a file with the same settings")
    recipe.add_argument("--bits", type=int, metavar="N", help="of all weights: 4, 8, 16 or 32")
    recipe.add_argument("--head-bits", type=int, metavar="N", help="of the draft head")
    recipe.add_argument("--embedding-bits", type=int, metavar="N", help="of the token embedding")
    recipe.add_argument(
        "--group-size", type=int, metavar="N", help="weights that share a scale; a multiple of 16, 0 for a whole row"
    )
    recipe.add_argument(
        "--backend",
        metavar="NAME",
        help="delegates of an ExecuTorch program, several with commas: xnnpack, coreml, vulkan (default xnnpack)",
    )
    recipe.add_argument(
        "--context", type=int, metavar="TOKENS", help="positions of caches that have a fixed size (default 2048)"
    )
    parser.add_argument(
        "--no-checks",
        dest="checked",
        action="store_false",
        help="do not compare the graphs with PyTorch, which takes more than half of the time; verify does it later",
    )
    parser.add_argument("--npm", action="store_true", help=NPM_HELP)
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, say what would be done, write nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _export(args: argparse.Namespace) -> int:
    """Export and print the report.

    Raises:
        MoaError: bad input, or a check that failed.
    """
    config = read_config(args.config) if args.config else {}
    drafter = _drafter_of(args, config)
    if drafter in WITHOUT_GRAPH and args.offline_model in (None, _NO_WRITER):
        return _export_texts(args, _model_of(args, config), drafter)
    options = {name: getattr(args, name) for name in ("bits", "group_size", "head_bits", "embedding_bits")}
    recipe = resolve(config, preset_name=args.preset, options=options)
    targets = _targets(str(args.target if args.target is not None else config.get("target") or _DEFAULT_TARGET))
    check_output(args.out, force=args.force)
    # Several targets may name the same extra; all are checked before any work.
    for extra in dict.fromkeys(map(extra_of, targets)):
        require_extra(extra, "moa-export")

    # Seconds of imports, and not there on a device: only now. They are loud, too.
    from moa_export.toolchain_log import quiet_toolchain, toolchain_log

    with quiet_toolchain(toolchain_log()) as terminal:
        from moa_export.pipeline import export_bundle, export_plain, plan
        from moa_export.progress import Progress

        settings = _settings(args, config, targets, recipe)
        progress = Progress(terminal, quiet=args.quiet)
        planned, report = None, None
        try:
            if args.dry_run:
                planned = plan(settings)
            elif drafter in WITHOUT_GRAPH:
                report = export_plain(args.out, settings, drafter, progress, force=args.force)
            else:
                report = export_bundle(args.out, settings, progress, force=args.force)
        except FitError as error:
            raise ExportError(f"{error}; or --drafter sssd, which needs none", code=error.code) from error
    if report is None:
        _print_plan(args, settings, planned)
        return 0
    for note in report.notes:
        print(f"moa-export: note: {note}", file=sys.stderr)
    if args.json:
        print(json.dumps(_as_json(report)))
        return 0
    graphs = {**report.made, **report.writers}
    print(*format_rows([Row(name, one.entry, one.proof.step_ms) for name, one in graphs.items()]), sep="\n")
    print(f"{report.bundle}: {report.bytes / 1e6:.1f} MB in {report.seconds:.0f} s")
    return 0


def _export_texts(args: argparse.Namespace, model: str, architecture: str) -> int:
    """Make a bundle without any graph; it takes no torch and a second."""
    began = time.monotonic()
    check_target(model)
    check_output(args.out, force=args.force)
    if args.dry_run:
        described = {"out": str(args.out), "target": model, "targets": []}
        text = f"would export {model} without a drafter to {args.out}"
        print(json.dumps({"dry_run": True, **described}) if args.json else text)
        return 0
    make_plain_bundle(args.out, plain_facts(model), shown_name(model), architecture, force=args.force)
    seconds, size = time.monotonic() - began, sum(file.stat().st_size for file in args.out.iterdir())
    print(f"moa-export: note: {note_of(model, architecture)}", file=sys.stderr)
    made = {"bundle": str(args.out), "bytes": size, "seconds": round(seconds, 1), "targets": {}, "notes": []}
    text = f"{args.out}: {size / 1e6:.1f} MB in {seconds:.0f} s"
    print(json.dumps({**made, "writer": None, "web_writer": None}) if args.json else text)
    return 0


def _targets(given: str) -> tuple[str, ...]:
    """Return the names of targets that ``given`` lists; raise an ExportError if one is unknown."""
    names = tuple(TARGETS) if given == "all" else tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in names:
        extra_of(name)
    return names


def _model_of(args: argparse.Namespace, config: Mapping[str, Any]) -> str:
    return str(args.model or config.get("model") or DEFAULT_TARGET)


def _drafter_of(args: argparse.Namespace, config: Mapping[str, Any]) -> str | None:
    """Return the drafter that a user names, else that of the catalogue; None for the shipped default."""
    named = args.drafter or config.get("drafter")
    return str(named) if named else default_drafter(_model_of(args, config))


def _settings(
    args: argparse.Namespace, config: Mapping[str, Any], targets: tuple[str, ...], recipe: Recipe
) -> ExportSettings:
    from moa_export.offline_model import WriterSettings
    from moa_export.pipeline import ExportSettings
    from moa_export.targets.base import TargetOptions

    usual = TargetOptions()
    context = args.context if args.context is not None else config.get("context", usual.context)
    if not isinstance(context, int) or context < 64:
        raise ExportError(f"--context must be a number of at least 64 tokens, not {context}", code="out_of_range")
    drafter = _drafter_of(args, config)
    delegates = str(args.backend or config.get("backend") or ",".join(usual.delegates)).split(",")
    return ExportSettings(
        targets,
        None if drafter in WITHOUT_GRAPH else checkpoint_of(drafter),
        model=_model_of(args, config),
        recipe=recipe,
        options=TargetOptions(context, tuple(delegates), args.npm),
        writer=WriterSettings(args.offline_model, args.offline_bits),
        checked=args.checked,
    )


def _as_json(report: Report) -> dict[str, Any]:
    def graph(one: Made) -> dict[str, Any]:
        return {"file": one.entry.file, "bytes": one.entry.bytes, "step_ms": one.proof.step_ms, **one.proof.checks}

    writers = {name.replace(" ", "_"): {**graph(one), **one.entry.details} for name, one in report.writers.items()}
    return {
        "bundle": str(report.bundle),
        "bytes": report.bytes,
        "seconds": round(report.seconds, 1),
        "targets": {name: {**graph(one), "seconds": round(one.seconds, 1)} for name, one in report.made.items()},
        "writer": None,
        "web_writer": None,
        **writers,
        "notes": list(report.notes),
    }


def _print_plan(args: argparse.Namespace, settings: ExportSettings, planned: dict[str, Any]) -> None:
    described = {"out": str(args.out), "recipe": settings.recipe.describe(), **planned}
    if args.json:
        print(json.dumps({"dry_run": True, **described}))
        return
    millions = planned["parameters"] / 1e6
    drafter = f"with a drafter of {millions:.1f} M parameters" if planned["drafter"] else "with a writer"
    print(f"would export {planned['target']} {drafter}")
    print(f"to {args.out}, for {', '.join(planned['targets'])}, by this recipe:")
    for name, value in settings.recipe.describe().items():
        shown = ", ".join(f"{key} {inner}" for key, inner in value.items()) if isinstance(value, dict) else value
        print(f"  {name:<16} {shown}")


if __name__ == "__main__":
    sys.exit(main())
