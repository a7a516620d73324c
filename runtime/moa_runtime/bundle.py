"""The bundle: the folder that ``moa-export`` writes and the runtime loads."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moa_runtime.checked_file import sha256_of
from moa_runtime.cli_main import own_program
from moa_runtime.errors import MoaError
from moa_runtime.manifest import (
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    BundleError,
    FileEntry,
    Manifest,
    checked_manifest,
)
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DrafterName, drafter_option
from moa_runtime.paths import check_cache, expanded

if TYPE_CHECKING:
    from moa_runtime.transport import Endpoint


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose files were checked."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path | str) -> Bundle:
        """Read the manifest and check every file's SHA-256.

        Raises:
            BundleError: there is no bundle, it has another schema version, or a file is missing or changed.
        """
        folder = expanded(folder)
        return cls(folder, checked_manifest(folder))

    @classmethod
    def fetch(
        cls,
        endpoint: Endpoint,
        *,
        graphs: Sequence[str] = ("onnx",),
        writer: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Bundle:
        """Fetch the best bundle that a verifier offers, with the files that this device needs, or take it from the
        cache folder.

        Args:
            graphs: names of graphs that this device can run.
            writer: whether to fetch the offline writer too.
            progress: called with the bytes received and those of the whole download; its exceptions end the download,
                and received bytes are kept.

        Raises:
            MoaError: see :func:`moa_runtime.bundle_download.offers` and ``fetch_bundle`` beside it.
        """
        from moa_runtime.bundle_download import best_offer, fetch_bundle, offers  # late: exports need no network

        offer = best_offer(offers(endpoint), graphs)
        more = {} if progress is None else {"progress": progress}
        return cls.open(fetch_bundle(endpoint, offer, graphs=graphs, writer=writer, **more))

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER_FILE

    @property
    def chat_template_path(self) -> Path:
        return self.folder / CHAT_TEMPLATE_FILE

    def graph_path(self, target: str) -> Path:
        """Return the path of a graph's file or folder; raise BundleError if the bundle has no graph of this name."""
        if target not in self.manifest.targets:
            held = ", ".join(sorted(self.manifest.targets)) or "none"
            text = f"the bundle {self.folder} has no graph for {target!r}; it has: {held}"
            raise BundleError(text, code="unknown_target")
        return self.folder / self.manifest.targets[target].file


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write ``manifest.json`` and return it, with ``files`` filled in from the content of ``folder``."""
    files = {
        path.relative_to(folder).as_posix(): FileEntry(sha256_of(path), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST_FILE
    }
    manifest = dataclasses.replace(manifest, files=files)
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def tokenizer_fingerprint(path: Path) -> str:
    """Return the first 32 hexadecimal digits of a ``tokenizer.json``'s SHA-256, or raise BundleError without one."""
    if not path.is_file():
        text = f"there is no tokenizer file {path}: expected a tokenizer.json of the tokenizers library"
        raise BundleError(text, code="file_missing")
    return sha256_of(path)[:32]


def make_bundle(folder: Path, target: str, program: str, drafter: DrafterName | None = None) -> None:
    """Build the bundle of the built-in target and a shipped drafter in another process, whose progress goes to stderr.

    Args:
        target: ``onnx`` or ``web``.
        program: name of the program that needs the bundle, for messages.

    Raises:
        MoaError: packages are missing, the cache folder is not writable, or the export failed.
    """
    require_extra("server", program)
    check_cache()
    print(
        "the model for this device is made, once (5 to 15 s and the download):",
        file=sys.stderr,
        flush=True,
    )
    process = subprocess.Popen(
        own_program("moa_export.build_program", str(folder), "--target", target, *drafter_option(drafter)),
        stdout=subprocess.DEVNULL,
    )
    try:
        status = process.wait()
    except BaseException:
        process.terminate()  # not killed: it removes its unfinished files
        process.wait()
        raise
    if status:
        raise MoaError("the model for this device could not be made: the message above says why", code="export_failed")
