"""A datastore: earlier texts in a file, looked up by their suffix array.

========  ======================================================================================================
bytes     content
========  ======================================================================================================
8         ``MOADATA1``
4         length of the header, little-endian
...       the header: :class:`Header` as JSON, padded with spaces so that it ends at a multiple of 64
4 each    the tokens, int32 little-endian: the documents, each followed by :data:`BOUNDARY`
4 each    as many positions, int32 little-endian: :func:`sorted_suffixes` of the tokens
========  ======================================================================================================
"""

from __future__ import annotations

import json
import os
import struct
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
from moa_runtime.checked_file import open_checked
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.tokenizer import ChatTokenizer

Int32 = NDArray[np.int32]

#: Suffixes are sorted by this number of tokens, and no longer runs are looked up. A power of two.
LONGEST_RUN = 16
BOUNDARY = -1
#: Default limit in tokens: a file of 128 MiB, which takes 700 MiB of memory while it is made.
MOST_TOKENS = 1 << 24
#: Tokens before an answer that belong to its document, so that its beginning is found too (as in SSSD, arXiv
#: 2411.05894, by its authors' program). Nothing of the question is stored: only the target's text is drafted.
LEAD_TOKENS = 3
_MAGIC, _LENGTH, _ALIGNED = b"MOADATA1", struct.Struct("<I"), 64
_LONGEST_HEADER, _LARGEST = 4096, 1 << 32
_FILE_TOKEN = np.dtype("<i4")
_RANGES_KEPT = 1 << 14


class DatastoreError(MoaError):
    """A datastore cannot be read, written, or used with this tokenizer."""


@dataclass(frozen=True)
class Header:
    """Header of a file."""

    tokenizer: str  # fingerprint
    documents: int
    tokens: int  # boundaries included
    source: str  # empty; used by older versions
    crc32: int  # of the arrays


def sorted_suffixes(tokens: Int32) -> Int32:
    """Return the positions of ``tokens`` ``[n]``, sorted by the next :data:`LONGEST_RUN` tokens, then by number.

    Prefix doubling (Manber and Myers 1993, "Suffix arrays: a new method for on-line string searches"): the order by
    ``2n`` tokens follows from ranks by ``n`` tokens. Takes four sorts, and 40 bytes a token meanwhile.
    """
    length = len(tokens)
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1  # 0 is past the end
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


def write_datastore(
    path: Path, documents: Iterable[Sequence[int]], tokenizer: str, *, most_tokens: int = MOST_TOKENS
) -> Header:
    """Write ``documents`` into a file that only its user can read, replacing its content.

    Args:
        documents: token ids of each, the oldest first. Empty ones are left out.
        tokenizer: its fingerprint, see :func:`moa_runtime.bundle.tokenizer_fingerprint`.
        most_tokens: the newest documents that fit are kept; of a single one that does not, its end.

    Raises:
        DatastoreError: it cannot be written; the old content stays.
        ValueError: a token id is negative or has more than 31 bits.
    """
    kept = _newest([np.asarray(each, np.int64) for each in documents if len(each)], most_tokens)
    tokens = np.concatenate([part for each in kept for part in (each, [BOUNDARY])]) if kept else np.empty(0, np.int64)
    if kept and (min(each.min() for each in kept) < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise ValueError("token ids are 0 or more, and have at most 31 bits")
    narrow = tokens.astype(np.int32)
    parts = _bytes_of(narrow, sorted_suffixes(narrow))
    header = Header(tokenizer, len(kept), len(tokens), "", _crc32(parts))
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(len(_MAGIC) + _LENGTH.size + len(text)) % _ALIGNED)
    try:
        if path.exists() and not path.is_file():  # a folder, or a device, which would be replaced
            why = f"the datastore cannot be written to {path}: it is no file; give the name of one"
            raise DatastoreError(why, code="not_a_file")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_private(path, [_MAGIC, _LENGTH.pack(len(text)), text, *parts])
    except OSError as error:
        why = f"the datastore cannot be written to {path}: {reason_of(error)}"
        raise DatastoreError(why, code="cannot_write") from error
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


def _bytes_of(*arrays: Int32) -> list[memoryview]:
    return [np.ascontiguousarray(array, _FILE_TOKEN).view(np.uint8).data for array in arrays]


def _crc32(parts: Iterable[memoryview]) -> int:
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part, crc32)
    return crc32


def _read(path: Path) -> tuple[Header, Int32, Int32]:
    """Read the header, and tokens and positions, ``[n]`` each, into memory. Raises DatastoreError if it is no
    datastore, OSError, and other errors (see :meth:`Datastore.open`) if it is damaged."""
    with open_checked(path, _LARGEST) as file:
        begin = file.read(len(_MAGIC) + _LENGTH.size)
        if not begin.startswith(_MAGIC):
            raise DatastoreError(f"{path} is no datastore: moa-export datastore makes one", code="no_datastore")
        (length,) = _LENGTH.unpack(begin[len(_MAGIC) :])
        header = Header(**json.loads(file.read(min(length, _LONGEST_HEADER))))
        start, count = len(_MAGIC) + _LENGTH.size + length, header.tokens
        if not all(type(each) is int and each >= 0 for each in (header.documents, count)):
            raise ValueError("no counts")
        if os.fstat(file.fileno()).st_size != start + 2 * count * _FILE_TOKEN.itemsize:
            raise ValueError("another size")
        # Not mapped: a file that is cut while it is mapped ends the process.
        file.seek(start)
        tokens, places = np.fromfile(file, _FILE_TOKEN, 2 * count).reshape(2, count)
    return header, tokens, places


class Datastore:
    """Earlier texts in memory. Several conversations and threads may share one.

    Args:
        tokens: ``[n]``, with :data:`BOUNDARY` after each document.
        places: ``[n]``, :func:`sorted_suffixes` of them.
    """

    def __init__(self, header: Header, tokens: Int32, places: Int32) -> None:
        self.header = header
        self._tokens, self._places = tokens, places
        self._of_first = lru_cache(_RANGES_KEPT)(lambda token: self._narrowed((token,), 0, len(places)))

    @classmethod
    def open(cls, path: Path, tokenizer: str) -> Datastore:
        """Read a file and check it as a whole.

        Args:
            tokenizer: fingerprint of the tokenizer that it must have been made with.

        Raises:
            DatastoreError: there is none, it is damaged, or it was made with another tokenizer.
        """
        try:
            header, tokens, places = _read(path)
            if header.tokenizer != tokenizer:
                text = (
                    f"the datastore {path} was made with another tokenizer ({header.tokenizer}, the bundle's is "
                    f"{tokenizer}): make it again with moa-export datastore"
                )
                raise DatastoreError(text, code="other_tokenizer")
            if _crc32(_bytes_of(tokens, places)) != header.crc32:
                raise ValueError("another checksum")
        except FileNotFoundError:
            text = f"there is no datastore {path}: moa-export datastore makes one"
            raise DatastoreError(text, code="file_missing") from None
        except OSError as error:
            raise DatastoreError(
                f"the datastore {path} cannot be read: {reason_of(error)}", code="unreadable"
            ) from error
        except (ValueError, TypeError, RecursionError, struct.error) as error:
            text = f"the datastore {path} is damaged: delete it, and make it again"
            raise DatastoreError(text, code="damaged") from error
        return cls(header, tokens, places)

    def count(self, run: Sequence[int]) -> int:
        """Return how often a run of tokens occurs, in ``O(log n)`` steps; only its last :data:`LONGEST_RUN` count."""
        return len(self._range(run))

    def longest(self, text: Sequence[int], least: int = 1) -> int:
        """Return the length of the longest suffix of ``text`` that occurs, at most :data:`LONGEST_RUN`; 0 if it has
        fewer than ``least`` tokens."""
        most = min(LONGEST_RUN, len(text))
        if least > most or not self._range(text[len(text) - least :]):
            return 0
        lengths = range(least + 1, most + 1)  # a suffix of a run occurs wherever the run does
        return least + bisect_left(lengths, True, key=lambda length: not self._range(text[len(text) - length :]))

    def continuations(self, run: Sequence[int], *, most: int, length: int) -> list[list[int]]:
        """Return what followed a run in the same document, up to ``length`` tokens each: after all its occurrences, or
        after ``most``, drawn evenly from their order (as in SSSD, arXiv 2411.05894)."""
        found = self._range(run)
        step = max(1.0, len(found) / most)
        behind = min(len(run), LONGEST_RUN)
        chosen = [found[int(at * step)] for at in range(min(most, len(found)))]
        return [self._document(int(self._places[at]) + behind, length) for at in chosen]

    def followers(self, run: Sequence[int], *, most: int) -> dict[int, float]:
        """Return the tokens that followed a run, each with its share among ``most`` occurrences."""
        tokens = [token for one in self.continuations(run, most=most, length=1) for token in one]
        return {token: times / len(tokens) for token, times in Counter(tokens).items()}

    def _document(self, place: int, length: int) -> list[int]:
        tokens: list[int] = self._tokens[place : place + length].tolist()
        end = next((at for at, token in enumerate(tokens) if token < 0), length)
        return tokens[:end]

    def _range(self, run: Sequence[int]) -> range:
        """Return the indices into the sorted positions at which a run begins."""
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


def answer_encoder(tokenizer: ChatTokenizer) -> Callable[[str], list[int]]:
    """Return a function that makes an answer's document: :data:`LEAD_TOKENS` of the chat template, then the text.
    Raises ChatTemplateError if the template refuses a conversation of one question."""
    lead = tokenizer.encode_chat([{"role": "user", "content": "?"}])[-LEAD_TOKENS:]
    return lambda text: [*lead, *tokenizer.encode(text)] if text else []
