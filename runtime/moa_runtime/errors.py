"""Errors that every command line shows as a sentence instead of a traceback."""

from __future__ import annotations


class MoaError(Exception):
    """Something a user can cause and mend: what was wrong, what was expected, what to do."""


class ChatError(MoaError):
    """An answer that cannot go on: the verifier refused it, or the conversation does not fit."""


class ContextFullError(ChatError):
    """The conversation does not fit into the target's context."""
