"""A drafter's predictions at every position of a target's answers, kept in a file and replayed without a model."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_bench.target_answers import ReplayEngine, rows_of
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import SharedBackend
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.errors import MoaError
from moa_runtime.manifest import Fingerprints, Manifest
from moa_runtime.session.memory_rows import decode_rows, encode_rows, encoding_of
from moa_runtime.tokens import common_length
from moa_server.engine.base import Capabilities, Engine, EngineFacts, Outcome, Rows, StepRequest

_VERSION = 1
_ARRAYS = ("positions", "lengths", "tokens", "top_tokens", "top_logprobs")
#: Together they ask nearly everything that drafts of any shape ask.
_SHAPES = (Budget.tree(62, 16, 10), Budget.chain(16))
_MAX_CONTEXT = 1 << 20
#: Log-probability (nats) of a path that was never asked.
_HOPELESS_NATS = -20.0

#: What numpy, json and zipfile raise for files with other content.
_DAMAGED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)

Query = tuple[int, tuple[int, ...]]  # committed tokens, and the drafted path after them


@dataclass(frozen=True)
class RecordedAnswer:
    """A target's answer, and the drafter's predictions on the way.

    A *query* asks for the next token after ``positions`` committed tokens and a drafted path of ``lengths`` tokens
    (``[q]`` each); ``tokens`` are the paths, concatenated. ``top_tokens``, ``top_logprobs``: ``[q, k]``.
    """

    prompt: list[int]
    answer: list[int]
    positions: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]
    top_tokens: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @cached_property
    def queries(self) -> dict[Query, int]:
        """The number of the query for each position and path."""
        tokens, ends = self.tokens.tolist(), np.cumsum(self.lengths).tolist()
        paths = (tuple(tokens[end - length : end]) for end, length in zip(ends, self.lengths.tolist(), strict=True))
        return {key: at for at, key in enumerate(zip(self.positions.tolist(), paths, strict=True))}

    def check(self, vocab_size: int) -> None:
        """Raises ValueError if the arrays contradict each other or the target."""
        kinds = {name: np.floating if name == "top_logprobs" else np.integer for name in _ARRAYS}
        if not all(np.issubdtype(getattr(self, name).dtype, kind) for name, kind in kinds.items()):
            raise ValueError
        if not all(type(token) is int for token in (*self.prompt, *self.answer)):
            raise ValueError
        count, top = len(self.positions), self.top_tokens.shape[1]
        shapes = [(count,), (count,), (int(self.lengths.sum()),), (count, top), (count, top)]
        every = np.concatenate((self.prompt, self.answer, self.tokens, self.top_tokens.ravel()))
        counts = (len(self.prompt), len(self.answer) - 1, count, top, self.positions.min())
        agree = [getattr(self, name).shape for name in _ARRAYS] == shapes and min(counts) >= 1
        tokens = min(self.lengths.min(), every.min()) >= 0 and every.max() < vocab_size
        if not (agree and tokens and (self.top_logprobs <= 0.01).all()):
            raise ValueError


@dataclass(frozen=True)
class Recording:
    """Answers of one target with the predictions of one drafter, perhaps mixed with an n-gram index."""

    drafter: str
    fingerprints: Fingerprints
    vocab_size: int
    stop_tokens: tuple[int, ...]
    ngrams: bool
    answers: list[RecordedAnswer]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer without the first, which comes with the prompt's verdict."""
        return [len(answer.answer) - 1 for answer in self.answers]

    def write(self, path: Path) -> None:
        """Write a file. Raises MoaError if it cannot be written."""
        header = {name: value for name, value in vars(self).items() if name not in ("answers", "fingerprints")}
        header |= {"version": _VERSION, "fingerprints": asdict(self.fingerprints)}
        header |= {"texts": [[answer.prompt, answer.answer] for answer in self.answers]}
        arrays = {f"{name}-{at}": getattr(answer, name) for at, answer in enumerate(self.answers) for name in _ARRAYS}
        try:
            with path.open("wb") as file:
                np.savez_compressed(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
        except OSError as error:
            raise MoaError(f"cannot write the recording {path}: {error.strerror}", code="not_writable") from error

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file. Raises MoaError if it cannot be read, is no recording, or contradicts itself."""
        try:
            with np.load(path, allow_pickle=False) as file:
                header: dict[str, Any] = json.loads(file["header"].tobytes())
                if header["version"] != _VERSION:
                    raise ValueError
                answers = [
                    RecordedAnswer(prompt, answer, *(file[f"{name}-{at}"] for name in _ARRAYS))
                    for at, (prompt, answer) in enumerate(header["texts"])
                ]
            vocab_size, stop_tokens = int(header["vocab_size"]), tuple(map(int, header["stop_tokens"]))
            prints, ngrams = Fingerprints(**header["fingerprints"]), bool(header["ngrams"])
            for text in (header["drafter"], *vars(prints).values()):
                text.encode()
            for answer in answers:
                answer.check(vocab_size)
            if not answers or not stop_tokens:
                raise ValueError
        except OSError as error:
            raise MoaError(f"cannot read the recording {path}: {error.strerror}", code="not_readable") from error
        except _DAMAGED as error:
            text = f"{path} is damaged, or no recording of this moa-bench: choose another --recording"
            raise MoaError(text, code="damaged") from error
        return cls(header["drafter"], prints, vocab_size, stop_tokens, ngrams, answers)


class _Paths:
    """Finds the queries of a backend's steps, each with the drafted path after the committed tokens."""

    def __init__(self) -> None:
        self._held = np.zeros(0, np.int64)  # tokens of the cache entries

    def of(self, inputs: StepInputs) -> list[Query]:
        """Return the queries of the next step."""
        self._held = np.concatenate((self._held[: len(inputs.self_keys)], inputs.tokens))
        committed = len(inputs.memory_keys) + 1  # the token that came with the last row has none yet
        drafted, masks = self._held[committed:], inputs.self_mask[inputs.queries, committed:]
        return [(committed, tuple(drafted[mask].tolist())) for mask in masks]


# -- making a recording ----------------------------------------------------------------------------------


def record(
    manifest: Manifest,
    backend: Backend,
    engine: Engine,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    ngrams: bool,
    on_position: Callable[[], None],
) -> RecordedAnswer:
    """Record a bundle's drafter at every position of ``answer``; ``engine`` is asked for memory rows only."""
    recording = _RecordingBackend(backend)
    drafter, text = drafter_for(manifest, recording, ngrams=ngrams), [*prompt, *answer]
    if (rows := rows_of(engine, text)) is not None:  # rounded as on the wire
        keys, values = decode_rows(encode_rows(0, rows.keys, rows.values, encoding_of(manifest.architecture)))
    for position in range(len(prompt) + 1, len(text)):
        if rows is not None:
            held = drafter.rows
            drafter.add_rows(held, keys[held : position - 1], values[held : position - 1])
        for shape in _SHAPES:
            drafter.propose(text[:position], shape)
        on_position()
    positions, paths = zip(*recording.heard, strict=True)
    tokens, logprobs = zip(*recording.heard.values(), strict=True)
    lengths, drafted = [len(path) for path in paths], [token for path in paths for token in path]
    whole = (np.array(numbers, np.int32) for numbers in (positions, lengths, drafted, tokens))
    return RecordedAnswer(list(prompt), list(answer), *whole, np.array(logprobs, np.float32))


class _RecordingBackend(SharedBackend):
    """A backend that keeps candidates and log-probabilities by query, in ``heard``."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._paths = _Paths()
        self.heard: dict[Query, tuple[list[int], list[float]]] = {}

    def step(self, inputs: StepInputs) -> StepResult:
        result = super().step(inputs)
        found = zip(result.top_tokens.tolist(), result.top_logprobs.tolist(), strict=True)
        self.heard.update(zip(self._paths.of(inputs), found, strict=True))
        return result


# -- replaying it ----------------------------------------------------------------------------------------


class RecordedBackend(Backend):
    """A backend that returns recorded predictions. A path that was not recorded gets the prediction of a later position
    of the answer; a path that leaves the answer gets an unlikely one."""

    kv_shape, max_positions = (1, 1), None

    def __init__(self, answer: RecordedAnswer) -> None:
        self._paths = _Paths()
        self.replay(answer)

    def replay(self, answer: RecordedAnswer) -> None:
        """Replay another answer from now on."""
        self._answer, self._text = answer, (*answer.prompt, *answer.answer)

    @property
    def top_k(self) -> int:
        return self._answer.top_tokens.shape[1]

    def step(self, inputs: StepInputs) -> StepResult:
        found = [self._query(position, path) for position, path in self._paths.of(inputs)]
        known = [-1 if query is None else query for query in found]
        logprobs = self._answer.top_logprobs[known]  # a copy
        logprobs[[query is None for query in found]] = _HOPELESS_NATS
        entries = np.zeros((len(inputs.tokens), 1, 1), np.float32)
        return StepResult(self._answer.top_tokens[known], logprobs, entries, entries)

    def _query(self, position: int, path: tuple[int, ...]) -> int | None:
        for right in range(len(path) + 1):
            query = self._answer.queries.get((position + right, path[right:]))
            if query is not None:
                return query
            if path[right : right + 1] != self._text[position + right : position + right + 1]:
                break
        return None


def replayed_drafter(recording: Recording, backend: Backend) -> MoaDrafter:
    """Make the recording's drafter; one at a time on a backend."""
    mixture = NgramMixture(recording.stop_tokens) if recording.ngrams else None
    return MoaDrafter(backend, max_context=_MAX_CONTEXT, stop_tokens=recording.stop_tokens, mixture=mixture)


def replayed_target(recording: Recording) -> ReplayEngine:
    """Make an engine that gives the recording's answers to their prompts, with memory rows of zeros."""
    answers = {tuple(answer.prompt): answer.answer for answer in recording.answers}
    return ReplayEngine(_RowsOfZeros(recording), answers)


class _RowsOfZeros:
    """The engine that :class:`ReplayEngine` asks for memory rows."""

    capabilities, facts = Capabilities(), EngineFacts("recorded", "cpu", "recorded", True, 0)

    def __init__(self, recording: Recording) -> None:
        self.fingerprints, self.vocab_size = recording.fingerprints, recording.vocab_size
        self.stop_tokens, self.max_context = recording.stop_tokens, _MAX_CONTEXT
        self._held: dict[int, Sequence[int]] = {}

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        return common_length(self._held.get(sequence, ()), prefix)

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        outcomes = []
        for request in requests:
            self._held[request.sequence], start = request.prefix, request.rows_from
            zeros = np.zeros((len(request.prefix) - (start or 0), 1, 1), np.float32)
            outcomes.append(Outcome(rows=None if start is None else Rows(start, zeros, zeros)))
        return outcomes

    def release(self, sequence: int) -> None:
        self._held.pop(sequence, None)
