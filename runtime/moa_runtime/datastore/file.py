"""The datastore's file.

========  ======================================================================================================
bytes     what
========  ======================================================================================================
8         ``MOADATA1``
4         length of the header, little-endian
...       the header: :class:`Header` as JSON, with spaces up to a multiple of 64
4 each    the tokens, int32 little-endian: documents one behind the other, :data:`BOUNDARY` behind each
4 each    as many places, int32 little-endian: :func:`~moa_runtime.datastore.suffixes.sorted_suffixes` of the tokens
========  ======================================================================================================
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from moa_runtime.atomic_file import replace_private
from moa_runtime.datastore.suffixes import Int32
from moa_runtime.errors import MoaError, reason_of

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
