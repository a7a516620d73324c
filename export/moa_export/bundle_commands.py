"""``moa-export inspect``, ``verify``, ``diff`` and ``example``: looking at bundles that exist."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moa_drafter.pretrained import shipped_names
from moa_export.bundle_readme import EXAMPLE_FILE
from moa_export.errors import ExportError
from moa_export.golden_step import worked_example
from moa_runtime.backends.load import BACKENDS, load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.cli_main import OptionParser
from moa_runtime.manifest import LICENCES, Manifest, TargetEntry, read_manifest
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DEFAULT_DRAFTER
from moa_runtime.tokenizer import ChatTokenizer

NPM_HELP = (
    "let npm install onnxruntime-web into the cache (150 MB), by which graphs for browsers are compared in Node; "
    "MOA_ONNXRUNTIME_WEB names a folder that has it"
)
DRAFTER_HELP = (
    f"{', '.join(shipped_names())}, the folder of a moa-train checkpoint, or the folder or Hub id of a published "
    "EAGLE-3 head"
)
_HEADER = ("graph", "file", "MB", "parity", "top-1", "error (nats)", "tau before", "after", "perplexity", "ms a step")


def inspect(words: Sequence[str]) -> int:
    """Print what a bundle holds; its files are not read."""
    parser = _parser("inspect", "What a bundle holds.", "BUNDLE")
    parser.add_argument("--json", action="store_true", help="print the manifest")
    args = parser.parse_args(words)
    manifest = read_manifest(args.bundle)
    if args.json:
        print(manifest.to_json(), end="")
        return 0
    if graphs := _graphs(manifest):
        print(*format_rows([Row(*graph) for graph in graphs.items()]), sep="\n")
    prints, own = manifest.fingerprints, manifest.sampling
    parts = ("linear", "head", "embedding") if manifest.has_graph else ()
    drafted = manifest.vocab_size if manifest.architecture == "sssd" else manifest.draft_vocab_size
    facts = {
        "target": f"{manifest.target} ({prints.target})",
        "drafter": f"{manifest.architecture} ({prints.drafter})" if manifest.has_graph else manifest.architecture,
        "tokenizer": prints.tokenizer,
        "context": f"{manifest.max_context} tokens",
        "vocabulary": f"{drafted} of {manifest.vocab_size} tokens can be drafted",
        "recipe": ", ".join(f"{part} {manifest.recipe[part]['bits']} bits" for part in parts) or "no graph",
        "offline": _offline(manifest),
        "sampling": f"temperature {own.temperature:g}, top-p {own.top_p:g}" if own else "no recommendation",
        "licences": ", ".join(name for name in manifest.files if name.startswith(LICENCES)) or "none named",
        "made with": ", ".join(f"{name} {number}" for name, number in manifest.tools.items()),
    }
    for name, fact in facts.items():
        print(f"{name:<12} {fact}")
    return 0


def verify(words: Sequence[str]) -> int:
    """Check a bundle's files; then run its graphs beside PyTorch as the export did."""
    parser = _parser("verify", "Check a bundle's files, and compare its graphs with PyTorch again.", "BUNDLE")
    parser.add_argument("--files-only", action="store_true", help="check SHA-256 and manifest only; needs no torch")
    parser.add_argument("--model", metavar="NAME", help="target model it was exported for (default: the built-in one)")
    parser.add_argument("--drafter", metavar="NAME|DIR", help=f"{DRAFTER_HELP} (default: {DEFAULT_DRAFTER})")
    parser.add_argument("--offline-model", metavar="NAME", help="its offline model (default: the target)")
    parser.add_argument("--npm", action="store_true", help=NPM_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(words)
    bundle = Bundle.open(args.bundle)
    count = len(bundle.manifest.files)
    found: dict[str, Any] = {"bundle": str(args.bundle), "files": {"status": "passed", "count": count}}
    rows: list[Row] = []
    failures: list[str] = []
    if not args.files_only and bundle.manifest.has_graph:
        require_extra("export", "moa-export verify")
        from moa_export.toolchain_log import quiet_toolchain, toolchain_log

        with quiet_toolchain(toolchain_log()) as terminal:
            from moa_export.pipeline import prove_again
            from moa_export.progress import Progress

            proofs = prove_again(
                bundle,
                model=args.model,
                drafter=args.drafter,
                writer=args.offline_model,
                npm=args.npm,
                progress=Progress(terminal, quiet=args.quiet),
            )
        graphs = _graphs(bundle.manifest)
        for name, proof in proofs.items():
            rows.append(Row(name, dataclasses.replace(graphs[name], checks=proof.checks), proof.step_ms))
            failures += [f"{name}: {reason}" for reason in proof.failures]
        found["targets"] = {row.name: {"step_ms": row.step_ms, **row.entry.checks} for row in rows}
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join([f"{count} files are whole", *(format_rows(rows) if rows else [])]))
    for failure in failures:
        print(f"moa-export: failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def diff(words: Sequence[str]) -> int:
    """Print what differs between two bundles: exit status 0 for nothing, 1 for something."""
    parser = _parser("diff", "What differs between two bundles.", "A", "B")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    sides = [dict(_flat(json.loads(read_manifest(folder).to_json()))) for folder in (args.a, args.b)]
    keys = sorted(sides[0].keys() | sides[1].keys())
    differing = {key: [side.get(key) for side in sides] for key in keys if sides[0].get(key) != sides[1].get(key)}
    if args.json:
        print(json.dumps(differing))
    elif not differing:
        print("the bundles are the same")
    else:
        for key, (a, b) in differing.items():
            print(f"{key}: {'nothing' if a is None else a} -> {'nothing' if b is None else b}")
    return 1 if differing else 0


def example(words: Sequence[str]) -> int:
    """Print three steps with their inputs and outputs, and a question as tokens, to check a port against."""
    what = "Three drafting steps in numbers and a question as tokens, to check a port against (docs/bundle.md)."
    parser = _parser("example", what, "BUNDLE")
    parser.add_argument("--graph", metavar="NAME", help="of which graph (default: the first one)")
    parser.add_argument("--backend", metavar="NAME", help=f"compute them now: {', '.join(BACKENDS)}")
    args = parser.parse_args(words)
    bundle = Bundle.open(args.bundle)
    manifest = bundle.manifest
    stored = json.loads((bundle.folder / EXAMPLE_FILE).read_text()) if EXAMPLE_FILE in manifest.files else {}
    graph = args.graph or next(iter(stored), None)
    worked: dict[str, Any] = {}
    if args.backend is None and graph in stored:
        worked = {"graph": graph, **stored[graph]}
    elif args.graph is not None:
        known = ", ".join(stored) or "no graph"
        raise ExportError(f"the bundle has an example of {known}, not of {args.graph}", code="unknown_graph")
    elif manifest.has_graph:
        worked = worked_example(load_backend(bundle, args.backend))
    asked = [{"role": "user", "content": "Which three colours are primary?"}]
    chat = {"messages": asked, "tokens": ChatTokenizer.from_bundle(bundle).encode_chat(asked)}
    print(json.dumps({"fingerprints": dataclasses.asdict(manifest.fingerprints), "chat": chat, **worked}, indent=1))
    return 0


def _parser(command: str, what: str, *bundles: str) -> argparse.ArgumentParser:
    parser = OptionParser(prog=f"moa-export {command}", description=what)
    for bundle in bundles:
        parser.add_argument(bundle.lower(), type=Path, metavar=bundle)
    return parser


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings, ``("files/device_half.onnx/bytes", 5)``; lists count as leaves."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}/{key}" if path else str(key))
    else:
        yield path, value


def _graphs(manifest: Manifest) -> dict[str, TargetEntry]:
    """All of a bundle's, by the names of messages."""
    writers = {name.replace("_", " "): entry for name, entry in manifest.writers.items()}
    return {**manifest.targets, **writers}


def _offline(manifest: Manifest) -> str:
    if manifest.writer:
        return f"{manifest.writer.details['model']} writes"
    longest = manifest.stopping_rule.longest
    if not manifest.has_graph:
        return "nothing writes while the verifier is away"
    if not longest:
        return "nothing writes: the drafter alone is wrong more often than right"
    return f"the drafter writes while it is sure, up to {longest} tokens"


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    command.__name__: command for command in (inspect, verify, diff, example)
}


class Row(NamedTuple):
    """One graph of the summary; ``step_ms`` is None if it was not measured."""

    name: str
    entry: TargetEntry
    step_ms: float | None = None


def format_rows(rows: Sequence[Row]) -> list[str]:
    """Format the summary of a bundle: a line for each graph, and one for each reason why a check was not run."""
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(line)])
        for line in (zip(cell, widths, strict=True) for cell in cells)
    ]
    left_out = {
        f"{row.name}: not run: {check['reason']}": None
        for row in rows
        for check in row.entry.checks.values()
        if check["status"] == "not run"
    }
    return [*lines, *left_out]


def _cells(row: Row) -> tuple[str, ...]:
    checks = row.entry.checks
    parity, tau = checks.get("parity") or checks.get("perplexity", {}), checks.get("tau", {})

    def shown(figures: Mapping[str, Any], name: str, form: str) -> str:
        return form.format(figures[name]) if name in figures else "-"

    return (
        row.name,
        row.entry.file,
        f"{row.entry.bytes / 1e6:.1f}",
        str(parity.get("status", "-")),
        shown(parity, "top1_agreement", "{:.1%}"),
        shown(parity, "mean_logprob_error", "{:.4f}"),
        shown(tau, "before", "{:.3f}"),
        shown(tau, "after", "{:.3f}"),
        shown(parity, "ratio", "x {:.3f}"),
        "-" if row.step_ms is None else f"{row.step_ms:.2f}",
    )
