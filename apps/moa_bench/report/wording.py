"""Keys and values of a result as a reader wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UNITS = {"gib": "GiB", "mb": "MB"}


def label_of(key: str) -> str:
    """``"memory_gib"`` is ``"memory GiB"``."""
    return " ".join(_UNITS.get(word, word) for word in key.split("_"))


def value_text(value: object) -> str:
    """A setting as it was given: floats without trailing zeros, lists with commas, a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "-"
    return str(value)


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Labels and values; those of a setting with parts one by one.

    ``flat({"sampling": {"top_p": 1.0}})`` is ``[("sampling top p", "1")]``.
    """
    rows = []
    for key, value in settings.items():
        label = f"{prefix}{label_of(key)}"
        rows += flat(value, f"{label} ") if isinstance(value, dict) else [(label, value_text(value))]
    return rows


def time_text(moment: str) -> str:
    """``"2026-01-31T08:00:00+00:00"`` is ``"2026-01-31 08:00:00 UTC"``."""
    return moment.replace("T", " ").replace("+00:00", " UTC")
