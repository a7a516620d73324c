"""From a MIL program to an ``.mlpackage`` that Xcode shows as a documented model."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import coremltools as ct
from coremltools.converters.mil.backend.mil.load import load as as_specification
from coremltools.converters.mil.mil import Program

AUTHOR = "The moa-edge authors"
LICENSE = (
    "Apache-2.0. The token embedding and the draft head are taken from the target model and stay under its licence."
)
#: What Xcode shows beside each input, output and state.
FEATURES = {
    "tokens": "Ids of new tokens in the target's vocabulary. Fill up with any id where there are fewer.",
    "positions": "Absolute position of each token in the conversation.",
    "slot": "Where in the cache the first new entry is written; the cache must have room for all of the call.",
    "self_mask": "0 where a token (row) may look at a cache entry (column), -10000 elsewhere.",
    "memory_mask": "0 for each memory row in use, -10000 for the others. At least one must be in use.",
    "self_keys": "Self-attention keys of earlier tokens: [1, heads, positions, head size].",
    "self_values": "Self-attention values of earlier tokens: [1, heads, positions, head size].",
    "memory_keys": "Keys of the memory rows that the server sent: [1, heads, rows, head size].",
    "memory_values": "Values of the memory rows that the server sent: [1, heads, rows, head size].",
    "new_keys": "Keys of memory rows to store: [1, heads, rows, head size].",
    "new_values": "Values of memory rows to store: [1, heads, rows, head size].",
    "top_tokens": "For each new token the most probable next ones, best first, as ids of the target's vocabulary.",
    "top_logprobs": "Their natural log-probabilities over the draft vocabulary.",
    "keys": "Self-attention keys of the new tokens: [1, heads, tokens, head size].",
    "values": "Self-attention values of the new tokens: [1, heads, tokens, head size].",
    "next_slot": "The slot after the last entry written.",
}


def write_package(program: Program, path: Path, opset: ct.target, description: str, facts: Mapping[str, str]) -> Any:
    """Write ``program`` as an ``.mlpackage``. The same program gives the same bytes.

    Args:
        path: the package's folder, which must not exist yet.
        opset: the oldest system that it is for.
        description: what the model does, for Xcode's model page.
        facts: further metadata, by name.

    Returns:
        the model's specification, a protocol buffer ``Model`` as Core ML defines it.
    """
    # The program is what it should be: coremltools' passes would only rename and fuse operators.
    program.skip_all_passes = True
    with tempfile.TemporaryDirectory() as weights:
        specification = as_specification(program, weights, specification_version=opset.value)
        _describe(specification, description, facts)
        ct.models.utils.save_spec(specification, str(path), weights_dir=weights)
    # Which entry comes first in a stored map is otherwise decided anew each time.
    model_file(path).write_bytes(specification.SerializeToString(deterministic=True))
    _fix_identifiers(path / "Manifest.json")
    return specification


def model_file(package: Path) -> Path:
    """The specification inside a package."""
    return package / "Data" / "com.apple.CoreML" / "model.mlmodel"


def weights_folder(package: Path) -> Path:
    """The folder of ``weight.bin`` inside a package."""
    return package / "Data" / "com.apple.CoreML" / "weights"


def _describe(specification: Any, description: str, facts: Mapping[str, str]) -> None:
    model = specification.description
    model.metadata.shortDescription = description
    model.metadata.author = AUTHOR
    model.metadata.license = LICENSE
    model.metadata.versionString = version("moa-edge")
    model.metadata.userDefined.update({**facts, "coremltools": ct.__version__})
    for function in model.functions or [model]:
        _describe_features([*function.input, *function.output, *function.state])


def _describe_features(features: Iterable[Any]) -> None:
    for feature in features:
        feature.shortDescription = FEATURES[feature.name]


def _fix_identifiers(manifest: Path) -> None:
    """Replace the random identifiers of a package's items by ones that follow from their paths."""
    content = json.loads(manifest.read_text())
    new = {
        old: str(uuid.uuid5(uuid.NAMESPACE_URL, item["path"])).upper()
        for old, item in content["itemInfoEntries"].items()
    }
    content["itemInfoEntries"] = {new[old]: item for old, item in content["itemInfoEntries"].items()}
    content["rootModelIdentifier"] = new[content["rootModelIdentifier"]]
    manifest.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n")
