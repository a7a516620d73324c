"""Making a datastore of documents."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from moa_runtime.datastore.file import BOUNDARY, Header, as_parts, write_file
from moa_runtime.datastore.suffixes import sorted_suffixes

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
