"""The phone-sized page as built files, for ``moa-serve --web``. Its source is in ``apps/web``."""

from __future__ import annotations

from pathlib import Path

from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import installed_from


def page_folder() -> Path:
    """The folder with the built page.

    Raises:
        MoaError: it was not built.
    """
    folders = [Path(__file__).with_name("static")]
    if (checkout := installed_from()) is not None:  # in which it may have been built after the installation
        folders.append(checkout / "apps" / "moa_page" / "static")
    folder = next((each for each in folders if (each / "index.html").is_file()), None)
    if folder is None:
        text = "the page is not built: in a checkout of moa-edge, make web builds it (with npm)"
        raise MoaError(text, code="not_built")
    return folder
