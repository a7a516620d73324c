"""Configuration files in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moa_runtime.errors import MoaError


def read_mapping(path: Path, name: str, *, example: str, error: type[MoaError] = MoaError) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Args:
        name: what messages call the file.
        example: a line that might stand in it, for messages.
        error: what is raised.

    Raises:
        MoaError: no such file, no YAML, or no mapping.
    """
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"cannot read {name}: {getattr(problem, 'strerror', None) or problem}") from problem
    except yaml.YAMLError as problem:
        raise error(f"{name} is no YAML: {' '.join(str(problem).split())}") from problem
    if not isinstance(raw, dict):
        raise error(f"{name} must hold keys and values, such as `{example}`")
    return raw
