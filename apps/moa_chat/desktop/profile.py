"""The user's profile: a folder with the settings and the history."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from moa_chat.history.chat_settings import ChatSettings, well_typed
from moa_runtime.atomic_file import replace_private
from moa_runtime.errors import MoaError
from moa_runtime.paths import data_dir, free_name


@dataclass(frozen=True)
class Settings(ChatSettings):
    """The user's settings: of new chats, and of the program."""

    server: str = ""  # the verifier's address; empty until one was chosen
    local: bool = False  # start the verifier on this machine instead
    token: str = dataclasses.field(default="", repr=False)  # bearer token of the verifier
    certificate: str = ""  # PEM of the only one that is trusted for ``server``; empty: the system's authorities
    bundle: str = ""  # folder; empty for the default one
    disagreement: str = "theirs"  # ``ask``, ``theirs`` or ``mine``: which of text written offline and the target's
    theme: str = "system"  # ``system``, ``light`` or ``dark``
    zoom: int = 100  # size of the letters in percent
    origins: bool = False  # colour answers by origin
    geometry: str = ""  # of the window, as Qt packs it, in hexadecimal digits

    @property
    def ready(self) -> bool:
        """Whether the first-run page was completed."""
        return self.local or bool(self.server)

    @property
    def of_new_chats(self) -> ChatSettings:
        """The settings of a new chat."""
        return ChatSettings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ChatSettings)})


class Profile:
    """The profile's folder, created if it is missing and readable by its owner only."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._settings_path = folder, folder / "settings.json"
        self.history_path = folder / "history.sqlite"
        self.answer_path = folder / "answer.json"  # of the answer under way
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise MoaError(
                f"the profile folder {folder} cannot be made: {error.strerror}", code="cannot_write"
            ) from error

    @classmethod
    def default(cls) -> Profile:
        """Return the profile in ``MOA_EDGE_PROFILE``, or in the platform's folder for a user's data."""
        return cls(data_dir())

    def load(self) -> Settings:
        """Read the settings; a missing or mistyped one gets its default. A damaged file is renamed and kept."""
        path, stored = self._settings_path, {}
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
        """Write the settings, whole and for their owner alone. Raises MoaError if they cannot be written."""
        try:
            replace_private(self._settings_path, [json.dumps(dataclasses.asdict(settings), indent=2).encode()])
        except OSError as error:
            raise MoaError(
                f"the settings {self._settings_path} cannot be written: {error.strerror}", code="cannot_write"
            ) from error
