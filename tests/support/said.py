"""What a program says on stderr."""

from __future__ import annotations

import re


def is_progress(err: str) -> bool:
    """Whether it is how far a program is and nothing else."""
    line = r"[^:].*: \d+ of (\d+|\?) [a-z]+, \d\d:\d\d gone, \S+ to go(, \S.*)?"
    return bool(err) and all(re.fullmatch(line, each) for each in err.splitlines())
