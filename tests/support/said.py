"""What a program says on stderr."""

from __future__ import annotations

import re


def is_progress(err: str) -> bool:
    """Whether it is how far a program is and nothing else."""
    counted = r"[^:].*: \d+ of (\d+|\?) [a-z]+, \d\d:\d\d gone, \S+ to go(, \S.*)?"
    stage = r"moa-[a-z]+: [^:].* \(\d+ s gone\)"  # again each two seconds: there are more on a slow machine
    return bool(err) and all(re.fullmatch(f"{counted}|{stage}", each) for each in err.splitlines())
