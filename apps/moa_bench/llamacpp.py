"""llama.cpp on a processor (package ``llama-cpp-python``), the peer of our verifier: a GGUF file, decoded alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp as lib
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.tokens import common_length

#: Tokens of one pass over a prompt, llama.cpp's own default.
_BATCH = 512
#: Tokens that its n-gram drafting proposes, as its documentation recommends for processors.
_LOOKED_UP = 2


@lib.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Take a line of llama.cpp's log, which would end up between the answers."""


class LlamaCpp:
    """A model and its context. Several sequences share the context; answers are written in the first one.

    Args:
        file: of the model.
        threads: processor threads.
        context: tokens that all sequences hold together.
        sequences: number of them.
        lookup: whether to draft from n-grams of the text.
        stop_tokens: tokens that end an answer.

    Attributes:
        forwards: passes so far.

    Raises:
        MoaError: llama.cpp does not read the file.
    """

    def __init__(
        self,
        file: Path,
        *,
        threads: int,
        context: int,
        sequences: int = 1,
        lookup: bool = False,
        stop_tokens: Sequence[int] = (),
    ) -> None:
        lib.llama_log_set(_quiet, ctypes.c_void_p())
        lib.llama_backend_init()
        of_model, of_context = lib.llama_model_default_params(), lib.llama_context_default_params()
        of_model.n_gpu_layers = 0
        of_context.n_ctx, of_context.n_batch, of_context.n_ubatch = context, _BATCH, _BATCH
        of_context.n_threads = of_context.n_threads_batch = threads
        of_context.n_seq_max, of_context.no_perf = sequences, True
        model = lib.llama_model_load_from_file(str(file).encode(), of_model)
        if not model:
            raise MoaError(f"llama.cpp does not read {file}: choose another --model", code="not_readable")
        self._context = lib.llama_init_from_model(model, of_context)
        self._memory, self._batch = lib.llama_get_memory(self._context), lib.llama_batch_init(_BATCH, 0, 1)
        self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=_LOOKED_UP) if lookup else None
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._stop_tokens, self.forwards = frozenset(stop_tokens), 0

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], logits: Sequence[bool]
    ) -> None:
        """Compute one pass of at most 512 rows; ``logits``: the rows whose logits are wanted."""
        batch, self.forwards = self._batch, self.forwards + 1
        batch.n_tokens = len(tokens)
        for row, (token, position, sequence, wanted) in enumerate(
            zip(tokens, positions, sequences, logits, strict=True)
        ):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if lib.llama_decode(self._context, batch) != 0:
            raise MoaError("llama.cpp failed in a pass", code="llamacpp_failed")

    def logits(self, row: int) -> np.ndarray:
        """Return the logits of a row of the last pass, float32 ``[vocab_size]``; -1 is the last one."""
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, row), (self._vocab_size,))

    def forget(self, position: int, sequence: int = 0) -> None:
        """Drop the keys and values of a sequence from ``position`` on."""
        lib.llama_memory_seq_rm(self._memory, sequence, position, -1)

    def decode(self, tokens: Sequence[int], count: int, sampling: Sampling) -> Iterator[list[int]]:
        """Write at most ``count`` tokens after ``tokens``; yields those of each pass."""
        sampler = _sampler(sampling)
        try:
            self.forget(0)
            for start in range(0, len(tokens), _BATCH):
                part = tokens[start : start + _BATCH]
                places = range(start, start + len(part))
                self.forward(part, places, [0] * len(part), [place == len(tokens) - 1 for place in places])
            text, new = list(tokens), [lib.llama_sampler_sample(sampler, self._context, -1)]
            while True:
                text += new
                yield new
                left = count - (len(text) - len(tokens))
                if left <= 0 or new[-1] in self._stop_tokens:
                    return
                new = self._next(text, left, sampler)
        finally:
            lib.llama_sampler_free(sampler)

    def _next(self, text: Sequence[int], most: int, sampler: lib.llama_sampler_p) -> list[int]:
        """Return what a pass over the last token of ``text`` and a draft gives, at most ``most`` tokens."""
        draft: list[int] = []
        if self._lookup is not None and most > 1:
            draft = self._lookup(np.array(text, np.intc)).tolist()[: most - 1]
        rows, first = [text[-1], *draft], len(text) - 1
        self.forward(rows, range(first, first + len(rows)), [0] * len(rows), [True] * len(rows))
        new: list[int] = []
        for row in range(len(rows)):
            new.append(lib.llama_sampler_sample(sampler, self._context, row))
            if new[-1] in self._stop_tokens or new[row : row + 1] != draft[row : row + 1]:
                break
        if common_length(new, draft) < len(draft):
            self.forget(first + len(new))
        return new


def _sampler(sampling: Sampling) -> lib.llama_sampler_p:
    """Make llama.cpp's sampler of these settings, in the order of ours: temperature, then top-p."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    if sampling.temperature == 0:
        steps = [lib.llama_sampler_init_greedy()]
    else:
        steps = [lib.llama_sampler_init_temp(sampling.temperature), lib.llama_sampler_init_top_p(sampling.top_p, 1)]
        steps.append(lib.llama_sampler_init_dist(sampling.seed & 0xFFFFFFFF))
    for step in steps:
        lib.llama_sampler_chain_add(chain, step)
    return chain


def requantise(source: Path, made: Path) -> None:
    """Write the model of ``source`` in Q4_0, all of its matrices, rounded by llama.cpp from what ``source`` stands for.
    Raises MoaError: llama.cpp refuses it."""
    lib.llama_log_set(_quiet, ctypes.c_void_p())
    settings = lib.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize, settings.pure = lib.LLAMA_FTYPE_MOSTLY_Q4_0, True, True
    if lib.llama_model_quantize(str(source).encode(), str(made).encode(), ctypes.byref(settings)) != 0:
        raise MoaError(f"llama.cpp cannot write {source} in Q4_0: leave out that mode", code="llamacpp_failed")
