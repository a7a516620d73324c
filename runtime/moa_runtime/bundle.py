"""The bundle: the folder that ``moa-export`` writes and the runtime loads, described by ``manifest.json``.

The manifest's format is defined here once; exporter, runtime and server share it. ``manifest.schema.json`` beside
this file says the same as a JSON Schema, for readers in other languages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from moa_runtime.errors import MoaError
from moa_runtime.manners import Manners

SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


class BundleError(MoaError):
    """A folder that is no bundle, or one that is damaged or too new; the message names the file."""


@dataclass(frozen=True)
class Fingerprints:
    """Identities that client and server compare before they talk; hexadecimal strings.

    ``drafter`` is empty where no memory rows are used.
    """

    target: str
    tokenizer: str
    drafter: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of the graph; a size that varies is named by a symbol such as ``"T"``."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class TargetEntry:
    """One graph.

    Attributes:
        file: the graph, a file or a folder, relative to the bundle.
        bytes: its size.
        inputs, outputs: its signature, in order.
        states: tensors it keeps between calls.
        details: what its user should know, in plain values: least system, delegated operators, functions.
        checks: by name, how it was compared with PyTorch: a ``status`` (``passed``, ``failed``, ``not run``),
            a ``reason`` for the latter two, and figures.
    """

    file: str
    bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[TensorSpec, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    checks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class FileEntry:
    """Digest (SHA-256, hexadecimal) and size of one file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Everything a reader of the bundle needs to know before it opens another file.

    Attributes:
        target: the target's name, for messages; ``fingerprints.target`` is its identity.
        kv_heads, head_dim: shape of one cache entry and of a memory row's key and value.
        stop_tokens: ids that end the assistant's turn.
        special_tokens: the texts a chat template may name, such as ``{"eos_token": "<|im_end|>"}``.
        recipe: how the weights were rounded and what may be lost, in plain values.
        tools: versions of what made the bundle, by package.
        targets: the graphs, by name (``"onnx"``, ``"coreml-stateless"``).
        files: every file of the bundle but the manifest, by path relative to it.
        writer: the graph of a whole model, which the device writes with while it has no verifier; None without one.
        web_writer: the same for onnxruntime-web.
            Its ``details`` name the model, its bits, and ``max_context``, the positions it was trained for.
        manners: when the drafter stops where it writes alone; None where nobody fitted them.
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
    manners: Manners | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse what :meth:`to_json` wrote.

        Raises:
            BundleError: not a manifest, another schema version, or a field that is missing or malformed.
        """
        try:
            raw = json.loads(text)
            version = raw["schema_version"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            why = f"no JSON from line {error.lineno} on" if isinstance(error, json.JSONDecodeError) else "another file"
            raise BundleError(f"{MANIFEST_FILE} is no bundle manifest ({why}): export the bundle again") from error
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"the bundle has schema version {version!r}, this moa-edge reads version {SCHEMA_VERSION}: "
                "upgrade moa-edge, or export the bundle again"
            )
        try:
            manifest = cls(
                fingerprints=Fingerprints(**raw["fingerprints"]),
                target=str(raw["target"]),
                stop_tokens=tuple(int(token) for token in raw["stop_tokens"]),
                special_tokens={str(k): str(v) for k, v in raw["special_tokens"].items()},
                recipe=dict(raw["recipe"]),
                tools={str(k): str(v) for k, v in raw["tools"].items()},
                targets={name: _target(entry) for name, entry in raw["targets"].items()},
                writer=_target(raw["writer"]) if raw.get("writer") else None,
                web_writer=_target(raw["web_writer"]) if raw.get("web_writer") else None,
                manners=_manners(raw["manners"]) if raw.get("manners") else None,
                files={_checked_name(name): FileEntry(**entry) for name, entry in raw["files"].items()},
                **{name: int(raw[name]) for name in _INTEGER_FIELDS},
            )
            # What a reader opens must be among what is checked.
            needed = [TOKENIZER_FILE, CHAT_TEMPLATE_FILE, *(entry.file for entry in manifest.targets.values())]
            needed += [writer.file for writer in (manifest.writer, manifest.web_writer) if writer]
            if unlisted := [name for name in needed if not _is_listed(name, manifest.files)]:
                raise ValueError(f"files does not list {unlisted[0]!r}")
            return manifest
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise BundleError(f"{MANIFEST_FILE} is malformed ({why}): export the bundle again") from error


def _manners(raw: Mapping[str, Any]) -> Manners:
    return Manners(float(raw["least_probability"]), int(raw["repeated"]), int(raw["longest"]))


_INTEGER_FIELDS = ("kv_heads", "head_dim", "top_k", "vocab_size", "draft_vocab_size", "max_context")


def _is_listed(name: str, files: Mapping[str, FileEntry]) -> bool:
    """Whether a file is listed, or something in it if it is a folder."""
    return name in files or any(listed.startswith(f"{name}/") for listed in files)


def _target(raw: dict[str, Any]) -> TargetEntry:
    tensors = {part: tuple(_tensor(spec) for spec in raw[part]) for part in ("inputs", "outputs", "states")}
    return TargetEntry(**{**raw, **tensors})


def _tensor(raw: dict[str, Any]) -> TensorSpec:
    return TensorSpec(raw["name"], raw["dtype"], tuple(raw["shape"]))


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or name in ("", MANIFEST_FILE):
        raise ValueError(f"file name {name!r} leaves the bundle")
    return name


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose files are known to be whole."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path | str) -> Bundle:
        """Read the manifest and check every file's SHA-256.

        Raises:
            BundleError: no bundle, a newer schema version, or a file that is missing or changed.
        """
        folder = Path(folder).expanduser()
        manifest = read_manifest(folder)
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise BundleError(f"the bundle {folder} lacks its file {name}: export or copy it again")
            if path.stat().st_size != entry.bytes or sha256_of(path) != entry.sha256:
                raise BundleError(
                    f"{name} in the bundle {folder} was changed: its SHA-256 is not the one in {MANIFEST_FILE}; "
                    "export or copy the bundle again"
                )
        return cls(folder, manifest)

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER_FILE

    @property
    def chat_template_path(self) -> Path:
        return self.folder / CHAT_TEMPLATE_FILE

    def graph_path(self, target: str) -> Path:
        """The graph of a name, a file or a folder.

        Raises:
            BundleError: the bundle has none; the message says which it has.
        """
        if target not in self.manifest.targets:
            held = ", ".join(sorted(self.manifest.targets)) or "none"
            raise BundleError(f"the bundle {self.folder} has no graph for {target!r}; it has: {held}")
        return self.folder / self.manifest.targets[target].file


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle whose files are not checked.

    Raises:
        BundleError: no folder, no manifest, or one that cannot be read.
    """
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it has no {MANIFEST_FILE}" if folder.is_dir() else "there is no such folder"
        if isinstance(error, (PermissionError, UnicodeDecodeError)):
            reason = f"its {MANIFEST_FILE} cannot be read"
        raise BundleError(f"{folder} is no bundle: {reason}; make one with moa-export") from error
    return Manifest.from_json(text)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write ``manifest.json``, its ``files`` filled in from what lies in ``folder``.

    Returns:
        the manifest as written.
    """
    files = {
        path.relative_to(folder).as_posix(): FileEntry(sha256_of(path), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST_FILE
    }
    manifest = dataclasses.replace(manifest, files=files)
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def tokenizer_fingerprint(path: Path) -> str:
    """Identity of a tokenizer: the first 32 hexadecimal digits of its ``tokenizer.json``'s SHA-256.

    Raises:
        BundleError: the file is not there.
    """
    if not path.is_file():
        raise BundleError(f"there is no tokenizer file {path}: expected a tokenizer.json of the tokenizers library")
    return sha256_of(path)[:32]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
