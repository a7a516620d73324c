"""The bundle: the folder that ``moa-export`` writes and the runtime loads, described by ``manifest.json``.

``manifest.schema.json`` beside this file says the same as a JSON Schema, for readers in other languages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from moa_runtime.cli_main import own_program
from moa_runtime.errors import MoaError
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DrafterName, drafter_option
from moa_runtime.paths import expanded

SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class RecommendedSampling:
    """For chats; nothing follows it by itself.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1 is no limit.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise ValueError(f"a temperature is 0 or more and top_p above 0 and at most 1, not {self}")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RecommendedSampling:
        """Raises KeyError, TypeError or ValueError where it is malformed."""
        return cls(float(raw["temperature"]), float(raw["top_p"]))


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
        kv_heads, head_dim: shape of one cache entry and, where there are rows, of a memory row's key and value.
        stop_tokens: ids that end the assistant's turn.
        special_tokens: the texts a chat template may name, such as ``{"eos_token": "<|im_end|>"}``.
        recipe: how the weights were rounded and what may be lost, in plain values.
        tools: versions of what made the bundle, by package.
        targets: the graphs, by name (``"onnx"``, ``"coreml-stateless"``).
        files: every file of the bundle but the manifest, by path relative to it.
        writer: the graph of a whole model, which the device writes with while it has no verifier; None without one.
            Its ``details`` name the model, its bits, and ``max_context``, the positions it was trained for.
        web_writer: the same for onnxruntime-web.
        manners: when the drafter stops where it writes alone; None where nobody fitted them.
        sampling: what the target's authors recommend for chats; None where they do not say.
        architecture: of the drafter, as ``moa-train --arch`` names it.
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
    manners: StoppingRule | None = None
    sampling: RecommendedSampling | None = None
    architecture: str = "moa"
    schema_version: int = SCHEMA_VERSION

    @property
    def has_rows(self) -> bool:
        """Whether the drafter looks at memory rows; the others look at the tokens alone."""
        return self.architecture == "moa"

    @property
    def stopping_rule(self) -> StoppingRule:
        """``manners``, also where nobody fitted them: those of the built-in drafter. Without rows of the target one is
        wrong more often than right, so it writes nothing; that is what the fits of the shipped ones say."""
        if self.manners is not None:
            return self.manners
        return StoppingRule() if self.has_rows else StoppingRule(longest=0)

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
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"no JSON from line {error.lineno} on" if isinstance(error, json.JSONDecodeError) else "another file"
            raise BundleError(f"{MANIFEST_FILE} is no bundle manifest ({why}): export the bundle again") from error
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"the bundle has schema version {version!r}, this moa-edge reads version {SCHEMA_VERSION}: "
                "upgrade moa-edge, or export the bundle again"
            )
        manifest = cls(**{name: _part(raw, name) for name in _PARTS})
        # What a reader opens must be among what is checked.
        needed = [TOKENIZER_FILE, CHAT_TEMPLATE_FILE, *(entry.file for entry in manifest.targets.values())]
        needed += [writer.file for writer in (manifest.writer, manifest.web_writer) if writer]
        if unlisted := [name for name in needed if not _is_listed(name, manifest.files)]:
            raise _malformed(f"files does not list {unlisted[0]!r}")
        return manifest


def _malformed(why: str) -> BundleError:
    return BundleError(f"{MANIFEST_FILE} is malformed ({why}): export the bundle again")


def _part(raw: Mapping[str, Any], name: str) -> Any:
    """A field of the manifest.

    Raises:
        BundleError: it is missing, or of another form.
    """
    if name not in raw and name not in _OPTIONAL:
        raise _malformed(f"it lacks {name!r}")
    value = raw.get(name)
    if value is None and name in _OPTIONAL:
        return _OPTIONAL[name]
    try:
        return _PARTS[name](value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _malformed(f"{name!r} is not of the form that an export writes") from error


def _manners(raw: Mapping[str, Any]) -> StoppingRule:
    return StoppingRule(float(raw["least_probability"]), int(raw["repeated"]), int(raw["longest"]))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(text) for name, text in value.items()}


def _is_listed(name: str, files: Mapping[str, FileEntry]) -> bool:
    """Whether a file is listed, or something in it if it is a folder."""
    return name in files or any(listed.startswith(f"{name}/") for listed in files)


def _target(raw: dict[str, Any]) -> TargetEntry:
    tensors = {part: tuple(_tensor(spec) for spec in raw[part]) for part in ("inputs", "outputs", "states")}
    return TargetEntry(**{**raw, **tensors, "file": _text(raw["file"])})


def _writer(raw: dict[str, Any]) -> TargetEntry:
    entry = _target(raw)
    _count(entry.details["max_context"])
    return entry


def _tensor(raw: dict[str, Any]) -> TensorSpec:
    return TensorSpec(raw["name"], raw["dtype"], tuple(raw["shape"]))


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or name in ("", MANIFEST_FILE):
        raise _malformed(f"file name {name!r} leaves the bundle")
    return name


#: What a field is that is missing, or null.
_OPTIONAL = {"writer": None, "web_writer": None, "manners": None, "sampling": None, "architecture": "moa"}
#: How each field is read.
_PARTS: Mapping[str, Callable[[Any], Any]] = {
    "fingerprints": lambda raw: Fingerprints(**_texts(raw)),
    "target": _text,
    **dict.fromkeys(("kv_heads", "head_dim", "top_k", "vocab_size", "draft_vocab_size", "max_context"), _count),
    "stop_tokens": lambda raw: tuple(_count(token) for token in raw),
    "special_tokens": _texts,
    "recipe": dict,
    "tools": _texts,
    "targets": lambda raw: {name: _target(entry) for name, entry in raw.items()},
    "writer": _writer,
    "web_writer": _writer,
    "manners": _manners,
    "sampling": RecommendedSampling.from_json,
    "architecture": _text,
    "files": lambda raw: {_checked_name(name): FileEntry(**entry) for name, entry in raw.items()},
}


__all__ = [
    "CHAT_TEMPLATE_FILE",
    "MANIFEST_FILE",
    "SCHEMA_VERSION",
    "TOKENIZER_FILE",
    "Bundle",
    "BundleError",
    "FileEntry",
    "Fingerprints",
    "Manifest",
    "TargetEntry",
    "TensorSpec",
    "read_manifest",
    "sha256_of",
    "tokenizer_fingerprint",
    "write_manifest",
]


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
        folder = expanded(folder)
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


def make_bundle(folder: Path, target: str, program: str, takes: str, drafter: DrafterName | None = None) -> None:
    """Export the built-in target and a shipped drafter, unchecked; the export's progress goes to stderr.

    Args:
        target: of ``moa-export --target``.
        program: what needs it, and ``takes`` how long it has to wait, for messages.
        drafter: which one; the default one when omitted.

    Raises:
        MoaError: the export needs packages that are not installed, or failed.
    """
    require_extra("export", f"{program} (moa-export)")
    print(f"there is no bundle at {folder} yet: exporting one ({takes})", file=sys.stderr, flush=True)
    options = ("--target", target, "--out", str(folder), *drafter_option(drafter), "--json", "--no-checks")
    command = own_program("moa_export.cli", *options)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()  # not killed: it removes what it began
        process.wait()
        raise
    if status:
        raise MoaError("the bundle could not be exported: moa-export's message above says why")
