"""The one error that every command line shows as a sentence instead of a traceback."""

from __future__ import annotations


class MoaError(Exception):
    """Something a user can cause and mend: what was wrong, what was expected, what to do."""
