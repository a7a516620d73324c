"""Token stores: conversations as JSON lines, the card of a stored file, and packing into training steps."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moa_drafter.target import Target
from moa_drafter.training.settings import GenerateSettings, RunSettings, plain, read_mapping, write_record
from moa_runtime.checked_file import open_checked, sha256_of
from moa_runtime.errors import MoaError


@dataclass(frozen=True)
class Conversation:
    """The token ids of a conversation.

    Attributes:
        prompt: everything before the first answer.
        answer: everything from the first answer on, with the end-of-turn token unless the text was cut off.
        asked: spans of ``answer``, counted from its start, that the target did not write: the user's later turns, with
            the template's tokens.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    asked: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    @property
    def answers(self) -> list[tuple[int, int]]:
        """Spans of ``tokens`` that the target wrote: ``[(3, 7), (9, 12)]`` for a prompt of 3, an answer of 9 and
        ``asked=((4, 6),)``."""
        offset = len(self.prompt)
        starts = [offset, *(offset + stop for _, stop in self.asked)]
        stops = [*(offset + start for start, _ in self.asked), len(self)]
        return list(zip(starts, stops, strict=True))

    @property
    def learnt(self) -> int:
        """Number of positions whose next token is learnt; the first token of an answer comes from the server."""
        return sum(stop - start - 1 for start, stop in self.answers)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def open_lines(path: Path) -> IO[str]:
    """Open a text file, gzip if named ``.gz``."""
    open_checked(path).close()  # a pipe would block
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def check_token_file(path: Path) -> None:
    """Raise a MoaError if there is no such file."""
    if not path.is_file():
        raise MoaError(f"there is no token file {path}: moa-train --write-only writes one", code="file_missing")


def read_conversations(path: Path, *, vocab_size: int) -> list[Conversation]:
    """Read a token store, gzip if named ``.gz``: one conversation a line, ``{"p": [ids], "r": [ids]}``.

    ``r`` holds everything from the first answer on, and ``"u": [[start, stop], ...]`` the spans of ``r`` that the
    target did not write. A last line that an interruption cut short is skipped. Raises MoaError if the file is missing
    or a line, named by number, is broken.
    """
    check_token_file(path)
    found: list[Conversation] = []
    try:
        with open_lines(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith("\n") and (conversation := _conversation(line, f"{path}, line {number}", vocab_size)):
                    found.append(conversation)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MoaError(f"cannot read the token file {path}: {error}", code="unreadable") from error
    if not found:
        raise MoaError(f"{path} holds no conversation with an answer of two tokens or more", code="too_few")
    return found


def _conversation(line: str, where: str, vocab_size: int) -> Conversation | None:
    """Parse one line; None if nothing can be learnt from it."""
    try:
        raw = json.loads(line)
        asked = tuple((int(start), int(stop)) for start, stop in raw.get("u", ()))
        conversation = Conversation(tuple(raw["p"]), tuple(raw["r"]), asked)
        if not all(type(token) is int for token in conversation.tokens):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MoaError(f"{where}: expected {{'p': [ids], 'r': [ids]}}, and spans in 'u'", code="bad_line") from error
    if not all(0 <= token < vocab_size for token in conversation.tokens):
        raise MoaError(f"{where}: a token id outside 0..{vocab_size - 1}; another tokenizer's?", code="out_of_range")
    edges = [0, *(edge for span in asked for edge in span), len(conversation.answer)]
    if any(after <= before for before, after in itertools.pairwise(edges)) and asked:
        raise MoaError(f"{where}: spans in 'u' must lie in order inside 'r', an answer after each", code="bad_line")
    return conversation if conversation.prompt and conversation.learnt > 0 else None


def frequent_tokens(conversations: Sequence[Conversation], size: int, always: Sequence[int]) -> list[int]:
    """Choose the ``size`` token ids of the draft vocabulary, ascending: ``always``, then the most frequent ones, then
    the lowest ids, which byte-pair encodings learnt first."""
    counts = Counter(token for conversation in conversations for token in conversation.tokens)
    ranked = dict.fromkeys((*always, *(token for token, _ in counts.most_common()), *range(size)))
    return sorted(list(ranked)[:size])


def packed_order(lengths: Sequence[int], step_tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield training steps without end: lists of conversation indices of about ``step_tokens`` tokens in all.

    Each epoch is a permutation drawn from ``seed`` and the epoch's number, so a resumed run can skip to any step.
    """
    for epoch in itertools.count():
        order = list(range(len(lengths)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        step: list[int] = []
        size = 0
        for index in order:
            if step and size + lengths[index] > step_tokens:
                yield step
                step, size = [], 0
            step.append(index)
            size += lengths[index]
        yield step


CARD_SUFFIX = ".card.yaml"
_FORMAT = (
    "a line a conversation, JSON: p and r are the target's token ids, the prompt and all from the first answer on; "
    "u are spans of r that the target did not write; b is the batch"
)


def keep(store: Path, target: Target, settings: RunSettings) -> Path:
    """Write ``STORE.gz`` and its card beside a store, and return the file; the same store gives the same bytes."""
    kept = store.with_name(store.name + ".gz")
    scratch = kept.with_name(f".{kept.name}.tmp")
    with (
        store.open("rb") as source,
        scratch.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
    ):
        shutil.copyfileobj(source, packed)
    scratch.replace(kept)
    write_record(card_of(kept), _card(kept, target, settings))
    return kept


def card_of(file: Path) -> Path:
    return file.with_name(file.name + CARD_SUFFIX)


def check_card(file: Path, sha256: str) -> None:
    """Compare a file with its card, if it has one. Raises MoaError if they differ or the card is unreadable."""
    card = card_of(file)
    if card.is_file() and read_mapping(card, str(card), example="sha256: ...").get("sha256") != sha256:
        raise MoaError(f"{file} differs from its card: fetch it again, or remove {card}", code="bad_digest")


def _card(kept: Path, target: Target, settings: RunSettings) -> dict[str, Any]:
    conversations = read_conversations(kept, vocab_size=target.config.vocab_size)
    answers = sum(stop - start for each in conversations for start, stop in each.answers)
    return {
        "file": kept.name,
        "sha256": sha256_of(kept),
        "bytes": kept.stat().st_size,
        "format": _FORMAT,
        "conversations": len(conversations),
        "answer_tokens": answers,
        "other_tokens": sum(map(len, conversations)) - answers,
        "target": {"name": target.folder.name, "fingerprint": target.fingerprint},
        "settings": {
            key: value
            for key, value in plain(settings, names_only=True).items()
            if key in GenerateSettings.__dataclass_fields__ or key in ("model", "prompts", "dtype")
        },
    }
