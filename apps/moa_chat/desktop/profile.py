"""The user's profile: a folder with the settings and the history."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moa_chat.history.chat_settings import ChatSettings, well_typed
from moa_runtime.errors import MoaError
from moa_runtime.paths import data_dir, free_name

_SETTINGS_FILE = "settings.json"
_HISTORY_FILE = "history.sqlite"
_ANSWER_FILE = "answer.json"


@dataclass(frozen=True)
class Settings(ChatSettings):
    """The user's settings: of new chats, and of the program.

    Attributes:
        server: the verifier's address; empty until one was chosen.
        local: start the verifier on this machine instead.
        token: bearer token of the verifier.
        certificate: PEM of the one certificate the user trusts for ``server``; empty for the system's authorities.
        bundle: folder; empty for the default one.
        disagreement: ``ask``, ``theirs`` or ``mine``: which version counts if the target disagrees with text that was
            written offline.
        theme: ``system``, ``light`` or ``dark``.
        zoom: size of the letters in percent.
        origins: colour answers by origin.
        geometry: of the window, as Qt packs it, in hexadecimal digits.
    """

    server: str = ""
    local: bool = False
    token: str = dataclasses.field(default="", repr=False)
    certificate: str = ""
    bundle: str = ""
    disagreement: str = "theirs"
    theme: str = "system"
    zoom: int = 100
    origins: bool = False
    geometry: str = ""

    @property
    def ready(self) -> bool:
        """Whether the first-run page was completed."""
        return self.local or bool(self.server)

    @property
    def of_new_chats(self) -> ChatSettings:
        """The settings of a new chat."""
        return ChatSettings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ChatSettings)})


class Profile:
    """The folder, made if need be, and readable by its owner alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise MoaError(f"the profile folder {folder} cannot be made: {error.strerror}") from error

    @classmethod
    def default(cls) -> Profile:
        """Return the profile in ``MOA_EDGE_PROFILE``, or in the platform's folder for a user's data."""
        return cls(data_dir())

    @property
    def history_path(self) -> Path:
        return self.folder / _HISTORY_FILE

    @property
    def answer_path(self) -> Path:
        """File of the answer under way."""
        return self.folder / _ANSWER_FILE

    def load(self) -> Settings:
        """Read the stored settings; a missing or mistyped one gets its default. A damaged file is kept under another
        name."""
        path, stored = self.folder / _SETTINGS_FILE, {}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            with contextlib.suppress(OSError):
                path.rename(free_name(path, "damaged"))
        except OSError:
            pass
        found = well_typed(stored, Settings())
        # Before there were recommendations, 0 was the default.
        found.setdefault("recommended", not found.get("temperature"))
        return Settings(**found)

    def save(self, settings: Settings) -> None:
        """Write the settings so that only their owner can read them, and never half of them.

        Raises:
            MoaError: the folder cannot be written.
        """
        path = self.folder / _SETTINGS_FILE
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self.folder)  # made for its owner alone
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(dataclasses.asdict(settings), file, indent=2)
                Path(temporary).replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
        except OSError as error:
            raise MoaError(f"the settings {path} cannot be written: {error.strerror}") from error
