"""``moa-bench web`` on the command line."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moa_bench.options import add_bundle_option, add_command, bundle_of, check_at_least, contexts_of
from moa_bench.output import INTERRUPTED, add_output_options, check_output_options, finish
from moa_bench.result import result_of
from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra

_DESCRIPTION = """\
Measure what a drafting step costs in a browser: a headless Chromium loads the bundle's graph for
onnxruntime-web (moa-export --target web) into a worker, on WebAssembly with one thread. Beside each step, in
turns with it, onnxruntime in Python takes the same step of the same graph, with one thread too.

A context of N means N cached tokens and N memory rows, all random; every new token is a query.
"""
_CONTEXTS = (16, 128, 512)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "web", "what a drafting step costs in a browser", _DESCRIPTION, run)
    add_bundle_option(parser)
    parser.add_argument("--browser", metavar="COMMAND", help="a Chromium (default: the one that is installed)")
    parser.add_argument(
        "--contexts", metavar="N,N,...", help=f"contexts of the steps (default {','.join(map(str, _CONTEXTS))})"
    )
    parser.add_argument(
        "--repeats", type=int, default=30, metavar="N", help="timed calls of each step (default %(default)s)"
    )
    parser.add_argument("--writer", action="store_true", help="time the offline writer too")
    parser.add_argument("--npm", action="store_true", help="let npm install onnxruntime-web where it is missing")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; with what there is, marked as partial, when interrupted or when the browser fails.

    Raises:
        MoaError: bad input, no browser, no onnxruntime-web, or no graph for it in the bundle.
    """
    check_at_least(args, repeats=1)
    check_output_options(args)
    require_extra("bench", "moa-bench web")
    from moa_bench.web import present
    from moa_bench.web.browser import BrowserPage
    from moa_bench.web.measure import Results, WebSettings, graphs_of, measure
    from moa_drafter.progress import Progress
    from moa_export.targets.base import NotRun
    from moa_export.targets.web_engine import find_engine

    bundle = bundle_of(args)
    settings = WebSettings(repeats=args.repeats, writer=args.writer)
    most = bundle.manifest.max_context - max(settings.tokens)
    asked = contexts_of(args.contexts)
    contexts = asked or tuple(context for context in _CONTEXTS if context <= most)
    if not all(1 <= context <= most for context in contexts):
        raise MoaError(f"--contexts must be 1 to {most}, as the target holds, not {args.contexts}")
    settings = replace(settings, contexts=contexts)
    graphs = graphs_of(bundle, writer=args.writer)
    engine = find_engine(npm=args.npm)
    if isinstance(engine, NotRun):
        raise MoaError(f"there is no onnxruntime-web: {engine.reason}")
    folders = {"/": Path(__file__).with_name("page"), "/ort/": engine.module.parent, "/bundle/": bundle.folder}
    results, problem = Results(), ""
    steps = len(graphs) * len(settings.contexts) * len(settings.tokens)
    with BrowserPage(args.browser, "/index.html", folders) as page:
        try:
            with Progress(total=steps, desc="web", unit="step") as bar:
                measure(bundle, graphs, page, settings, results, bar.update)
        except KeyboardInterrupt:
            problem = INTERRUPTED
        except MoaError as error:
            problem = str(error)
    figures: dict[str, Any] = {"graphs": results.graphs, "browser": results.browser}
    result = result_of(
        "web",
        figures,
        settings={"target": bundle.manifest.target, **asdict(settings)},
        fingerprints=bundle.manifest.fingerprints,
        seconds=results.seconds,
        problem=problem,
    )
    return finish(result, args, present)
