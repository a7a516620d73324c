"""The datastore's file.

========  ======================================================================================================
bytes     what
========  ======================================================================================================
8         ``MOADATA1``
4         length of the header, little-endian
...       the header: :class:`Header` as JSON, with spaces up to a multiple of 64
4 each    the tokens, int32 little-endian: documents one behind the other, :data:`BOUNDARY` behind each
4 each    as many places, int32 little-endian: :func:`~moa_runtime.datastore.sorted_suffixes` of the tokens
========  ======================================================================================================
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moa_runtime.atomic_file import replace_private
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.tokenizer import ChatTokenizer

Int32 = NDArray[np.int32]

#: Suffixes are in order by so many tokens, and no longer runs are looked up. A power of two.
LONGEST_RUN = 16


def sorted_suffixes(tokens: Int32) -> Int32:
    """The places of ``tokens``, ordered by the :data:`LONGEST_RUN` tokens from there on, equal ones by place.

    Prefix doubling (Manber and Myers 1993, "Suffix arrays: a new method for on-line string searches"): the order by
    ``2n`` tokens follows from ranks by ``n`` tokens. Takes four sorts, and 40 bytes a token meanwhile.

    Args:
        tokens: ``[n]``.

    Returns:
        ``[n]``.
    """
    length = len(tokens)
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1  # 0 is what lies behind the end
    places, run = np.argsort(ranks, kind="stable"), 1
    while run < LONGEST_RUN and length:
        behind = np.zeros_like(ranks)
        behind[: max(0, length - run)] = ranks[run:]
        keys = ranks * (length + 1) + behind
        places = np.argsort(keys, kind="stable")
        ordered = keys[places]
        ranks[places] = np.cumsum(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        run *= 2
    return places.astype(np.int32)


BOUNDARY = -1
_MAGIC, _LENGTH, _ALIGNED = b"MOADATA1", struct.Struct("<I"), 64
_LONGEST_HEADER = 4096
_FILE_TOKEN = np.dtype("<i4")


class DatastoreError(MoaError):
    """A datastore that cannot be read, written, or used with this tokenizer."""


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        tokenizer: fingerprint of the tokenizer that its tokens are of.
        documents: how many texts it holds.
        tokens: theirs and the boundaries.
        source: empty; older versions named what they had made it of.
        crc32: of everything behind the header.
    """

    tokenizer: str
    documents: int
    tokens: int
    source: str
    crc32: int


def write_file(path: Path, header: Header, parts: Iterable[bytes | memoryview]) -> None:
    """Write header and arrays in the place of what was there, private to the user.

    Raises:
        DatastoreError: it cannot be written; what was there stays.
    """
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(len(_MAGIC) + _LENGTH.size + len(text)) % _ALIGNED)
    try:
        if path.exists() and not path.is_file():  # a folder, or a device whose name would be taken
            raise DatastoreError(f"the datastore cannot be written to {path}: it is no file; give the name of one")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_private(path, [_MAGIC, _LENGTH.pack(len(text)), text, *parts])
    except OSError as error:
        raise DatastoreError(f"the datastore cannot be written to {path}: {reason_of(error)}") from error


def read_header(path: Path) -> tuple[Header, int]:
    """The header, and how many bytes precede the arrays.

    Raises:
        DatastoreError: there is no such file, it is no datastore, or it is not whole.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise DatastoreError(f"{path} is no datastore: moa-export datastore makes one")
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC) + _LENGTH.size)
            if not begin.startswith(_MAGIC):
                raise DatastoreError(f"{path} is no datastore: moa-export datastore makes one")
            (length,) = _LENGTH.unpack(begin[len(_MAGIC) :])
            text = file.read(min(length, _LONGEST_HEADER))
        header, size = Header(**json.loads(text)), path.stat().st_size
        start = len(_MAGIC) + _LENGTH.size + length
        counts = (header.documents, header.tokens)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("no counts")
        if size != start + 2 * header.tokens * _FILE_TOKEN.itemsize:
            raise ValueError("another size")
    except FileNotFoundError:
        raise DatastoreError(f"there is no datastore {path}: moa-export datastore makes one") from None
    except OSError as error:
        raise DatastoreError(f"the datastore {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError, struct.error) as error:
        raise DatastoreError(f"the datastore {path} is damaged: delete it, and make it again") from error
    return header, start


def mapped_arrays(path: Path, header: Header, start: int) -> tuple[Int32, Int32]:
    """Tokens and places, ``[n]`` each, mapped into memory.

    Raises:
        DatastoreError: the file cannot be read.
    """
    if not header.tokens:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    try:
        if sys.platform == "win32":  # which replaces no file that is mapped
            held = np.fromfile(path, _FILE_TOKEN, offset=start).reshape(2, header.tokens)
        else:
            held = np.memmap(path, _FILE_TOKEN, "r", start, (2, header.tokens))
    except (OSError, ValueError) as error:
        raise DatastoreError(f"the datastore {path} cannot be read: {error}") from error
    tokens, places = np.asarray(held)  # a view: indexing a memmap is several times as slow
    return tokens, places


def as_parts(*arrays: Int32) -> list[memoryview]:
    """The arrays as bytes of the file."""
    return [np.ascontiguousarray(array, _FILE_TOKEN).view(np.uint8).data for array in arrays]


#: Tokens at most where nothing is said: a file of 128 MiB, which takes 700 MiB of memory while it is made.
MOST_TOKENS = 1 << 24


def write_datastore(
    path: Path,
    documents: Iterable[Sequence[int]],
    tokenizer: str,
    *,
    most_tokens: int = MOST_TOKENS,
) -> Header:
    """Write ``documents`` into a file, which only its user can read, in the place of what was there.

    Args:
        documents: token ids of each, the oldest first. Empty ones are left out.
        tokenizer: its fingerprint, see :func:`moa_runtime.bundle.tokenizer_fingerprint`.
        most_tokens: the newest documents that fit are kept; of one that is longer, its end.

    Raises:
        DatastoreError: it cannot be written; what was there stays.
        ValueError: a token id that is negative or has more than 31 bits.
    """
    kept = _newest([np.asarray(each, np.int64) for each in documents if len(each)], most_tokens)
    tokens = np.concatenate([part for each in kept for part in (each, [BOUNDARY])]) if kept else np.empty(0, np.int64)
    if kept and (min(each.min() for each in kept) < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise ValueError("token ids are 0 or more, and have at most 31 bits")
    narrow = tokens.astype(np.int32)
    parts = as_parts(narrow, sorted_suffixes(narrow))
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part, crc32)
    header = Header(tokenizer, len(kept), len(tokens), "", crc32)
    write_file(path, header, parts)
    return header


def _newest(documents: list[np.ndarray], most_tokens: int) -> list[np.ndarray]:
    room, kept = most_tokens, list[np.ndarray]()
    for document in reversed(documents):
        if len(document) + 1 > room:
            if not kept and room > 1:
                kept.append(document[len(document) + 1 - room :])
            break
        room -= len(document) + 1
        kept.append(document)
    return kept[::-1]


_RANGES_KEPT = 1 << 14


class Datastore:
    """Earlier texts, mapped into memory. Several conversations and threads may share one.

    Args:
        tokens: ``[n]``, with :data:`~moa_runtime.datastore.BOUNDARY` behind each document.
        places: ``[n]``, :func:`~moa_runtime.datastore.sorted_suffixes` of them.

    Attributes:
        header: what the file says of itself.
    """

    def __init__(self, header: Header, tokens: Int32, places: Int32) -> None:
        self.header = header
        self._tokens, self._places = tokens, places
        self._of_first = lru_cache(_RANGES_KEPT)(lambda token: self._narrowed((token,), 0, len(places)))

    @classmethod
    def open(cls, path: Path, tokenizer: str) -> Datastore:
        """Map a file, which is read once to see that it is whole.

        Args:
            tokenizer: fingerprint of the one that tokens are of.

        Raises:
            DatastoreError: there is none, it is damaged, or its tokens are of another tokenizer.
        """
        header, start = read_header(path)
        if header.tokenizer != tokenizer:
            raise DatastoreError(
                f"the datastore {path} was made with another tokenizer ({header.tokenizer}, the bundle's is "
                f"{tokenizer}): make it again with moa-export datastore"
            )
        tokens, places = mapped_arrays(path, header, start)
        crc32 = 0
        for part in as_parts(tokens, places):
            crc32 = zlib.crc32(part, crc32)
        if crc32 != header.crc32:
            raise DatastoreError(f"the datastore {path} is damaged: delete it, and make it again")
        return cls(header, tokens, places)

    def count(self, run: Sequence[int]) -> int:
        """How often a run of tokens occurs. Takes ``O(log n)`` steps; of a longer one than
        :data:`~moa_runtime.datastore.LONGEST_RUN` the last tokens count."""
        return len(self._range(run))

    def longest(self, text: Sequence[int], least: int = 1) -> int:
        """How many tokens the longest suffix of ``text`` has that occurs, at most
        :data:`~moa_runtime.datastore.LONGEST_RUN`; 0 where none of ``least`` tokens does."""
        most = min(LONGEST_RUN, len(text))
        if least > most or not self._range(text[len(text) - least :]):
            return 0
        lengths = range(least + 1, most + 1)  # what a run ends with occurs wherever the run does
        return least + bisect_left(lengths, True, key=lambda length: not self._range(text[len(text) - length :]))

    def continuations(self, run: Sequence[int], *, most: int, length: int) -> list[list[int]]:
        """What followed a run, up to ``length`` tokens each, to the document's end.

        Args:
            most: occurrences at most; of more than that, evenly drawn from their order (as in SSSD, arXiv 2411.05894).
        """
        found = self._range(run)
        step = max(1.0, len(found) / most)
        behind = min(len(run), LONGEST_RUN)
        chosen = [found[int(at * step)] for at in range(min(most, len(found)))]
        return [self._document(int(self._places[at]) + behind, length) for at in chosen]

    def followers(self, run: Sequence[int], *, most: int) -> dict[int, float]:
        """The tokens that followed a run, each with its share among ``most`` occurrences; none where nothing did."""
        tokens = [token for one in self.continuations(run, most=most, length=1) for token in one]
        return {token: times / len(tokens) for token, times in Counter(tokens).items()}

    def _document(self, place: int, length: int) -> list[int]:
        tokens: list[int] = self._tokens[place : place + length].tolist()
        end = next((at for at, token in enumerate(tokens) if token < 0), length)
        return tokens[:end]

    def _range(self, run: Sequence[int]) -> range:
        """Which of the places the suffixes begin with a run at."""
        run = tuple(run[-LONGEST_RUN:])
        if not run:
            return range(0)
        found: range = self._of_first(run[0])
        return found if len(run) == 1 or not found else self._narrowed(run, found.start, found.stop)

    def _narrowed(self, run: tuple[int, ...], low: int, high: int) -> range:
        tokens, places, length, sought = self._tokens, self._places, len(run), list(run)

        def begins(at: int) -> list[int]:
            place = places[at]
            begun: list[int] = tokens[place : place + length].tolist()
            return begun

        low = bisect_left(range(high), sought, lo=low, key=begins)
        if low == high or begins(low) != sought:
            return range(0)
        return range(low, bisect_right(range(high), sought, lo=low, key=begins))


#: Tokens before an answer that belong to its document, so that its beginning is found too (as in SSSD, arXiv
#: 2411.05894, by its authors' program). Of the question nothing is stored: what the target writes is to be drafted.
LEAD_TOKENS = 3


def answer_encoder(tokenizer: ChatTokenizer) -> Callable[[str], list[int]]:
    """Makes an answer's document: how the chat template begins an answer, then the text.

    Raises:
        ChatTemplateError: the template refuses a conversation of one question.
    """
    lead = tokenizer.encode_chat([{"role": "user", "content": "?"}])[-LEAD_TOKENS:]
    return lambda text: [*lead, *tokenizer.encode(text)] if text else []
