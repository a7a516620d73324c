"""Reading GGUF files: metadata, and the blocks of their tensors (the format of ggml, versions 2 and 3)."""

from __future__ import annotations

import functools
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa_decoder.errors import TargetError
from moa_runtime.checked_file import open_checked
from moa_runtime.errors import reason_of

#: A scalar, a text, a list of numbers (a numpy array) or of texts.
Value = Any
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _LIST = 8, 9
#: No vocabulary is larger; a damaged count shall not cost minutes.
_MOST_ENTRIES = 1 << 24
_MOST_DIMENSIONS = 4
_NAMED = 3
_BAD_TEXT = "bad text"
_SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


class TensorType(NamedTuple):
    """A type of ggml: numbers in a block, and its bytes."""

    name: str
    block: int
    size: int


_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class Texts:
    """A list of texts in a file's metadata, not read yet."""

    file: GgufFile
    count: int
    start: int

    def read(self) -> list[str]:
        """Return the texts. Raises TargetError (``damaged``) if one is no UTF-8."""
        cursor = _Cursor(self.file, self.start)
        try:
            return [cursor.text() for _ in range(self.count)]
        except UnicodeDecodeError as error:
            raise self.file.damaged(_BAD_TEXT) from error


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        shape: the last dimension is the one whose numbers are neighbours.
        start: of its first byte in the file.
    """

    file: GgufFile
    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def row_size(self) -> int:
        """Bytes of a row: of all numbers of the last dimension."""
        return self.shape[-1] // self.type.block * self.type.size

    @property
    def size(self) -> int:
        """Bytes."""
        rows = 1
        for length in self.shape[:-1]:
            rows *= length
        return rows * self.row_size

    def blocks(self) -> NDArray[np.uint8]:
        """Map the blocks, uint8 ``[rows, row_size]``, read-only."""
        return np.frombuffer(self.file.data, np.uint8, self.size, self.start).reshape(-1, self.row_size)


class GgufFile:
    """A GGUF file, mapped into memory. Lists of texts (the vocabulary) are skipped until they are read.

    Attributes:
        metadata: by key.
        tensors: by name.

    Raises:
        TargetError: ``unreadable``, or ``damaged``, which files of other formats and versions are as well.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_checked(path) as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise self.damaged("it is empty") from error
        except OSError as error:
            raise TargetError(f"{path} cannot be read: {reason_of(error)}", code="unreadable") from error
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise self.damaged("its header ends early" if isinstance(error, struct.error) else _BAD_TEXT) from error

    def damaged(self, why: str) -> TargetError:
        """Return the error for a file that breaks the format."""
        return TargetError(f"{self.path.name} is damaged, or no GGUF file ({why}): fetch it again", code="damaged")

    def _read_header(self) -> None:
        cursor = _Cursor(self)
        if self.data[:4] != b"GGUF":
            raise self.damaged("it does not begin with GGUF")
        cursor.at = 4
        version = cursor.number("<I")
        if version not in _VERSIONS:
            raise self.damaged(f"its version is {version}, not 2 or 3")
        tensors, entries = cursor.count("<Q"), cursor.count("<Q")
        for _ in range(entries):
            key = cursor.text()
            if key in self.metadata:
                raise self.damaged(f"{key[:60]!r} is there twice")
            self.metadata[key] = cursor.value(cursor.number("<I"))
        found = [self._tensor_at(cursor) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"its alignment is {alignment!r:.20}")
        start = -(-cursor.at // alignment) * alignment
        for name, kind, shape, offset in found:
            tensor = Tensor(self, name, kind, shape, start + offset)
            if tensor.start + tensor.size > len(self.data):
                raise self.damaged(f"{name[:60]!r} reaches {tensor.start + tensor.size - len(self.data)} bytes past it")
            if name in self.tensors:
                raise self.damaged(f"{name[:60]!r} is there twice")
            self.tensors[name] = tensor

    def _tensor_at(self, cursor: _Cursor) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = cursor.text()
        dimensions = cursor.number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self.damaged(f"{name[:60]!r} has {dimensions} dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
        kind = _TYPES.get(number := cursor.number("<I"))
        if kind is None:
            raise TargetError(f"{self.path.name} has tensors of the unknown type {number}", code="unsupported_type")
        if 0 in shape or shape[-1] % kind.block:
            raise self.damaged(f"{name[:60]!r} has the shape {list(shape)}")
        return name, kind, shape, cursor.number("<Q")


class _Cursor:
    """A place in a file's header. Reading past the end raises struct.error."""

    def __init__(self, file: GgufFile, at: int = 0) -> None:
        self._file, self._data, self.at = file, file.data, at

    def number(self, kind: str) -> Any:
        (number,) = struct.unpack_from(kind, self._data, self.at)
        self.at += struct.calcsize(kind)
        return number

    def count(self, kind: str) -> int:
        """Read a number of entries, each of which takes at least a byte."""
        count: int = self.number(kind)
        if count > min(_MOST_ENTRIES, len(self._data) - self.at):
            raise self._file.damaged(f"it counts {count} entries")
        return count

    def text(self) -> str:
        length = self.number("<Q")
        if length > len(self._data) - self.at:
            raise self._file.damaged(f"a text has {length} bytes")
        self.at += length
        return self._data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Value:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise self._file.damaged(f"its metadata has the unknown type {kind}")
        items, count = self.number("<I"), self.count("<Q")
        if items in _SCALARS:
            numbers = np.dtype(_SCALARS[items])
            if count * numbers.itemsize > len(self._data) - self.at:
                raise self._file.damaged(f"a list has {count} numbers")
            self.at += count * numbers.itemsize
            return np.frombuffer(self._data, numbers, count, self.at - count * numbers.itemsize)
        if items != _TEXT:
            raise self._file.damaged(f"its metadata has lists of the type {items}")
        texts = Texts(self._file, count, self.at)
        self._skip_texts(count)
        return texts

    def _skip_texts(self, count: int) -> None:
        data, at, end, length_at = self._data, self.at, len(self._data), struct.Struct("<Q").unpack_from
        for _ in range(count):  # hundreds of thousands: nothing is done twice here
            at += 8 + length_at(data, at)[0]
            if at > end:
                raise self._file.damaged("a text of a list reaches past it")
        self.at = at


def is_gguf(file: Path) -> bool:
    """Return whether a file's name is that of a GGUF file, in any case."""
    return file.suffix.lower() == _SUFFIX


def parts_of(file: Path) -> list[Path]:
    """Find all parts of a GGUF file, in order, by the name of any. Raises TargetError with the code
    ``part_missing``."""
    named = _PART.fullmatch(file.name)
    count = int(named["count"]) if named else 0
    if named is None or not 1 <= int(named["number"]) <= count:
        return [file]
    of = f"-of-{count:05}{file.suffix}"
    parts = [file.with_name(f"{named['stem']}-{number:05}{of}") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise TargetError(
            f"{file.name} is one of {count} parts of a model, of which {len(missing)} are missing: "
            f"{', '.join(missing[:_NAMED])}; put all parts into {file.parent}",
            code="part_missing",
        )
    return parts


def _opened(path: Path) -> GgufFile:
    """Open a file, or return what was read of it before if it is the same still: a start reads a header five times."""
    try:
        state = path.stat()
    except OSError:
        return GgufFile(path)  # whose error names it
    return _read_once(path, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read_once(path: Path, *identity: int) -> GgufFile:
    return GgufFile(path)


def read_parts(parts: Sequence[Path]) -> list[GgufFile]:
    """Open the parts of a GGUF file. Raises TargetError: see :class:`GgufFile`; ``part_misplaced`` if a name and its
    file disagree; ``damaged`` if two parts have the same tensor."""
    files: list[GgufFile] = []
    names: set[str] = set()
    for number, part in enumerate(parts):
        file = _opened(part)
        # A file that was not split has neither field.
        found = (file.metadata.get("split.no", 0), file.metadata.get("split.count", 1))
        if not all(type(field) is int for field in found):
            raise file.damaged("its split.no or split.count is no number")
        if found != (number, len(parts)):
            raise TargetError(
                f"{part.name} holds part {found[0] + 1} of {found[1]}, not part {number + 1} of {len(parts)}: give it "
                f"the name it had, ending in -{found[0] + 1:05}-of-{found[1]:05}.gguf",
                code="part_misplaced",
            )
        if both := names & file.tensors.keys():
            raise file.damaged(f"{min(both)[:60]!r} is in another part as well")
        names |= file.tensors.keys()
        files.append(file)
    return files
