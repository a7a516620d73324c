"""What drafts are copied from in the next window: the chats of this one and those before."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moa_chat.chats_datastore import DatastoreChoice, forget, renew
from moa_chat.desktop.profile import Settings
from moa_chat.desktop.runtime_thread import Engine
from moa_chat.history.store import History
from moa_runtime.errors import MoaError


def choice_of(settings: Settings, options: argparse.Namespace) -> DatastoreChoice:
    """Off where either says so; else what the command line says."""
    choice: DatastoreChoice = options.datastore
    return choice if settings.earlier_chats or choice != "on" else "off"


def renew_at_end(engine: Engine, history: History, folder: Path, choice: DatastoreChoice) -> None:
    """Make the datastore of the chats as they are now; without a chat there is none, as nobody could say what was
    deleted. What goes wrong is said on stderr: the window is gone.

    Args:
        folder: the profile's.
    """
    try:
        if engine.chat is None or choice == "off":
            forget(folder)
        elif choice == "on":
            answers, tokenizer = history.answers(engine.target, engine.verifier), engine.chat.tokenizer
            renew(folder, answers, engine.verifier, tokenizer, engine.chat.manifest.fingerprints.tokenizer)
    except MoaError as error:
        print(f"moa-chat: {error}", file=sys.stderr)
