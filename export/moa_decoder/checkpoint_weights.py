"""The weights of a folder with config.json and safetensors (huggingface/safetensors), as they are or rounded."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moa_decoder.checkpoint_fields import read_fields
from moa_decoder.errors import TargetError
from moa_decoder.families import has_tied_head, norm_offset, spec_of_config, tensor_names
from moa_decoder.matrix import Float32, Matrix
from moa_decoder.rounding import rounded
from moa_decoder.spec import DecoderSpec
from moa_decoder.tensor_layout import TensorLayout
from moa_decoder.text_part import is_multimodal, text_config, text_name
from moa_decoder.weight_faults import WEIGHTS_DIFFER, WeightFaults
from moa_decoder.weights import LayerMatrix, LayerVector
from moa_runtime.checked_file import open_checked, read_checked
from moa_runtime.errors import reason_of

WEIGHT_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Ends of names of tensors that are computed from the configuration, and that some checkpoints hold.
_COMPUTED = ("rotary_emb.inv_freq",)
_LARGEST_HEADER = 100_000_000
_COMPARED_ROWS = 4096
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


def _differ(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors have another shape or other numbers; they are read in parts."""
    if one.shape != other.shape or not one.shape:
        return one.shape != other.shape
    parts = [slice(start, start + _COMPARED_ROWS) for start in range(0, one.shape[0], _COMPARED_ROWS)]
    return any((one.numbers(rows) != other.numbers(rows)).any() for rows in parts)


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


class CheckpointWeights:
    """The :class:`moa_decoder.weights.DecoderWeights` of a folder.

    Args:
        bits: of matrices; 4 and 8 are rounded (:mod:`moa_decoder.rounding`), but embedding and head have 8 at least.
            Vectors, and what :meth:`embed` returns, stay as they are.

    Raises:
        TargetError: see :func:`read_config`, :func:`weight_files`, :func:`moa_decoder.families.spec_of_config` and
            :class:`SafetensorsFile`; ``weights_differ`` if tensors are missing,
            superfluous or of another shape.
    """

    def __init__(self, folder: Path, bits: Literal[4, 8, 32] = 32) -> None:
        self.bits = bits
        config = read_config(folder)
        self._spec = spec_of_config(config)
        self._norm_offset = np.float32(norm_offset(config))
        names = tensor_names(config)
        files = [SafetensorsFile(path) for path in weight_files(folder)]
        self._tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        if is_multimodal(checkpoint_config(folder)):
            own = {text_name(name): tensor for name, tensor in self._tensors.items()}
            self._tensors = {name: tensor for name, tensor in own.items() if name is not None}
        head, embedding = (self._tensors.get(names[role]) for role in ("head", "embedding"))
        # As in transformers 5, a head beside the embedding is the same tensor once more, or the configuration is wrong.
        tied = has_tied_head(config) and not (head and embedding and _differ(head, embedding))
        self._layout = TensorLayout(self._spec, names, tied=tied)
        ignored = {name for name in self._tensors if name.endswith(_COMPUTED) or (tied and name == names["head"])}
        held = {name: tensor.shape for name, tensor in self._tensors.items() if name not in ignored}
        if faults := WeightFaults.between(held, self._layout.shapes):
            raise TargetError(
                f"the weights in {folder} are not those of its config.json: {faults}; fetch the target again",
                code=WEIGHTS_DIFFER,
            )

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix:
        """See :class:`moa_decoder.weights.DecoderWeights`. Raises TargetError: ``unsupported_group``,
        ``unsupported_type``."""
        tensor, rows = self._layout.place(layer, name)
        return rounded(self._tensors[tensor].numbers(rows), self.bits)

    def vector(self, layer: int, name: LayerVector) -> Float32:
        tensor, rows = self._layout.place(layer, name)
        numbers = self._tensors[tensor].numbers(rows)
        return numbers + self._norm_offset if name.endswith("norm") else numbers

    def head(self) -> Matrix:
        return self._table(self._layout.head)

    def head_bias(self) -> Float32:
        return self._tensors["lm_head.bias"].numbers()

    def last_norm(self) -> Float32:
        return self._tensors[self._layout.last_norm].numbers() + self._norm_offset

    def embedding(self) -> Matrix:
        return self._table(self._layout.embedding)

    def embed(self, tokens: Sequence[int]) -> Float32:
        rows = self._tensors[self._layout.embedding].numbers(np.asarray(tokens, np.int64))
        return rows * np.float32(self._spec.embedding_scale)

    def _table(self, name: str) -> Matrix:
        return rounded(self._tensors[name].numbers(), max(self.bits, 8))


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json, see :func:`checkpoint_config`; of a multimodal model the part for text."""
    config = checkpoint_config(folder)
    if not is_multimodal(config):
        return config
    heads = [name for name in stored_tensors(folder) if (text_name(name) or "").startswith("lm_head.")]
    return {**text_config(config), "tie_word_embeddings": not heads}  # what both parts say of it may differ


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json as it is; for errors see :func:`moa_decoder.checkpoint_fields.read_fields`."""
    return read_fields(folder / "config.json")


def weight_names(folder: Path) -> list[str]:
    """Return the names of a model's safetensors files, as its index names them if it has one.

    Raises:
        TargetError: ``unreadable`` if the index is.
    """
    if not (folder / WEIGHT_INDEX).is_file():
        return [_SINGLE]
    try:
        listed: Mapping[str, str] = json.loads(read_checked(folder / WEIGHT_INDEX))["weight_map"]
        return [Path(name).name for name in sorted(set(listed.values()))]
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise TargetError(f"{folder / WEIGHT_INDEX} is unreadable: fetch it again", code="unreadable") from error


def weight_files(folder: Path) -> list[Path]:
    """Find a model's safetensors files. Raises TargetError: ``file_missing``; see :func:`weight_names`."""
    files = [folder / name for name in weight_names(folder)]
    if missing := [file.name for file in files if not file.is_file()]:
        if not any(folder.glob("*.safetensors")):
            raise _without_safetensors(folder)
        raise TargetError(f"{folder} has no {missing[0]}: fetch the target again", code="file_missing")
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model by name; without index and model.safetensors those of all files.

    Raises:
        TargetError: ``file_missing`` if there is none; see :func:`weight_files` and
            :class:`SafetensorsFile`.
    """
    if (folder / WEIGHT_INDEX).is_file() or (folder / _SINGLE).is_file():
        files = weight_files(folder)
    else:
        # macOS writes files with a leading dot beside others on foreign disks.
        files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    if not files:
        raise _without_safetensors(folder)
    return {name: tensor for file in files for name, tensor in SafetensorsFile(file).tensors.items()}


def _without_safetensors(folder: Path) -> TargetError:
    return TargetError(
        f"{folder} has no weights in the format safetensors: take a checkpoint that has, or load the model in "
        "transformers once and save it with save_pretrained",
        code="file_missing",
    )
