"""The device half on ExecuTorch."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.errors import MoaError

# Added to the score of what a query may not see: far below any score, and a number in half precision too.
_HIDDEN = np.float32(-1e4)

_pool_is_sized = False


class ExecutorchBackend(Backend):
    """Runs a program that ``moa-export --target executorch`` lowered to XNNPACK.

    Of its two methods, ``extend`` turns tokens into cache entries, and ``draft`` predicts what follows some tokens,
    given a cache that holds them too. Both take any number of tokens up to a bound; more are fed in parts.

    Args:
        graph: the ``.pte`` file.
        threads: see :func:`load_program`.
        trace: see :func:`load_program`.

    Attributes:
        program: the ``executorch.runtime.Program``.

    Raises:
        MoaError: ExecuTorch is not installed, the file is no program of the device half, or ``threads`` is less than 1.
    """

    def __init__(self, graph: Path, *, threads: int = 2, trace: bool = False) -> None:
        self.program = load_program(graph, threads=threads, trace=trace)
        with _sentence_for(graph):
            self._extend, self._draft = (self.program.load_method(name) for name in ("extend", "draft"))
            extend, draft = self._extend.metadata, self._draft.metadata
            # Sizes that vary have their upper bound here.
            (self._most_tokens,) = extend.input_tensor_meta(0).sizes()
            self._most_queries, self._most_positions = draft.input_tensor_meta(2).sizes()
            _, self._kv_heads, self._head_dim = draft.input_tensor_meta(3).sizes()
            _, self._top_k = draft.output_tensor_meta(0).sizes()

    @property
    def top_k(self) -> int:
        return int(self._top_k)

    @property
    def kv_shape(self) -> tuple[int, int]:
        return int(self._kv_heads), int(self._head_dim)

    @property
    def max_positions(self) -> int:
        return int(self._most_positions)

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            MoaError: more positions or memory rows than the program was made for.
        """
        tokens, positions, queries = inputs.tokens, inputs.positions, inputs.queries
        longest = max(len(inputs.self_keys) + len(tokens), len(inputs.memory_keys))
        if longest > self._most_positions:
            raise MoaError(f"{longest} positions are too many: the exported program holds {self._most_positions}")
        keys, values = (np.empty((len(tokens), *self.kv_shape), np.float32) for _ in range(2))
        for part in _parts(len(tokens), self._most_tokens):
            keys[part], values[part] = _execute(self._extend, tokens[part], positions[part])
        cache = np.concatenate((inputs.self_keys, keys)), np.concatenate((inputs.self_values, values))
        memory = inputs.memory_keys, inputs.memory_values
        top_tokens = np.empty((len(queries), self.top_k), np.int64)
        top_logprobs = np.empty((len(queries), self.top_k), np.float32)
        for part in _parts(len(queries), self._most_queries):
            asked = queries[part]
            mask = np.where(inputs.self_mask[asked], np.float32(0), _HIDDEN)
            top_tokens[part], top_logprobs[part] = _execute(
                self._draft, tokens[asked], positions[asked], mask, *cache, *memory
            )
        return StepResult(top_tokens, top_logprobs, keys, values)


def load_program(source: Path | bytes, *, threads: int, trace: bool = False) -> Any:
    """Load any program.

    Args:
        source: a ``.pte`` file or what is in one.
        threads: processor threads. ExecuTorch has one pool for the whole process: who loads first sets its size.
        trace: whether it keeps times of its operators, for :class:`executorch.devtools.Inspector`.

    Returns:
        an ``executorch.runtime.Program``.

    Raises:
        MoaError: ExecuTorch is not installed, the file cannot be loaded, or ``threads`` is less than 1.
    """
    if threads < 1:
        raise MoaError(f"threads must be at least 1, not {threads}")
    runtime, library = _import_executorch()
    with _sentence_for(source if isinstance(source, Path) else "the program"):
        _size_pool_once(library, threads)
        return runtime.load_program(source, enable_etdump=trace)


def registered_delegates() -> list[str]:
    """Names of the delegates that the installed runtime has, such as ``"XnnpackBackend"``.

    Raises:
        MoaError: ExecuTorch is not installed.
    """
    runtime, _ = _import_executorch()
    return list(runtime.backend_registry.registered_backend_names)


def _size_pool_once(library: Any, threads: int) -> None:
    """Not again: the programs that are loaded use the pool that resizing would destroy."""
    global _pool_is_sized
    if not _pool_is_sized:
        library._unsafe_reset_threadpool(threads)  # the wheel offers no other way
        _pool_is_sized = True


def _import_executorch() -> tuple[Any, Any]:
    """ExecuTorch's runtime and its C++ bindings. Raises MoaError: it is not installed."""
    try:
        with _held_back_stderr():
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime

            return Runtime.get(), portable_lib
    except ImportError as error:
        raise MoaError(
            f'the executorch backend needs executorch and torch ({error}): pip install "moa-edge[executorch]"'
        ) from error


def _parts(length: int, most: int) -> list[slice]:
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]


def _execute(method: Any, *arrays: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    import torch

    # torch warns of arrays that it could not write to, though ExecuTorch only reads its inputs.
    inputs = [torch.from_numpy(np.require(array, requirements=("C", "W"))) for array in arrays]
    return tuple(output.numpy() for output in method.execute(inputs))


@contextlib.contextmanager
def _sentence_for(source: object) -> Iterator[None]:
    """Turn what goes wrong into a MoaError: ExecuTorch's own errors share no base class and name a number only."""
    with _held_back_stderr() as last_line:
        try:
            yield
        except Exception as error:
            reason = "; ".join(filter(None, (str(error), last_line())))
            raise MoaError(f"executorch cannot load {source} as a device half: {reason}") from error


@contextlib.contextmanager
def _held_back_stderr() -> Iterator[Callable[[], str]]:
    """Keep what is written to stderr, also by C++, off the terminal; what was wrong with a file is only said there.

    Yields:
        a function that returns the last line written so far, empty if there is none.
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
