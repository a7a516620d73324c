"""The device half on ExecuTorch."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.backends.base import Float32, Int64, StepResult
from moa_runtime.errors import MoaError

# Added to a score that a query may not see. Far below any score, and within the range of half precision.
_HIDDEN = np.float32(-1e4)


class ExecutorchBackend:
    """Runs a program written by ``moa-export --target executorch`` for XNNPACK.

    The program has two methods. ``extend`` turns tokens into cache entries; ``draft`` predicts what follows some
    tokens, given a cache that holds them too. Both have sizes that vary up to a bound; longer inputs are fed in parts.

    Args:
        graph: the ``.pte`` file.
        threads: processor threads for one step. ExecuTorch keeps one pool for the whole process: the backend
            loaded last sets it.

    Raises:
        MoaError: ExecuTorch is not installed, the file is no program of the device half, or ``threads`` is less than 1.
    """

    def __init__(self, graph: Path, *, threads: int = 2) -> None:
        if threads < 1:
            raise MoaError(f"threads must be at least 1, not {threads}")
        with _collected_chatter() as chatter:
            try:
                self._load(graph, threads)
            except ImportError as error:
                raise MoaError(
                    f'the executorch backend needs executorch ({error}): pip install "moa-edge[executorch]"'
                ) from error
            except Exception as error:  # ExecuTorch raises bare RuntimeErrors; what happened it writes to stderr
                said = chatter()
                raise MoaError(
                    f"executorch cannot load {graph} as a device half: {error}" + (f" ({said})" if said else "")
                ) from error

    def _load(self, graph: Path, threads: int) -> None:
        # Brings torch, and the kernels of the quantised embedding.
        import executorch.kernels.quantized
        from executorch.extension.pybindings import portable_lib
        from executorch.runtime import Runtime

        # The only way to size the pool that the Python wheel offers.
        portable_lib._unsafe_reset_threadpool(threads)
        program = Runtime.get().load_program(graph)
        self._extend, self._draft = (program.load_method(name) for name in ("extend", "draft"))
        extend, draft = (program.metadata(name) for name in ("extend", "draft"))
        # Sizes in the signature are upper bounds.
        (self._most_tokens,) = extend.input_tensor_meta(0).sizes()
        self._most_queries, self._most_positions = draft.input_tensor_meta(2).sizes()
        _, *self._kv_shape = draft.input_tensor_meta(3).sizes()
        _, self._top_k = draft.output_tensor_meta(0).sizes()

    @property
    def top_k(self) -> int:
        return int(self._top_k)

    @property
    def kv_shape(self) -> tuple[int, int]:
        kv_heads, head_dim = self._kv_shape
        return int(kv_heads), int(head_dim)

    def step(
        self,
        tokens: Int64,
        positions: Int64,
        queries: Int64,
        self_keys: Float32,
        self_values: Float32,
        self_mask: NDArray[np.bool_],
        memory_keys: Float32,
        memory_values: Float32,
    ) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            MoaError: more cached tokens or memory rows than the program was made for.
        """
        longest = max(len(self_keys) + len(tokens), len(memory_keys))
        if longest > self._most_positions:
            raise MoaError(
                f"a context of {longest} positions is too long: the exported program holds {self._most_positions}"
            )
        keys, values = self._cache_entries(tokens, positions)
        cache = np.concatenate((self_keys, keys)), np.concatenate((self_values, values))
        memory = memory_keys, memory_values
        top_tokens = np.empty((len(queries), self.top_k), np.int64)
        top_logprobs = np.empty((len(queries), self.top_k), np.float32)
        for part in _parts(len(queries), self._most_queries):
            asked = queries[part]
            mask = np.where(self_mask[asked], np.float32(0), _HIDDEN)
            top_tokens[part], top_logprobs[part] = _execute(
                self._draft, tokens[asked], positions[asked], mask, *cache, *memory
            )
        return StepResult(top_tokens, top_logprobs, keys, values)

    def _cache_entries(self, tokens: Int64, positions: Int64) -> tuple[Float32, Float32]:
        """Self-attention keys and values of ``tokens``, ``[T, kv_heads, head_dim]`` each."""
        keys, values = (np.empty((len(tokens), *self.kv_shape), np.float32) for _ in range(2))
        for part in _parts(len(tokens), self._most_tokens):
            keys[part], values[part] = _execute(self._extend, tokens[part], positions[part])
        return keys, values


def _parts(length: int, most: int) -> list[slice]:
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]


def _execute(method: Any, *arrays: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    import torch

    # torch warns about arrays that it could not write to; ExecuTorch only reads its inputs.
    tensors = [torch.from_numpy(np.require(array, requirements=("C", "W"))) for array in arrays]
    return tuple(output.numpy() for output in method.execute(tensors))


@contextlib.contextmanager
def _collected_chatter() -> Iterator[Any]:
    """Keep what C++ code writes to stderr while loading off the terminal.

    Yields:
        a function that returns the last line written so far, empty if there is none.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def last_line() -> str:
            file.seek(0)
            return file.read().strip().rpartition("\n")[2]

        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield last_line
        finally:
            os.dup2(kept, 2)
            os.close(kept)
