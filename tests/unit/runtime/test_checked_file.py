"""Files of strangers: whatever reads one refuses a pipe and a device, without waiting and without end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moa_bench.questions import read_questions
from moa_chat.chat_config import endpoint_for
from moa_decoder.checkpoint_weights import SafetensorsFile, read_config, weight_files
from moa_decoder.gguf_file import GgufFile
from moa_drafter.drafter_weights import read_weights
from moa_drafter.target_source import check_target
from moa_drafter.training.settings import read_mapping
from moa_runtime.checked_file import open_checked, read_checked
from moa_runtime.datastore import Datastore
from moa_runtime.errors import MoaError
from moa_runtime.manifest import read_manifest
from moa_runtime.tokenizer import _source_of, read_tokenizer
from moa_server.auth import read_tokens
from moa_server.web.pairing import kept_token
from support.refusals import refused

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")

#: Readers of a file, with the name that it must have.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "manifest": ("manifest.json", lambda file: read_manifest(file.parent)),
    "tokenizer": ("tokenizer.json", read_tokenizer),
    "template": ("chat_template.jinja", _source_of),
    "datastore": ("texts.moadata", lambda file: Datastore.open(file, "")),
    "token file": ("tokens.json", read_tokens),
    "kept token": ("token", kept_token),
    "authority": ("ca.pem", lambda file: endpoint_for("wss://a", "", file)),
    "settings": ("run.yaml", lambda file: read_mapping(file, "run.yaml", example="")),
    "questions": ("questions.jsonl", read_questions),
    "gguf": ("model.gguf", GgufFile),
    "safetensors": ("model.safetensors", SafetensorsFile),
    "index": ("model.safetensors.index.json", lambda file: weight_files(file.parent)),
    "target": ("config.json", lambda file: read_config(file.parent)),
    "drafter": ("config.json", lambda file: read_weights(file.parent)),
}


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/dev/full", "/dev/tty", "folder", "circle"])
@pytest.mark.parametrize("reader", READERS)
def test_a_name_of_no_file_is_refused(tmp_path: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    file = tmp_path / name
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(file if kind == "circle" else kind)
    with pytest.raises(MoaError):
        read(file)


def test_a_file_is_read_up_to_its_limit_and_inside_of_its_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_bytes(b"12345678")
    assert read_checked(file, 8, tmp_path) == b"12345678"
    for most, inside in ((7, None), (8, folder)):
        with pytest.raises(OSError):
            open_checked(file, most, inside)
    with pytest.raises(OSError):
        open_checked(tmp_path / "a\0b")


def test_aliases_in_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: &a [1]\nb: [*a, *a]\n")
    with pytest.raises(MoaError):
        read_mapping(tmp_path / "run.yaml", "run.yaml", example="")


#: Files that are read of a model's folder, by us or by transformers.
READ = ["config.json", "tokenizer.json", "vocab.txt", "tokenizer.model", "LICENSE", "additional_chat_templates/a.jinja"]


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "link"])
@pytest.mark.parametrize("name", [*READ, "model.safetensors", "model.gguf"])
def test_a_model_folder_has_only_files_of_its_own(tmp_path: Path, name: str, kind: str) -> None:
    """Weights may be elsewhere, because nothing of them is told."""
    folder, secret = tmp_path / "model", tmp_path / "secret"
    secret.write_text("{}")
    file = folder / name
    file.parent.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(secret if kind == "link" else kind)
    if kind == "link" and name not in READ:
        check_target(str(folder))
    else:
        with refused("unreadable", MoaError, str(file)):
            check_target(str(folder))


def test_links_of_the_hub_are_its_own(tmp_path: Path) -> None:
    blob, folder = tmp_path / "models--a--b/blobs/1", tmp_path / "models--a--b/snapshots/2"
    for file in (blob, folder / "config.json"):
        file.parent.mkdir(parents=True)
    blob.write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/1")
    check_target(str(folder))
