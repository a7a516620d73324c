"""The manifest of a bundle, ``manifest.json``: facts that a reader needs before it opens another file.

``manifest.schema.json`` beside this file says the same as a JSON Schema, for readers in other languages.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from moa_runtime.checked_file import digest_of, open_checked, read_checked_text
from moa_runtime.errors import MoaError, printable, reason_of
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.options import WITHOUT_GRAPH

SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
#: Folder of a bundle with the licences of target and drafter, in a folder for each, which travel with the bundle.
LICENCES = "licenses"
_LARGEST_MANIFEST = 1 << 24
_WRITERS = ("writer", "web_writer", "executorch_writer", "coreml_writer")


@dataclass(frozen=True)
class RecommendedSampling:
    """Sampling that the target's authors recommend for chats; raises ValueError for a number out of range."""

    temperature: float  # 0 is greedy
    top_p: float = 1.0  # 1 is no limit

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise ValueError(f"a temperature is 0 or more and top_p above 0 and at most 1, not {self}")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RecommendedSampling:
        """Read the fields; raise KeyError, TypeError or ValueError if they are malformed."""
        return cls(float(raw["temperature"]), float(raw["top_p"]))


class BundleError(MoaError):
    """A folder that is no bundle, or one that is damaged or too new; the message names the file."""


@dataclass(frozen=True)
class Fingerprints:
    """Identities that client and server compare, hexadecimal; ``drafter`` is empty without memory rows."""

    target: str
    tokenizer: str
    drafter: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph; a symbol such as ``"T"`` stands for a size that varies."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class TargetEntry:
    """One graph.

    Attributes:
        file: the graph, a file or a folder, relative to the bundle.
        states: tensors that it keeps between calls.
        details: facts for its user, in plain values: oldest system, delegated operators, functions.
        checks: comparisons with PyTorch by name: a ``status`` (``passed``, ``failed``, ``not run``), a ``reason`` for
            the latter two, and figures.
    """

    file: str
    bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[TensorSpec, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    checks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def top_k(self) -> int:
        """Candidates that a writer's step gives. Raises ValueError if its outputs do not tell."""
        shapes = [spec.shape for spec in self.outputs if spec.name == "top_tokens"]
        return _size(shapes[0], 1) if shapes else _size((), 0)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Key-value heads of all layers of a writer together, and numbers of a head. Raises ValueError if its inputs do
        not tell."""
        shapes = [spec.shape for spec in self.inputs if spec.name.partition(".")[0] == "self_keys"]
        return sum(_size(shape, 1) for shape in shapes), _size(shapes[0] if shapes else (), -1)


def _size(shape: Sequence[Any], axis: int) -> int:
    """Return a fixed size of a tensor; raise ValueError if it has none."""
    if len(shape) < 2 or not checked_count(shape[axis]):
        raise ValueError(f"a tensor of shape {shape} has no fixed size {axis}")
    return int(shape[axis])


@dataclass(frozen=True)
class FileEntry:
    """SHA-256 (hexadecimal) and size of one file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Facts that a reader of the bundle needs before it opens another file.

    Attributes:
        target: the target's name, for messages; ``fingerprints.target`` is its identity.
        target_parameters: numbers of its weights, for messages; 0 if they are not known.
        kv_heads, head_dim: shape of one cache entry and of a memory row's key and value; 0 without a graph, as are
            ``top_k`` and ``draft_vocab_size``.
        stop_tokens: ids that end the assistant's turn.
        special_tokens: texts that the chat template may name, such as ``{"eos_token": "<|im_end|>"}``.
        recipe: how the weights were rounded and what may be lost, in plain values; empty without a graph.
        tools: versions of the packages that made the bundle.
        targets: the graphs by name (``"onnx"``, ``"coreml-stateless"``).
        files: every file of the bundle but the manifest, by path relative to it.
        writer: the graph of a whole model that writes while there is no verifier, or None. Its ``details`` name the
            model, its bits, and ``max_context``, the positions it was trained for.
        web_writer, executorch_writer, coreml_writer: the same for onnxruntime-web, ExecuTorch and Core ML.
        manners: when the drafter stops if it writes offline; None if it was not fitted.
        architecture: of the drafter, as ``moa-train --arch`` names it; one of
            :data:`moa_runtime.options.WITHOUT_GRAPH` in a bundle without a graph.
    """

    fingerprints: Fingerprints
    target: str
    kv_heads: int
    head_dim: int
    top_k: int
    vocab_size: int
    draft_vocab_size: int
    max_context: int
    stop_tokens: tuple[int, ...]
    special_tokens: Mapping[str, str]
    recipe: Mapping[str, Any]
    tools: Mapping[str, str]
    targets: Mapping[str, TargetEntry]
    files: Mapping[str, FileEntry]
    writer: TargetEntry | None = None
    web_writer: TargetEntry | None = None
    executorch_writer: TargetEntry | None = None
    coreml_writer: TargetEntry | None = None
    manners: StoppingRule | None = None
    sampling: RecommendedSampling | None = None
    architecture: str = "moa"
    target_parameters: int = 0
    schema_version: int = SCHEMA_VERSION

    @property
    def has_rows(self) -> bool:
        """Whether the drafter reads memory rows; the others read the tokens alone."""
        return self.architecture in ("moa", "eagle3")

    @property
    def has_graph(self) -> bool:
        """Whether the bundle is made for a drafter with a graph; others copy, or leave drafting to the verifier."""
        return self.architecture not in WITHOUT_GRAPH

    @property
    def writers(self) -> dict[str, TargetEntry]:
        """The writer's graphs, by the names of their fields."""
        named = {name: getattr(self, name) for name in _WRITERS}
        return {name: entry for name, entry in named.items() if entry is not None}

    @property
    def stopping_rule(self) -> StoppingRule:
        """``manners``, by default those of the built-in drafter. Other drafters are wrong more often than right without
        a verifier, as the fits of the shipped ones say: they write nothing."""
        return self.manners or (StoppingRule() if self.architecture == "moa" else StoppingRule(longest=0))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse what :meth:`to_json` wrote; raise BundleError if it has another version, or a field is malformed."""
        try:
            raw = json.loads(text)
            version = raw["schema_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"no JSON from line {error.lineno} on" if isinstance(error, json.JSONDecodeError) else "another file"
            text = f"{MANIFEST_FILE} is no bundle manifest ({why}): export the bundle again"
            raise BundleError(text, code="damaged") from error
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"the bundle has schema version {version!r}, this moa-edge reads version {SCHEMA_VERSION}: "
                "upgrade moa-edge, or export the bundle again",
                code="unknown_version",
            )
        manifest = cls(**{name: _part(raw, name) for name in _PARTS})
        # A file that a reader opens must be among those that are checked.
        needed = [TOKENIZER_FILE, CHAT_TEMPLATE_FILE, *(entry.file for entry in manifest.targets.values())]
        needed += [writer.file for writer in manifest.writers.values()]
        listed = {
            *manifest.files,
            *(str(folder) for name in manifest.files for folder in PurePosixPath(name).parents[:-1]),
        }
        if unlisted := [name for name in needed if name not in listed]:
            raise _malformed(f"files does not list {unlisted[0]!r}")
        return manifest


def _malformed(why: str) -> BundleError:
    return BundleError(f"{MANIFEST_FILE} is malformed ({why}): export the bundle again", code="damaged")


def _part(raw: Mapping[str, Any], name: str) -> Any:
    """Return a field of the manifest; raise BundleError if it is missing or malformed."""
    value = raw.get(name)
    if value is None and name in _OPTIONAL:
        return _OPTIONAL[name]
    if name not in raw:
        raise _malformed(f"it lacks {name!r}")
    try:
        return _PARTS[name](value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _malformed(f"{name!r} is not of the form that an export writes") from error


def checked_count(value: Any) -> int:
    """Return a value of a JSON file; raise ValueError if it is no whole number, 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(text) for name, text in value.items()}


def _target(raw: dict[str, Any]) -> TargetEntry:
    tensors = {
        part: tuple(TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"])) for spec in raw[part])
        for part in ("inputs", "outputs", "states")
    }
    return TargetEntry(**{**raw, **tensors, "file": _text(raw["file"])})


def _writer(raw: dict[str, Any]) -> TargetEntry:
    entry = _target(raw)
    checked_count(entry.details["max_context"])
    return entry


def _own_writer(raw: dict[str, Any]) -> TargetEntry:
    """Read a writer that the Python runtime runs."""
    entry = _writer(raw)
    _ = entry.top_k, entry.kv_shape  # raise ValueError
    return entry


def _executorch_writer(raw: dict[str, Any]) -> TargetEntry:
    entry = _own_writer(raw)
    most, window = entry.details["most"], entry.details["window"]
    if not all(checked_count(most[size]) for size in "TQS") or (window is not None and not checked_count(window)):
        raise ValueError(f"{most} and {window} are no bounds")
    return entry


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or set(name) & {"\\", ":"} or name in ("", MANIFEST_FILE):
        raise _malformed(f"file name {name!r} leaves the bundle")
    if name == "." or str(path) != name or not name.isprintable():
        raise _malformed(f"{name!r} is no file name that every system takes")
    return name


#: Values of fields that are missing or null.
_OPTIONAL = {**dict.fromkeys((*_WRITERS, "manners", "sampling")), "architecture": "moa", "target_parameters": 0}
#: Readers of the fields.
_PARTS: Mapping[str, Callable[[Any], Any]] = {
    "fingerprints": lambda raw: Fingerprints(**_texts(raw)),
    "target": lambda raw: printable(_text(raw)),
    **dict.fromkeys(("kv_heads", "head_dim", "top_k", "vocab_size", "draft_vocab_size", "max_context"), checked_count),
    "stop_tokens": lambda raw: tuple(checked_count(token) for token in raw),
    "special_tokens": _texts,
    "recipe": dict,
    "tools": _texts,
    "targets": lambda raw: {name: _target(entry) for name, entry in raw.items()},
    **dict.fromkeys(_WRITERS, _writer),
    "writer": _own_writer,
    "executorch_writer": _executorch_writer,
    "manners": lambda raw: StoppingRule(float(raw["least_probability"]), int(raw["repeated"]), int(raw["longest"])),
    "sampling": RecommendedSampling.from_json,
    "architecture": _text,
    "target_parameters": checked_count,
    "files": lambda raw: {
        _checked_name(name): FileEntry(_text(entry["sha256"]), checked_count(entry["bytes"]))
        for name, entry in raw.items()
    },
}


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a bundle without checking its files; raise BundleError if it cannot be read."""
    try:
        text = read_checked_text(folder / MANIFEST_FILE, _LARGEST_MANIFEST, folder)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it has no {MANIFEST_FILE}" if folder.is_dir() else "there is no such folder"
        if isinstance(error, UnicodeDecodeError):
            reason = f"its {MANIFEST_FILE} cannot be read"
        elif folder.is_dir() and not isinstance(error, FileNotFoundError):
            reason = f"its {MANIFEST_FILE} cannot be read ({reason_of(error)})"
        raise BundleError(f"{folder} is no bundle: {reason}; make one with moa-export", code="no_bundle") from error
    return Manifest.from_json(text)


def checked_manifest(folder: Path) -> Manifest:
    """Read the manifest of a bundle and check every file's SHA-256.

    Raises:
        BundleError: there is no bundle, it has another schema version, or a file is missing or changed.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        try:
            with open_checked(folder / name, inside=folder) as file:
                same = os.fstat(file.fileno()).st_size == entry.bytes and digest_of(file) == entry.sha256
        except FileNotFoundError as error:
            text = f"the bundle {folder} lacks its file {name}: export or copy it again"
            raise BundleError(text, code="file_missing") from error
        except OSError as error:
            text = f"{name} in the bundle {folder} cannot be used: {reason_of(error)}; export or copy it again"
            raise BundleError(text, code="unreadable") from error
        if not same:
            raise BundleError(
                f"{name} in the bundle {folder} was changed: its SHA-256 is not the one in {MANIFEST_FILE}; "
                "export or copy the bundle again",
                code="damaged",
            )
    return manifest
