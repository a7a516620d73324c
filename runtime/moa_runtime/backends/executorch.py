"""The device half on ExecuTorch."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.backends.base import Backend, StepInputs, StepResult, check_threads
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import install_command

#: Added to scores of masked positions: far below any score, and a number in half precision too.
HIDDEN = np.float32(-1e4)

#: Bytes 4 to 8 of a program.
_IDENTIFIER = re.compile(rb"ET\d\d")

_pool_is_sized = False


class ExecutorchBackend(Backend):
    """Run a program that ``moa-export --target executorch`` lowered to XNNPACK.

    Of its two methods, ``extend`` turns tokens into cache entries, and ``draft`` predicts what follows some tokens,
    given a cache that holds them too. Both take any number of tokens up to a bound; more are fed in parts.

    Args:
        graph: the ``.pte`` file.
        threads, trace: see :func:`load_program`, also for what is raised.

    Attributes:
        program: the ``executorch.runtime.Program``.
    """

    max_positions: int
    writer = "executorch_writer"

    def __init__(self, graph: Path, *, threads: int = 2, trace: bool = False) -> None:
        self.program = load_program(graph, threads=threads, trace=trace)
        with _sentence_for(graph):
            self._extend, self._draft = (self.program.load_method(name) for name in ("extend", "draft"))
            extend, draft = self._extend.metadata, self._draft.metadata
            # Sizes that vary have their upper bound here.
            (self._most_tokens,) = extend.input_tensor_meta(0).sizes()
            self._most_queries, self.max_positions = map(int, draft.input_tensor_meta(2).sizes())
            _, heads, size = draft.input_tensor_meta(3).sizes()
            self.kv_shape, self.top_k = (int(heads), int(size)), int(draft.output_tensor_meta(0).sizes()[1])

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`. Raises MoaError if they exceed ``max_positions``."""
        tokens, positions, queries = inputs.tokens, inputs.positions, inputs.queries
        longest = max(len(inputs.self_keys) + len(tokens), len(inputs.memory_keys))
        check_room(longest, self.max_positions)
        keys, values = (np.empty((len(tokens), *self.kv_shape), np.float32) for _ in range(2))
        for part in (slice(at, at + self._most_tokens) for at in range(0, len(tokens), self._most_tokens)):
            keys[part], values[part] = execute(self._extend, tokens[part], positions[part])
        cache = np.concatenate((inputs.self_keys, keys)), np.concatenate((inputs.self_values, values))
        memory = inputs.memory_keys, inputs.memory_values
        top_tokens = np.empty((len(queries), self.top_k), np.int64)
        top_logprobs = np.empty((len(queries), self.top_k), np.float32)
        for part in (slice(at, at + self._most_queries) for at in range(0, len(queries), self._most_queries)):
            asked = queries[part]
            mask = np.where(inputs.self_mask[asked], np.float32(0), HIDDEN)
            top_tokens[part], top_logprobs[part] = execute(
                self._draft, tokens[asked], positions[asked], mask, *cache, *memory
            )
        return StepResult(top_tokens, top_logprobs, keys, values)


def check_room(positions: int, most: int) -> None:
    """Raise MoaError for more positions than a program holds."""
    if positions > most:
        text = f"{positions} positions are too many: the exported program holds {most}"
        raise MoaError(text, code="context_full")


def load_program(source: Path | bytes, *, threads: int, trace: bool = False) -> Any:
    """Load any program, an ``executorch.runtime.Program``.

    Args:
        source: a ``.pte`` file or the content of one.
        threads: processor threads. ExecuTorch has one pool for the whole process: the first program sets its size.
        trace: whether it keeps times of its operators, for :class:`executorch.devtools.Inspector`.

    Raises:
        MoaError: ExecuTorch is not installed, the file cannot be loaded, or ``threads`` is less than 1.
    """
    global _pool_is_sized
    check_threads(threads)
    runtime, library = _import_executorch()
    with _sentence_for(source if isinstance(source, Path) else "the program"):
        content = source[:8] if isinstance(source, bytes) else _beginning(source)
        if not _IDENTIFIER.fullmatch(content[4:8]):  # ExecuTorch ends the process if it cannot print what stands there
            raise ValueError("it is no ExecuTorch program")
        if not _pool_is_sized:  # resizing destroys the pool of loaded programs
            library._unsafe_reset_threadpool(threads)  # the wheel offers no other way
            _pool_is_sized = True
        return runtime.load_program(source, enable_etdump=trace)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)


def registered_delegates() -> list[str]:
    """Return names of the installed runtime's delegates, such as ``"XnnpackBackend"``; raise MoaError without it."""
    runtime, _ = _import_executorch()
    return list(runtime.backend_registry.registered_backend_names)


def _import_executorch() -> tuple[Any, Any]:
    """Return ExecuTorch's runtime and its C++ bindings; raise MoaError if it is not installed."""
    try:
        with _held_back_stderr():
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime

            return Runtime.get(), portable_lib
    except ImportError as error:
        text = f"the executorch backend needs executorch and torch ({error}): {install_command('executorch')}"
        raise MoaError(text, code="missing_package") from error


def load_method(program: Any, name: str, source: Path) -> Any:
    """Load a method of a program that came from ``source``; raise MoaError if it has none of this name."""
    with _sentence_for(source):
        if name not in program.method_names:
            raise ValueError(f"it has no method {name}")
        return program.load_method(name)


def execute(method: Any, *arrays: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Run a method of a program. Raises MoaError if it does not take these inputs."""
    import torch

    # torch warns of read-only arrays, though ExecuTorch only reads its inputs.
    inputs = [torch.from_numpy(np.require(array, requirements=("C", "W"))) for array in arrays]
    try:
        return tuple(output.numpy() for output in method.execute(inputs))
    except Exception as error:  # of no common class
        text = f"executorch cannot run the bundle's program ({error}): export the bundle again"
        raise MoaError(text, code="cannot_run") from error


@contextlib.contextmanager
def _sentence_for(source: object) -> Iterator[None]:
    """Turn what goes wrong into a MoaError: ExecuTorch's own errors share no base class and name a number only."""
    with _held_back_stderr() as last_line:
        try:
            yield
        except Exception as error:
            reason = "; ".join(filter(None, (str(error), last_line())))
            text = f"executorch cannot load {source}: {reason}: export the bundle again"
            raise MoaError(text, code="cannot_load") from error


@contextlib.contextmanager
def _held_back_stderr() -> Iterator[Callable[[], str]]:
    """Keep stderr, also that of C++, off the terminal; yield a function that returns its last line, perhaps empty.

    ExecuTorch says only there what is wrong with a file.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as held, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def last_line() -> str:
            held.seek(0)
            return held.read().strip().rpartition("\n")[2]

        terminal = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield last_line
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
