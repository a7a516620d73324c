"""Licences of target and drafter, which travel with a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moa_decoder.errors import TargetError
from moa_decoder.gguf_file import GgufFile
from moa_drafter.target_folder import gguf_of
from moa_runtime.checked_file import read_checked
from moa_runtime.manifest import LICENCES

_NAMES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*")
_CARD = "README.md"  # a model card, which names a licence
_SAID = ("general.name", "general.author", "general.license", "general.license.name", "general.license.link")
_MOST_BYTES = 1 << 20


def write_licences(stage: Path, role: Literal["target", "drafter"], source: Path) -> None:
    """Copy the licences in a model's folder into a bundle.

    Without such a file it is the model card; without that, what a GGUF file says of its licence. A model that names no
    licence adds none.
    """
    files = sorted({path for name in _NAMES for path in source.glob(name)}) or [source / _CARD]
    fitting = [path for path in files if path.is_file() and path.stat().st_size <= _MOST_BYTES]
    texts = {path.name: read_checked(path, _MOST_BYTES) for path in fitting}
    if not texts and (said := _said_by_gguf(source)):
        texts = {"LICENSE.txt": said.encode()}
    for name, text in texts.items():
        place = stage / LICENCES / role / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text)


def _said_by_gguf(folder: Path) -> str:
    parts = gguf_of(folder)
    try:
        metadata = GgufFile(parts[0]).metadata if parts else {}
    except TargetError:
        return ""
    if not any(name.startswith("general.license") for name in metadata):
        return ""
    return "".join(f"{name}: {metadata[name]}\n" for name in _SAID if name in metadata)
