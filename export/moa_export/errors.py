"""Errors of an export."""

from __future__ import annotations

from moa_runtime.errors import MoaError


class ExportError(MoaError):
    """Bad input to an export, or a place that cannot be written."""


class ParityError(MoaError):
    """A finished export that is too far from PyTorch to be used."""

    exit_status = 1
