"""Answers that a target wrote, kept in a file for the next benchmark of the same questions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from moa_bench.accept.written import Answers
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling


class AnswerFile:
    """JSON lines: ``{"target": fingerprint, "max_new_tokens": n}``, then ``{"p": [ids], "r": [ids]}`` for each answer.

    Where answers are sampled, the first line has ``"sampling"`` too: temperature, top_p and seed.

    It is begun if it is not there, and read as far as its last whole line, so an interrupted benchmark goes on.

    Args:
        target: the target's fingerprint.
        max_new_tokens: tokens of an answer at most.
        sampling: how the target chose.
        vocab_size: the target's.

    Attributes:
        answers: what the file holds.

    Raises:
        MoaError: a file that cannot be read or begun, with something else in it, or of another target, length
            or sampling.
    """

    def __init__(self, path: Path, target: str, max_new_tokens: int, sampling: Sampling, *, vocab_size: int) -> None:
        self._path = path
        header: dict[str, object] = {"target": target, "max_new_tokens": max_new_tokens}
        if sampling.temperature:
            header["sampling"] = asdict(sampling)
        try:
            whole = path.read_bytes() if path.exists() else b""
            kept = whole[: whole.rfind(b"\n") + 1]
            found, self.answers = _header_and_answers(kept, path, vocab_size) if whole else (header, {})
            if found["target"] != target:
                raise MoaError(f"the answers in {path} are another target's: choose another --answers, or remove it")
            if found["max_new_tokens"] != max_new_tokens:
                raise MoaError(
                    f"the answers in {path} have at most {found['max_new_tokens']} tokens, not {max_new_tokens}: "
                    "choose another --answers, or the same --max-new-tokens"
                )
            if found.get("sampling") != header.get("sampling"):
                raise MoaError(
                    f"the answers in {path} were sampled otherwise: choose another --answers, or the same "
                    "--temperature, --top-p and --seed"
                )
            if not whole:
                self._append([header])
            elif len(kept) < len(whole):
                os.truncate(path, len(kept))
        except OSError as error:
            raise MoaError(f"cannot keep answers in {path}: {error.strerror}") from error

    def add(self, written: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Keep more answers, each behind everything that was said before it.

        Raises:
            MoaError: the file cannot be written.
        """
        try:
            self._append([{"p": list(prompt), "r": list(answer)} for prompt, answer in written])
        except OSError as error:
            raise MoaError(f"cannot keep answers in {self._path}: {error.strerror}") from error

    def _append(self, lines: Iterable[object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def _header_and_answers(kept: bytes, path: Path, vocab_size: int) -> tuple[dict[str, object], Answers]:
    """What whole lines hold. Raises MoaError."""
    try:
        header, *rest = [json.loads(line) for line in kept.decode().splitlines()]
        if not isinstance(header, dict) or not {"target", "max_new_tokens"} <= header.keys():
            raise ValueError
        answers = {tuple(line["p"]): list(line["r"]) for line in rest}
        if not all(_are_ids(prompt, vocab_size) and _are_ids(answer, vocab_size) for prompt, answer in answers.items()):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MoaError(f"{path} holds no answers of moa-bench: choose another --answers, or remove it") from error
    return header, answers


def _are_ids(tokens: Sequence[object], vocab_size: int) -> bool:
    return bool(tokens) and all(type(token) is int and 0 <= token < vocab_size for token in tokens)
