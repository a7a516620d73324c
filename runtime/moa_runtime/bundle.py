"""The bundle: the folder that ``moa-export`` writes and the runtime loads, described by ``manifest.json``."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

from moa_runtime.manifest import (
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    BundleError,
    FileEntry,
    Fingerprints,
    Manifest,
    TargetEntry,
    TensorSpec,
)
from moa_runtime.paths import expanded

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
