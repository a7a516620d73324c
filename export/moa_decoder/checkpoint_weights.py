"""The weights of a folder with config.json and safetensors, as they are or rounded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moa_decoder.errors import TargetError
from moa_decoder.families import has_tied_head, norm_offset, spec_of_config, tensor_names
from moa_decoder.matrix import Float32, Matrix
from moa_decoder.rounding import rounded
from moa_decoder.safetensors_file import SafetensorsFile, StoredTensor
from moa_decoder.spec import DecoderSpec
from moa_decoder.tensor_layout import TensorLayout
from moa_decoder.text_part import is_multimodal, text_config, text_name
from moa_decoder.weight_faults import WEIGHTS_DIFFER, WeightFaults
from moa_decoder.weights import LayerMatrix, LayerVector
from moa_runtime.checked_file import read_checked

WEIGHT_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Ends of names of tensors that are computed from the configuration, and that some checkpoints hold.
_COMPUTED = ("rotary_emb.inv_freq",)


class CheckpointWeights:
    """The :class:`moa_decoder.weights.DecoderWeights` of a folder.

    Args:
        bits: of matrices; 4 and 8 are rounded (:mod:`moa_decoder.rounding`), but embedding and head have 8 at least.
            Vectors, and what :meth:`embed` returns, stay as they are.

    Raises:
        TargetError: see :func:`read_config`, :func:`weight_files`, :func:`moa_decoder.families.spec_of_config` and
            :class:`moa_decoder.safetensors_file.SafetensorsFile`; ``weights_differ`` if tensors are missing,
            superfluous or of another shape.
    """

    def __init__(self, folder: Path, bits: Literal[4, 8, 32] = 32) -> None:
        self.bits = bits
        config = read_config(folder)
        self._spec = spec_of_config(config)
        self._norm_offset = np.float32(norm_offset(config))
        tied, names = has_tied_head(config), tensor_names(config)
        self._layout = TensorLayout(self._spec, names, tied=tied)
        files = [SafetensorsFile(path) for path in weight_files(folder)]
        self._tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        if is_multimodal(checkpoint_config(folder)):
            own = {text_name(name): tensor for name, tensor in self._tensors.items()}
            self._tensors = {name: tensor for name, tensor in own.items() if name is not None}
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
    """Read a folder's config.json; of a multimodal model the part for text. Raises TargetError (``unreadable``)."""
    config = checkpoint_config(folder)
    if not is_multimodal(config):
        return config
    heads = [name for name in stored_tensors(folder) if (text_name(name) or "").startswith("lm_head.")]
    return {**text_config(config), "tie_word_embeddings": not heads}  # what both parts say of it may differ


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json as it is. Raises TargetError (``unreadable``)."""
    try:
        config = json.loads(read_checked(folder / "config.json"))
        if not isinstance(config, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"the config.json in {folder} is unreadable: fetch it again", code="unreadable") from error
    return config


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
            :class:`moa_decoder.safetensors_file.SafetensorsFile`.
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
