"""Which versions of other packages are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions by package name; packages that are not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
