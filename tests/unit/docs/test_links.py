"""Links of the Markdown files, and pages of the documentation that other files mention."""

from __future__ import annotations

import os
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PAGE = re.compile(r"docs/[\w/-]+\.(?:md|png|svg|json)")
#: A line with this commit speaks of files that are there and not here, such as the lab log.
_OF_A_COMMIT = "9bb5272"
_NOT_OURS = {"node_modules", "build", "dist", "static", "shared", "__pycache__"}


def _files(*names: str) -> list[Path]:
    """Return the files of the checkout whose names match one of the patterns, without what was installed or built."""
    found = []
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in _NOT_OURS]
        found += [Path(folder, name) for name in files if any(fnmatch(name, pattern) for pattern in names)]
    return sorted(found)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]
    seen: Counter[str] = Counter()
    anchors = set()
    for slug in slugs:
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def _broken(page: Path) -> list[str]:
    """Return the relative links of ``page`` that lead nowhere."""
    broken = []
    for match in _LINK.finditer(_FENCED.sub("", page.read_text())):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", _files("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    assert not _broken(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One thing\n\n[a](page.md#one-thing) [b](none.md) [c](#another) ![d](none.png)\n")
    assert _broken(page) == ["none.md", "#another", "none.png"]


def test_files_mention_pages_that_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {page}"
        for path in _files("*.py", "*.ts", "*.md", "*.json", "*.yaml", "*.cfg", "*.toml", "*.proto", "Makefile")
        for line in path.read_text().splitlines()
        if _OF_A_COMMIT not in line
        for page in _PAGE.findall(line)
        if not (ROOT / page).is_file()
    ]
    assert not missing


def test_every_picture_is_shown() -> None:
    texts = "".join(page.read_text() for page in _files("*.md"))
    pictures = [path for path in _files("*.png", "*.svg") if path.is_relative_to(ROOT / "docs")]
    assert [picture.name for picture in pictures if picture.name not in texts] == []
