"""What ``moa-export datastore`` reads: texts, chats and tokens, as documents."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moa_runtime.datastore import LEAD_TOKENS, answer_encoder
from moa_runtime.errors import MoaError
from moa_runtime.tokenizer import ChatTokenizer

#: Endings of files' names: JSON lines, a conversation as /save of moa-chat writes it, and text.
FORMATS = (".jsonl", ".jsonl.gz", ".json", ".txt", ".md")
_EXPECTED = (
    'expected {"messages": [...]}, {"text": "..."}, {"tokens": [...]}, or {"p": [...], "r": [...]} as moa-train and '
    "moa-bench write"
)


class DocumentsError(MoaError):
    """A file that holds no documents; the message names it, and the line."""


class _UnfitError(Exception):
    """The part of an object that is not as expected."""


class DocumentReader:
    """Reads files as documents. Of conversations the assistant's answers are documents, a text is one as it is.

    Args:
        tokenizer: of the bundle that will draft with them.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._encode_answer = tokenizer, answer_encoder(tokenizer)
        self._kinds: dict[str, Callable[[dict[str, Any]], Iterator[list[int]]]] = {
            "messages": self._answers,
            "text": self._text,
            "tokens": lambda raw: iter([self._tokens(raw["tokens"], "tokens")]),
            "max_new_tokens": lambda raw: iter([]),  # moa-bench's first line, which says of what the others are
            "r": lambda raw: iter(
                [[*self._tokens(raw.get("p", []), "p")[-LEAD_TOKENS:], *self._tokens(raw["r"], "r")]]
            ),
        }

    def read(self, path: Path) -> Iterator[list[int]]:
        """Token ids of each document of a file.

        Raises:
            DocumentsError: it cannot be read, or a part of it is no document.
        """
        if path.is_dir():
            raise DocumentsError(f"{path} is a folder: name the files in it")
        if not path.name.endswith(FORMATS):
            raise DocumentsError(f"{path} has no known ending: expected {', '.join(FORMATS)}")
        try:
            if path.exists() and not path.is_file():
                raise DocumentsError(f"cannot read {path}: it is no file")
            opened = gzip.open if path.name.endswith(".gz") else open
            with opened(path, "rt", encoding="utf-8-sig") as file:
                if path.suffix in (".txt", ".md"):
                    yield self._tokenizer.encode(file.read())
                elif path.suffix == ".json":
                    yield from self._object(f"{path}", file.read())
                else:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield from self._object(f"line {number} of {path}", line)
        except UnicodeDecodeError as error:
            raise DocumentsError(f"cannot read {path}: it is no UTF-8 text") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DocumentsError(f"cannot read {path}: it is no whole gzip file") from error
        except OSError as error:
            raise DocumentsError(f"cannot read {path}: {error.strerror}") from error

    def _object(self, where: str, text: str) -> Iterator[list[int]]:
        try:
            raw = json.loads(text)
        except RecursionError as error:
            raise DocumentsError(f"{where} is nested too deeply") from error
        except json.JSONDecodeError as error:
            raise DocumentsError(f"{where} is no JSON: {error}") from error
        except ValueError as error:  # what Python says of it speaks to programmers
            raise DocumentsError(f"{where} holds a number of thousands of digits: no token has such an id") from error
        kind = next((name for name in self._kinds if isinstance(raw, dict) and name in raw), None)
        if kind is None:
            raise DocumentsError(f"{where} is no document: {_EXPECTED}")
        try:
            yield from self._kinds[kind](raw)
        except _UnfitError as error:
            raise DocumentsError(f"{where} is no document: {error}; {_EXPECTED}") from error

    def _answers(self, raw: dict[str, Any]) -> Iterator[list[int]]:
        messages = raw["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise _UnfitError("messages is no list of objects")
        for number, message in enumerate(messages, 1):
            if "role" not in message:
                raise _UnfitError(f"message {number} has no role")
            if message["role"] == "assistant":
                yield self._encode_answer(_string(message.get("content"), f"content of message {number}"))

    def _text(self, raw: dict[str, Any]) -> Iterator[list[int]]:
        yield self._tokenizer.encode(_string(raw["text"], "text"))

    def _tokens(self, raw: Any, name: str) -> list[int]:
        known = range(self._tokenizer.vocab_size)
        if not isinstance(raw, list) or not all(type(token) is int and token in known for token in raw):
            raise _UnfitError(f"{name} is no list of whole numbers from 0 to {known[-1]}, the tokenizer's ids")
        return raw


def _string(raw: Any, name: str) -> str:
    if not isinstance(raw, str):
        raise _UnfitError(f"the {name} is no string")
    try:
        raw.encode()
    except UnicodeEncodeError as error:
        raise _UnfitError(f"the {name} has half of a surrogate pair at character {error.start + 1}") from error
    return raw
