"""The phone-sized page as built files, for ``moa-serve --web``. Its source is in ``apps/web``."""

from __future__ import annotations

from pathlib import Path

from moa_runtime.errors import MoaError


def page_folder() -> Path:
    """The folder with the built page.

    Raises:
        MoaError: it was not built.
    """
    folder = Path(__file__).with_name("static")
    if not (folder / "index.html").is_file():
        text = "the page is not built: in a checkout of moa-edge, make web builds it (with npm)"
        raise MoaError(text, code="not_built")
    return folder
