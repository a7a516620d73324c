"""A datastore of the user's own earlier chats: those that the window keeps. Light until there is something to do.

A verifier is sent what is drafted. So a datastore holds only what the same verifier, by its host, wrote itself, and
only answers: nobody is shown what they did not know. It is made anew of the history whenever the window closes, so
that chats which were deleted are not in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from moa_runtime.atomic_file import remove_private
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.paths import data_dir, expanded

if TYPE_CHECKING:
    from moa_runtime.bundle import Bundle
    from moa_runtime.datastore.reader import Datastore
    from moa_runtime.tokenizer import ChatTokenizer

#: What a user asks for: that of the chats, none, or a file.
DatastoreChoice = Literal["on", "off"] | Path
#: Tokens of it at most, the newest: a file of 8 MiB, sorted within two seconds.
MOST_TOKENS = 1 << 20
_FILE = "chats.moadata"


def datastore_choice_of(text: str) -> DatastoreChoice:
    """As written on a command line."""
    return "on" if text == "on" else "off" if text == "off" else expanded(text)


def host_of(address: str) -> str:
    """The verifier of an address, as chats remember it. A port may be another one each time."""
    return urlsplit(address).hostname or ""


def datastore_for(choice: DatastoreChoice, bundle: Bundle, address: str) -> Datastore | None:
    """What drafts are copied from besides the conversation. ``off`` also deletes what was made of the chats.

    Args:
        address: the verifier's.

    Raises:
        MoaError: a file that the user named and that cannot be used, or one that cannot be deleted.
    """
    if choice == "off":
        forget(data_dir())
        return None
    from moa_runtime.datastore.file import DatastoreError
    from moa_runtime.datastore.reader import Datastore

    tokenizer = bundle.manifest.fingerprints.tokenizer
    if isinstance(choice, Path):
        return Datastore.open(choice, tokenizer)
    try:
        datastore = Datastore.open(data_dir() / _FILE, tokenizer)
    except DatastoreError:
        return None  # there is none yet, or one of no use, which the next one replaces
    return datastore if datastore.header.source.startswith(_digest([host_of(address)])) else None


def forget(folder: Path) -> bool:
    """Delete what was made of the chats in a profile's folder; whether there was anything.

    Raises:
        MoaError: it cannot be deleted.
    """
    path = folder / _FILE
    try:
        there = os.path.lexists(path)
        remove_private(path)
        return there
    except OSError as error:
        named = error.filename or path
        raise MoaError(f"of the datastore of your chats {named} cannot be deleted: {reason_of(error)}") from error


def renew(folder: Path, answers: Sequence[str], host: str, tokenizer: ChatTokenizer, fingerprint: str) -> None:
    """Make the datastore of a profile's folder, unless it is there already.

    Args:
        answers: of the verifier ``host``, the oldest first; without any there is no datastore.
        fingerprint: the tokenizer's.

    Raises:
        MoaError: it cannot be written or deleted, or the chat template fails.
    """
    if not answers:
        forget(folder)
        return
    from moa_runtime.datastore.answers import answer_encoder
    from moa_runtime.datastore.file import DatastoreError, read_header
    from moa_runtime.datastore.writer import write_datastore

    path, source = folder / _FILE, _digest([host]) + _digest([fingerprint, *answers])
    try:
        if read_header(path)[0].source == source:
            return
    except DatastoreError:
        pass  # there is none, or it is damaged
    encode = answer_encoder(tokenizer)
    write_datastore(path, [encode(answer) for answer in answers], fingerprint, most_tokens=MOST_TOKENS, source=source)


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode(errors="replace")).digest())
    return digest.hexdigest()[:32]
