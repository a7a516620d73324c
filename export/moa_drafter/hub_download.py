"""Large files of the Hub, continued by the next program if one was stopped: huggingface_hub 2 begins them anew."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

#: Smaller files are left to huggingface_hub.
LARGE_BYTES = 1 << 24


def download_large_files(
    hub_id: str, patterns: Sequence[str], ignored: Sequence[str], revision: str, locks: Path
) -> None:
    """Fetch large files at the top of a repository into the cache of huggingface_hub, whose ``snapshot_download`` finds
    them there.

    Args:
        locks: the folder for the locks of files, against two programs that fetch the same.

    Raises:
        Exception: of any library, if the Hub ends a download. What is fetched remains. Without an answer before, all is
            left to ``snapshot_download``.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import are_symlinks_supported, http_get, repo_folder_name
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import build_hf_headers, filter_repo_objects

    blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model") / "blobs"
    missing = []
    with contextlib.suppress(Exception):
        if not are_symlinks_supported(HF_HUB_CACHE):  # there every file would be kept twice
            return
        listed = [file for file in HfApi().list_repo_tree(hub_id, revision=revision) if isinstance(file, RepoFile)]
        chosen = filter_repo_objects(
            listed, allow_patterns=list(patterns), ignore_patterns=list(ignored), key=lambda file: file.path
        )
        for file in chosen:
            if file.size >= LARGE_BYTES and not (blobs / (file.lfs.sha256 if file.lfs else file.blob_id)).is_file():
                url = hf_hub_url(hub_id, file.path, revision=revision)
                missing.append((url, file.path, get_hf_file_metadata(url)))
    for url, path, facts in missing:
        if not facts.etag or not facts.size:
            continue
        blob = blobs / facts.etag
        part = blob.with_name(f"{facts.etag}.continued.incomplete")
        for folder in (blobs, locks):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{facts.etag}.lock"):
            if not blob.is_file():
                with part.open("ab") as file:
                    headers = build_hf_headers()
                    size = {"resume_size": file.tell(), "expected_size": facts.size}
                    http_get(url, file, headers=headers, displayed_filename=path, **size)
                part.replace(blob)
