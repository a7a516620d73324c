"""``moa-export datastore``: read texts, chats and tokens, and write a datastore from which drafts are copied."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moa_runtime.bundle import Bundle
from moa_runtime.cli_main import OptionParser
from moa_runtime.datastore import LEAD_TOKENS, MOST_TOKENS, answer_encoder, write_datastore
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.paths import default_bundle
from moa_runtime.tokenizer import ChatTokenizer

DEFAULT_FILE = Path("texts.moadata")
_LEAST_TOKENS = 2  # one, and the end of its document
#: Endings of files' names: JSON lines, a conversation as /save of moa-chat writes it, and text.
FORMATS = (".jsonl", ".jsonl.gz", ".json", ".txt", ".md")
_EXPECTED = (
    'expected {"messages": [...]}, {"text": "..."}, {"tokens": [...]}, or {"p": [...], "r": [...]} as moa-train and '
    "moa-bench write"
)
_DESCRIPTION = f"""\
Make a datastore of texts that answers may repeat, for moa-chat --datastore FILE (SSSD, arXiv 2411.05894).

FILES are {", ".join(FORMATS)}. A line of JSON is {{"messages": [...]}}, of which the
assistant's messages count, {{"text": "..."}}, {{"tokens": [...]}}, or what moa-train --write-only and moa-bench
accept --answers write. Answers of the target itself are worth most.
"""


def datastore(words: Sequence[str]) -> int:
    """Make a datastore; prints what it holds."""
    parser = OptionParser(
        prog="moa-export datastore",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILES")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_FILE, metavar="FILE", help="where it is written (default: %(default)s)"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="whose tokenizer it is for (default: the default bundle)"
    )
    parser.add_argument(
        "--most-tokens",
        type=int,
        default=MOST_TOKENS,
        metavar="N",
        help="the last documents that fit are kept, 8 bytes a token (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(words)
    out = args.out
    if args.most_tokens < _LEAST_TOKENS:
        raise MoaError(f"--most-tokens must be at least {_LEAST_TOKENS}, not {args.most_tokens}", code="out_of_range")
    if taken := next((path for path in args.files if _same_file(path, out)), None):
        reason = f"--out {out} is one of the files to read, {taken}: give the datastore another name"
        raise MoaError(reason, code="own_input")
    require_extra("export", "moa-export datastore")
    from moa_export.progress import Progress

    bundle = Bundle.open(args.bundle or default_bundle())
    reader, progress = DocumentReader(ChatTokenizer.from_bundle(bundle)), Progress(sys.stderr, quiet=args.quiet)
    documents: list[list[int]] = []
    with progress.stage("reading", len(args.files)) as advance:
        for path in args.files:
            documents += reader.read(path)
            advance()
    documents = [document for document in documents if document]
    if not documents:
        reason = "there is nothing to make a datastore of: the files hold neither a text nor an answer"
        raise MoaError(reason, code="no_documents")
    with progress.stage("sorting"):
        tokenizer = bundle.manifest.fingerprints.tokenizer
        header = write_datastore(out, documents, tokenizer, most_tokens=args.most_tokens)
    left_out = len(documents) - header.documents
    size = out.stat().st_size
    if args.json:
        made = {"file": str(out), "bytes": size, "left_out": left_out, **dataclasses.asdict(header)}
        print(json.dumps(made))
        return 0
    print(f"{out}: {header.documents} documents, {header.tokens} tokens, {size / 1e3:,.1f} kB")
    if left_out:
        print(f"the first {left_out} documents were left out: --most-tokens makes room for more")
    return 0


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


class DocumentsError(MoaError):
    """A file that holds no documents; the message names it, and the line."""


class _UnfitError(Exception):
    """The part of an object that is not as expected."""


class DocumentReader:
    """Reads files as documents: each answer of a conversation's assistant, or a whole text.

    Args:
        tokenizer: that of the bundle that will draft with the documents.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._encode_answer = tokenizer, answer_encoder(tokenizer)
        self._kinds: dict[str, Callable[[dict[str, Any]], Iterable[list[int]]]] = {
            "messages": self._answers,
            "text": lambda raw: [self._tokenizer.encode(_string(raw["text"], "text"))],
            "tokens": lambda raw: [self._tokens(raw["tokens"], "tokens")],
            "max_new_tokens": lambda raw: [],  # moa-bench's first line, which describes the others
            "r": lambda raw: [[*self._tokens(raw.get("p", []), "p")[-LEAD_TOKENS:], *self._tokens(raw["r"], "r")]],
        }

    def read(self, path: Path) -> Iterator[list[int]]:
        """Token ids of each document of a file.

        Raises:
            DocumentsError: it cannot be read, or a part of it is no document.
        """
        if path.is_dir():
            raise DocumentsError(f"{path} is a folder: name the files in it", code="no_file")
        if not path.name.endswith(FORMATS):
            reason = f"{path} has no known ending: expected {', '.join(FORMATS)}"
            raise DocumentsError(reason, code="unknown_format")
        try:
            if path.exists() and not path.is_file():
                raise DocumentsError(f"cannot read {path}: it is no file", code="no_file")
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
            raise DocumentsError(f"cannot read {path}: it is no UTF-8 text", code="not_utf8") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DocumentsError(f"cannot read {path}: it is no whole gzip file", code="damaged") from error
        except OSError as error:
            code = "file_missing" if isinstance(error, FileNotFoundError) else "unreadable"
            raise DocumentsError(f"cannot read {path}: {error.strerror}", code=code) from error

    def _object(self, where: str, text: str) -> Iterator[list[int]]:
        try:
            raw = json.loads(text)
        except RecursionError as error:
            raise DocumentsError(f"{where} is nested too deeply", code="not_json") from error
        except json.JSONDecodeError as error:
            raise DocumentsError(f"{where} is no JSON: {error}", code="not_json") from error
        except ValueError as error:  # Python's own words are for programmers
            reason = f"{where} holds a number of thousands of digits: no token has such an id"
            raise DocumentsError(reason, code="not_json") from error
        kind = next((name for name in self._kinds if isinstance(raw, dict) and name in raw), None)
        if kind is None:
            raise DocumentsError(f"{where} is no document: {_EXPECTED}", code="no_document")
        try:
            yield from self._kinds[kind](raw)
        except _UnfitError as error:
            raise DocumentsError(f"{where} is no document: {error}; {_EXPECTED}", code="no_document") from error

    def _answers(self, raw: dict[str, Any]) -> Iterator[list[int]]:
        messages = raw["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise _UnfitError("messages is no list of objects")
        for number, message in enumerate(messages, 1):
            if "role" not in message:
                raise _UnfitError(f"message {number} has no role")
            if message["role"] == "assistant":
                yield self._encode_answer(_string(message.get("content"), f"content of message {number}"))

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
