"""What a drafter expected at every position of a target's answers, kept in a file."""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.backends.base import StepInputs
from moa_runtime.bundle import Fingerprints
from moa_runtime.errors import MoaError

_VERSION = 1


@dataclass(frozen=True)
class RecordedAnswer:
    """A target's answer, and what the drafter expected on the way.

    A *query* asks what follows a path of drafted tokens behind one of the answer's positions.

    Attributes:
        prompt: everything before the answer.
        answer: the answer.
        positions: ``[q]``, tokens of prompt and answer that were committed at each query.
        lengths: ``[q]``, tokens of each path.
        tokens: the paths, one behind the other.
        top_tokens, top_logprobs: ``[q, k]``, as :class:`moa_runtime.backends.base.StepResult` has them.
    """

    prompt: list[int]
    answer: list[int]
    positions: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]
    top_tokens: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @cached_property
    def queries(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """The query for each position and path."""
        tokens, ends = self.tokens.tolist(), np.cumsum(self.lengths).tolist()
        paths = (tuple(tokens[end - length : end]) for end, length in zip(ends, self.lengths.tolist(), strict=True))
        return {key: at for at, key in enumerate(zip(self.positions.tolist(), paths, strict=True))}

    def fault(self, vocab_size: int) -> str:
        """What cannot be, as the rest of a sentence; empty where all is well."""
        count, top = len(self.positions), self.top_tokens.shape[1:]
        expected = {
            "positions": (count,),
            "lengths": (count,),
            "tokens": (int(np.sum(self.lengths)),),
            "top_tokens": (count, *top),
            "top_logprobs": (count, *top),
        }
        for name, shape in expected.items():
            found: NDArray[Any] = getattr(self, name)
            kind = np.floating if name == "top_logprobs" else np.integer
            if found.shape != shape or not np.issubdtype(found.dtype, kind):
                return f"has {name} of shape {found.shape} and type {found.dtype}, where the others ask for {shape}"
        if len(self.prompt) < 1 or len(self.answer) < 2 or not count or len(top) != 1 or not top[0]:
            return "has no prompt, no second token, no query or no candidates"
        every = np.concatenate((self.prompt, self.answer, self.tokens, self.top_tokens.ravel()))
        if not np.issubdtype(every.dtype, np.integer) or every.min() < 0 or every.max() >= vocab_size:
            return f"has tokens outside of the {vocab_size} of the target"
        if self.lengths.min() < 0 or self.positions.min() < 1 or not (self.top_logprobs <= 0.01).all():
            return "has negative lengths or positions, or probabilities above 1"
        return ""


@dataclass(frozen=True)
class Recording:
    """Answers of one target with what one drafter expected.

    Attributes:
        drafter: what drafted, for people.
        stop_tokens: ids that end a turn.
        ngrams: whether an n-gram index of the conversation belongs to the drafter.
    """

    drafter: str
    fingerprints: Fingerprints
    vocab_size: int
    stop_tokens: tuple[int, ...]
    ngrams: bool
    answers: list[RecordedAnswer]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer that have something before them to be drafted behind."""
        return [len(answer.answer) - 1 for answer in self.answers]

    @property
    def settings(self) -> dict[str, Any]:
        """What a result over this recording says of it."""
        lengths = self.lengths
        return {
            "drafter": self.drafter,
            "ngrams": self.ngrams,
            "answers": len(lengths),
            "tokens": sum(lengths),
        }

    def write(self, path: Path) -> None:
        """Raises MoaError: the file cannot be written."""
        header = {
            "version": _VERSION,
            "drafter": self.drafter,
            "fingerprints": asdict(self.fingerprints),
            "vocab_size": self.vocab_size,
            "stop_tokens": self.stop_tokens,
            "ngrams": self.ngrams,
            "texts": [[answer.prompt, answer.answer] for answer in self.answers],
        }
        arrays = {f"{name}-{at}": getattr(answer, name) for at, answer in enumerate(self.answers) for name in _ARRAYS}
        try:
            with path.open("wb") as file:
                np.savez_compressed(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
        except OSError as error:
            raise MoaError(f"cannot write the recording {path}: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Raises MoaError: a file that cannot be read, is no recording, or is one that contradicts itself."""
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
                faults = [answer.fault(vocab_size) for answer in answers]
                if not answers or not stop_tokens:
                    raise ValueError
        except OSError as error:
            raise MoaError(f"cannot read the recording {path}: {error.strerror}") from error
        except (
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            NotImplementedError,
            IndexError,
            MemoryError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise MoaError(
                f"{path} is no recording of this version of moa-bench: choose another --recording, or remove it"
            ) from error
        for number, fault in enumerate(faults, 1):
            if fault:
                damage = f"its answer {number} {fault}"
                raise MoaError(f"{path} is damaged, {damage}: choose another --recording, or remove it")
        return cls(header["drafter"], prints, vocab_size, stop_tokens, ngrams, answers)


_ARRAYS = ("positions", "lengths", "tokens", "top_tokens", "top_logprobs")


class Paths:
    """What the steps of a backend ask, without the conversation: drafted paths behind the tokens that are committed."""

    def __init__(self) -> None:
        self._held = np.zeros(0, np.int64)  # tokens of the cache entries

    def of(self, inputs: StepInputs) -> list[tuple[int, tuple[int, ...]]]:
        """Position and path of each query of the next step, see :attr:`RecordedAnswer.queries`."""
        self._held = np.concatenate((self._held[: len(inputs.self_keys)], inputs.tokens))
        committed = len(inputs.memory_keys) + 1  # the token that came with the last row has none yet
        drafted, masks = self._held[committed:], inputs.self_mask[inputs.queries, committed:]
        return [(committed, tuple(drafted[mask].tolist())) for mask in masks]
