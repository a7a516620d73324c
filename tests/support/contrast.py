"""Contrast of colours, for readers."""

from __future__ import annotations


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours ``#rrggbb`` as WCAG 2.2 defines it, from 1 to 21.

    >>> round(contrast("#777777", "#ffffff"), 2)
    4.48
    """
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
