"""Steps of a bundle's graphs in a browser and in Python, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moa_bench.device.steps import RandomInputs, interleaved
from moa_bench.result import rounded
from moa_bench.web.browser import BrowserPage
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle, TargetEntry

_WARM_UP = 3


@dataclass(frozen=True)
class WebSettings:
    """What is timed.

    Args:
        contexts: cached tokens, and memory rows, of the steps.
        tokens: new tokens of the steps, all of them queries.
        repeats: timed calls of each step.
        writer: whether the offline writer is timed too.
    """

    contexts: tuple[int, ...] = (16, 128, 512)
    tokens: tuple[int, ...] = (1, 8)
    repeats: int = 30
    writer: bool = False


@dataclass
class Results:
    """What was measured so far, by graph; ready for JSON.

    Attributes:
        browser: what the browser says it is, and the version of onnxruntime-web.
        seconds: wall time.
    """

    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)
    browser: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def graphs_of(bundle: Bundle, *, writer: bool) -> dict[str, TargetEntry]:
    """The graphs for onnxruntime-web by what they are; BundleError without one."""
    bundle.graph_path("web")
    graphs = {"drafter": bundle.manifest.targets["web"]}
    if writer and bundle.manifest.web_writer is not None:
        graphs["writer"] = bundle.manifest.web_writer
    return graphs


def measure(
    bundle: Bundle,
    graphs: dict[str, TargetEntry],
    page: BrowserPage,
    settings: WebSettings,
    results: Results,
    on_progress: Callable[[], object] = lambda: None,
) -> None:
    """Time each graph into ``results``, also when interrupted. Python has one thread, as the page has.

    Raises:
        MoaError: the browser, or onnxruntime, cannot run a graph.
    """
    began = time.monotonic()
    try:
        for name, entry in graphs.items():
            figures = results.graphs[name] = {"bytes": entry.bytes, "steps": []}
            said = page.ask(
                {"load": {"graph": f"/bundle/{entry.file}", "session": dict(entry.details.get("session", {}))}}
            )
            results.browser = {"agent": said["agent"], "onnxruntime-web": said["version"]}
            loaded = time.perf_counter()
            backend = OnnxBackend(bundle.folder / entry.file, threads=1)
            figures |= {
                "load_ms": rounded(said["load_ms"], 1),
                "python_load_ms": rounded(1000 * (time.perf_counter() - loaded), 1),
            }
            for context in settings.contexts:
                for tokens in settings.tokens:
                    figures["steps"].append(_step(bundle, backend, page, context, tokens, settings.repeats))
                    on_progress()
    finally:
        results.seconds = time.monotonic() - began


def _step(
    bundle: Bundle, backend: OnnxBackend, page: BrowserPage, context: int, tokens: int, repeats: int
) -> dict[str, Any]:
    inputs = RandomInputs(bundle.manifest, context, backend.kv_shape).of(context, tokens)
    sizes = {"tokens": tokens, "cached": context, "rows": context}
    page.ask({"prepare": {**sizes, "kv": backend.kv_shape, "vocab": bundle.manifest.vocab_size}})
    times: list[tuple[float, float]] = []
    for _ in range(_WARM_UP + repeats):
        ((here,),) = interleaved([lambda: backend.step(inputs)], 1)
        times.append((page.ask({"step": True})["ms"], here))
    (least, python_least), (ms, python_ms), (late, _) = np.percentile(times[_WARM_UP:], (0, 50, 95), axis=0)
    return {
        "context": context,
        "tokens": tokens,
        "ms": rounded(float(ms)),
        "least_ms": rounded(float(least)),
        "p95_ms": rounded(float(late)),
        "python_ms": rounded(float(python_ms)),
        "python_least_ms": rounded(float(python_least)),
        "ratio": rounded(float(ms / python_ms)),
    }
