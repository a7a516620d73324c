"""Which prompts are about the same text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from moa_bench.questions import Question

#: Characters of a line that prompts about the same text have in common, at least.
LEAST_SHARED = 300


def groups_of(prompts: Iterable[str], least: int = LEAST_SHARED) -> Iterator[list[str]]:
    """Prompts that have their longest line in common, in the order in which they came, without those said twice.

    Args:
        least: characters of the line; shorter ones are not what a prompt is about.
    """
    groups: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for prompt in prompts:
        line = max(prompt.splitlines(), key=len, default="")
        if len(line) >= least:
            groups[line][prompt] = None
    return (list(group) for group in groups.values())


def split(groups: Sequence[Sequence[str]]) -> tuple[list[Question], list[Question]]:
    """What was asked earlier, and what is asked later: a half of each group, whose number is the task.

    Returns:
        both in turns of one question a group, so that the first ones are about many texts.
    """
    earlier, later = [], []
    for number, group in enumerate(groups, 1):
        half = len(group) // 2
        for questions, said in ((earlier, group[:half]), (later, group[half:])):
            questions += [(at, number, prompt) for at, prompt in enumerate(said)]
    return _in_turns(earlier), _in_turns(later)


def _in_turns(asked: list[tuple[int, int, str]]) -> list[Question]:
    ordered = sorted(asked, key=lambda each: each[:2])
    return [Question(number, f"text {group}", (prompt,)) for number, (_, group, prompt) in enumerate(ordered, 1)]
