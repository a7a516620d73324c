"""onnxruntime-web in Node, as a backend: the engine of a browser without the browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from moa_export.errors import ExportError
from moa_export.targets.base import NotRun
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.bundle import TensorSpec
from moa_runtime.paths import cache_dir, expanded


def _session(**more: str) -> dict[str, Any]:
    return {"graphOptimizationLevel": "all", "extra": {"session": {"disable_quant_qdq": "1", **more}}}


#: Options of onnxruntime-web for a graph of :mod:`moa_export.targets.web`. Without them it is slow.
SESSION = _session()
#: The same for a writer, whose floats are not laid out for products once more: less memory, steps twice as long.
WRITER_SESSION = _session(disable_prepacking="1")


#: The version that npm installs, with which graphs are compared by default.
VERSION = "1.30.0"
#: Names a folder in which npm has installed onnxruntime-web, of any version.
FOLDER_VARIABLE = "MOA_ONNXRUNTIME_WEB"
_MODULE = Path("node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs")
_PROGRAM = Path(__file__).with_name("web_steps.mjs")
_TYPES = {"int64": np.int64, "float32": np.float32, "bool": np.bool_}
_NPM_SECONDS, _END_SECONDS = 600, 10


@dataclass(frozen=True)
class WebEngine:
    """A Node, and a module of onnxruntime-web."""

    node: str
    module: Path


def find_engine(*, npm: bool) -> WebEngine | NotRun:
    """onnxruntime-web on this machine, in the folder that :data:`FOLDER_VARIABLE` names or in the cache.

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
        raise ExportError("--npm needs npm, which is not installed")
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command += ["--prefix", scratch, f"onnxruntime-web@{VERSION}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_NPM_SECONDS)
            if done.returncode or not (Path(scratch) / _MODULE).is_file():
                said = next((line for line in done.stderr.splitlines() if line.startswith("npm error")), "npm failed")
                raise ExportError(f"npm cannot install onnxruntime-web {VERSION}: {said.removeprefix('npm error ')}")
            # In one piece: another export may look for it meanwhile.
            shutil.copytree(scratch, folder, dirs_exist_ok=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportError(f"npm cannot install onnxruntime-web {VERSION}: {error}") from error


class WebBackend(Backend):
    """Runs a graph of the target ``web`` with onnxruntime-web in a process of Node, on one thread.

    A step's arrays go through pipes, about a millisecond for some hundred memory rows.

    Args:
        specs: inputs and outputs of the graph.

    Attributes:
        version: of onnxruntime-web.

    Raises:
        ExportError: onnxruntime-web cannot load the graph.
    """

    def __init__(
        self, engine: WebEngine, graph: Path, specs: Iterable[TensorSpec], session: Mapping[str, Any] = SESSION
    ) -> None:
        shapes = {spec.name: spec.shape for spec in specs}
        self._looks_at_rows, self._top_k = "memory_keys" in shapes, int(shapes["top_tokens"][1])
        _, heads, size = shapes["self_keys"]
        self._kv_shape = (int(heads), int(size))
        command = [engine.node, str(_PROGRAM), str(engine.module), str(graph), json.dumps(session)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        #: Ends the process, which ends with this object too.
        self.close = weakref.finalize(self, _end, self._process)
        self.version = str(self._receive()[0]["version"])

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @property
    def needs_a_row(self) -> bool:
        return self._looks_at_rows

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            ExportError: onnxruntime-web fails.
        """
        given = inputs.by_name() if self._looks_at_rows else inputs.of_tokens()
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
        _, made = self._receive()
        return StepResult(*(made[each.name] for each in fields(StepResult)))

    def _receive(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        told = json.loads(self._read(int.from_bytes(self._read(4), "little")))
        if "error" in told:
            raise ExportError(f"onnxruntime-web cannot run the graph: {' '.join(str(told['error']).split())}")
        made = {}
        for each in told.get("tensors", ()):
            data = np.frombuffer(self._read(each["bytes"]), _TYPES[each["type"]])
            made[each["name"]] = data.reshape(each["dims"])
        return told, made

    def _read(self, count: int) -> bytes:
        data = self._from.read(count)
        if len(data) < count:
            raise ExportError("onnxruntime-web ended without a word; there may be too little memory")
        return data


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:  # what was not written yet
                continue
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
