"""Reading safetensors files: the header, and tensors as float32 (format: huggingface/safetensors)."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_decoder.errors import TargetError
from moa_decoder.matrix import Float32
from moa_runtime.checked_file import open_checked
from moa_runtime.errors import reason_of

_LARGEST_HEADER = 100_000_000
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its type in the words of the format, its shape, and the place of its bytes."""

    file: SafetensorsFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def first_row(self) -> bytes:
        """Return the bytes of the first row; of all if it has no dimension."""
        rows = self.shape[0] if self.shape else 1
        return self.file.data[self.start : self.start + (self.stop - self.start) // max(rows, 1)]

    def numbers(self, rows: slice | NDArray[np.int64] = slice(None)) -> Float32:
        """Return some rows (all) as float32. Raises TargetError (``unsupported_type``) for other types than F32, F16
        and BF16."""
        if self.dtype not in _SIZES:
            raise TargetError(
                f"{self.file.path.name} has {self.name[:60]!r} in the type {self.dtype[:20]}: expected "
                f"{', '.join(_SIZES)}",
                code="unsupported_type",
            )
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[self.dtype]
        mapped = np.frombuffer(self.file.data, kind, prod(self.shape), self.start).reshape(self.shape)[rows]
        if self.dtype == "BF16":
            return (mapped.astype(np.uint32) << 16).view(np.float32)
        return mapped.astype(np.float32)


class SafetensorsFile:
    """A safetensors file, mapped into memory.

    Attributes:
        tensors: by name.

    Raises:
        TargetError: ``unreadable``, or ``damaged``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        try:
            with open_checked(path) as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for name, entry in self._header().items():
                if name != "__metadata__":
                    self.tensors[name] = self._tensor(name, entry)
        except OSError as error:
            raise TargetError(f"{path} cannot be read: {reason_of(error)}", code="unreadable") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise TargetError(f"{path} is damaged: fetch it again, or remove it", code="damaged") from error

    def _header(self) -> Mapping[str, Any]:
        length = int.from_bytes(self.data[:8], "little")
        if not 2 <= length <= min(_LARGEST_HEADER, len(self.data) - 8):
            raise ValueError("the header does not fit")
        self._start = 8 + length
        header: Mapping[str, Any] = json.loads(self.data[8 : self._start])
        return header

    def _tensor(self, name: str, entry: Mapping[str, Any]) -> StoredTensor:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
            raise ValueError("a size is no number")
        size = _SIZES.get(dtype)
        if not start <= stop <= len(self.data) - self._start or (size and stop - start != size * prod(shape)):
            raise ValueError("a tensor does not fit")
        return StoredTensor(self, name, dtype, tuple(shape), self._start + start, self._start + stop)
