"""Written conversations as one file that can be kept and passed on: compressed, with a card that says what it holds."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

from moa_drafter.target import Target
from moa_drafter.training.config_file import plain, read_mapping, write_record
from moa_drafter.training.data import read_conversations
from moa_drafter.training.settings import GenerateSettings, RunSettings
from moa_runtime.bundle import sha256_of
from moa_runtime.errors import MoaError

CARD_SUFFIX = ".card.yaml"
_FORMAT = (
    "a line a conversation, JSON: p and r are the target's token ids, the prompt and all from the first answer on; "
    "u are spans of r that the target did not write; b is the batch"
)


def keep(store: Path, target: Target, settings: RunSettings) -> Path:
    """Write ``STORE.gz`` and its card beside a store; the same store gives the same bytes.

    Returns:
        the compressed file.
    """
    kept = store.with_name(store.name + ".gz")
    scratch = kept.with_name(f".{kept.name}.tmp")
    with (
        store.open("rb") as source,
        scratch.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
    ):
        shutil.copyfileobj(source, packed)
    scratch.replace(kept)
    write_record(card_of(kept), _card(kept, target, settings))
    return kept


def card_of(file: Path) -> Path:
    return file.with_name(file.name + CARD_SUFFIX)


def check_card(file: Path, sha256: str) -> None:
    """Compare a file that is read with its card, where it has one.

    Raises:
        MoaError: the file is another one, or the card cannot be read.
    """
    card = card_of(file)
    if card.is_file() and read_mapping(card, str(card), example="sha256: ...").get("sha256") != sha256:
        raise MoaError(f"{file} is not what its card says: its SHA-256 is {sha256}; fetch it again, or remove {card}")


def _card(kept: Path, target: Target, settings: RunSettings) -> dict[str, Any]:
    conversations = read_conversations(kept, vocab_size=target.config.vocab_size)
    answers = sum(stop - start for each in conversations for start, stop in each.answers)
    return {
        "file": kept.name,
        "sha256": sha256_of(kept),
        "bytes": kept.stat().st_size,
        "format": _FORMAT,
        "conversations": len(conversations),
        "answer_tokens": answers,
        "other_tokens": sum(map(len, conversations)) - answers,
        "target": {"name": target.folder.name, "fingerprint": target.fingerprint},
        "settings": {
            key: value
            for key, value in plain(settings, names_only=True).items()
            if key in GenerateSettings.__dataclass_fields__ or key in ("model", "prompts", "dtype")
        },
    }
