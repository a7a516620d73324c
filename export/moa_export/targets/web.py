"""Export target ``web``: the device half as one ONNX file for onnxruntime-web, on a processor or a GPU; and
onnxruntime-web in Node, which graphs are compared in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_export.errors import ExportError
from moa_export.gptq import needs_calibration
from moa_export.graph_files import SESSION, refuse_too_large, write_web_half, write_web_writer
from moa_export.module_parts import parts_of
from moa_export.recipe import Recipe
from moa_export.targets.base import NotRun, StandIn, TargetOptions, check_drafter
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.manifest import TargetEntry, TensorSpec
from moa_runtime.paths import cache_dir, expanded

#: The version that npm installs, with which graphs are compared by default.
VERSION = "1.30.0"
#: Names a folder in which npm has installed onnxruntime-web, of any version.
FOLDER_VARIABLE = "MOA_ONNXRUNTIME_WEB"
_MODULE = Path("node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs")
_PROGRAM = Path(__file__).with_name("web_steps.mjs")
_NPM_SECONDS, _END_SECONDS = 600, 10


@dataclass(frozen=True)
class WebEngine:
    """A Node, and a module of onnxruntime-web."""

    node: str
    module: Path


def find_engine(*, npm: bool) -> WebEngine | NotRun:
    """Find onnxruntime-web in the folder that :data:`FOLDER_VARIABLE` names, or in the cache.

    Args:
        npm: whether npm may install it there; 150 MB.

    Raises:
        ExportError: npm is missing, or it fails.
    """
    node = shutil.which("node")
    if node is None:
        return NotRun("node is not installed")
    folder = expanded(os.environ.get(FOLDER_VARIABLE) or cache_dir() / f"onnxruntime-web-{VERSION}")
    if not (folder / _MODULE).is_file():
        if not npm:
            return NotRun("onnxruntime-web is not installed; --npm lets npm put it into the cache")
        _install(folder)
    return WebEngine(node, folder / _MODULE)


def _install(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ExportError("--npm needs npm, which is not installed", code="npm_missing")
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command += ["--prefix", scratch, f"onnxruntime-web@{VERSION}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_NPM_SECONDS)
            if done.returncode or not (Path(scratch) / _MODULE).is_file():
                said = next((line for line in done.stderr.splitlines() if line.startswith("npm error")), "npm failed")
                raise OSError(said.removeprefix("npm error "))
            # In one piece: another export may look for it meanwhile.
            shutil.copytree(scratch, folder, dirs_exist_ok=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportError(f"npm cannot install onnxruntime-web {VERSION}: {error}", code="npm_failed") from error


class WebBackend(Backend):
    """Runs a graph of the target ``web`` with onnxruntime-web in a process of Node, on one thread.

    A step's arrays go through pipes, about a millisecond for some hundred memory rows.

    Args:
        specs: inputs and outputs of the graph.

    Raises:
        ExportError: onnxruntime-web cannot load the graph.
    """

    def __init__(
        self, engine: WebEngine, graph: Path, specs: Iterable[TensorSpec], session: Mapping[str, Any] = SESSION
    ) -> None:
        shapes = {spec.name: spec.shape for spec in specs}
        self.needs_a_row, self.top_k = "memory_keys" in shapes, int(shapes["top_tokens"][1])
        _, heads, size = shapes["self_keys"]
        self.kv_shape = (int(heads), int(size))
        command = [engine.node, str(_PROGRAM), str(engine.module), str(graph), json.dumps(session)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        #: Ends the process, which ends with this object too.
        self.close = weakref.finalize(self, _end, process)
        self._receive()

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            ExportError: onnxruntime-web fails.
        """
        given = inputs.by_name() if self.needs_a_row else inputs.of_tokens()
        arrays = {name: np.ascontiguousarray(array) for name, array in given.items()}
        tensors = [
            {"name": name, "type": str(array.dtype), "dims": array.shape, "bytes": array.nbytes}
            for name, array in arrays.items()
        ]
        text = json.dumps({"tensors": tensors}).encode()
        try:
            self._to.write(len(text).to_bytes(4, "little") + text)
            for array in arrays.values():
                self._to.write(array.tobytes())
            self._to.flush()
        except OSError:  # it ended: what it said last, or that it said nothing
            self._receive()
            raise
        made = self._receive()
        return StepResult(*(made[each.name] for each in fields(StepResult)))

    def _receive(self) -> dict[str, NDArray[Any]]:
        """Read a message; return the arrays that it holds, by name."""
        told = json.loads(self._read(int.from_bytes(self._read(4), "little")))
        if "error" in told:
            reason = f"onnxruntime-web cannot run the graph: {' '.join(str(told['error']).split())}"
            raise ExportError(reason, code="engine_failed")
        return {
            each["name"]: np.frombuffer(self._read(each["bytes"]), each["type"]).reshape(each["dims"])
            for each in told["tensors"]
        }

    def _read(self, count: int) -> bytes:
        data = self._from.read(count)
        if len(data) < count:
            reason = "onnxruntime-web ended without a word; there may be too little memory"
            raise ExportError(reason, code="engine_failed")
        return data


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # what was not written yet
                stream.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class WebTarget:
    """See :class:`moa_export.targets.base.ExportTarget` and :class:`moa_export.targets.base.WriterTarget`.

    Stores integers and multiplies floats, whatever activations the recipe names: see :mod:`moa_export.graph_files`.
    """

    writer_answers = None

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe, self._options = recipe, options
        self.rotates = needs_calibration(recipe)

    def check(self, config: DrafterConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        check_drafter("web", config, layers=True)
        if 16 in (self._recipe.linear.bits, self._recipe.head.bits, self._recipe.embedding.bits):
            reason = "web stores no float16, which not every browser's GPU knows: choose 4, 8 or 32 bits"
            raise ExportError(reason, code="unsupported_bits")
        self._recipe.check_symmetric("web", "linear", "head", "embedding")
        self._recipe.check_divides(config)
        refuse_too_large(config, self._recipe)

    def export(self, drafter: MoADrafter, folder: Path) -> dict[str, TargetEntry]:
        """Write a single ONNX file."""
        return {"web": write_web_half(parts_of(drafter), self._recipe, folder)}

    def runner(self, folder: Path, entry: TargetEntry) -> Backend | StandIn:
        """Run onnxruntime-web in Node; without it, onnxruntime in Python on the same graph."""
        return web_runner(folder, entry, npm=self._options.npm)

    def export_writer(self, weights: RoundedWeights, folder: Path) -> TargetEntry:
        """See :meth:`moa_export.targets.base.WriterTarget.export_writer`."""
        return write_web_writer(weights, folder)

    writer_runner = runner


def web_runner(folder: Path, entry: TargetEntry, *, npm: bool) -> Backend | StandIn:
    """Run a graph with onnxruntime-web in Node, or onnxruntime in Python in its place.

    Args:
        npm: whether npm may install onnxruntime-web.

    Raises:
        ExportError: npm fails, or onnxruntime-web cannot load the graph.
    """
    graph, engine = folder / entry.file, find_engine(npm=npm)
    if isinstance(engine, NotRun):
        return StandIn(OnnxBackend(graph), engine.reason)
    return WebBackend(engine, graph, (*entry.inputs, *entry.outputs), entry.details.get("session", SESSION))
