"""What drafts of each shape bring, from a recording of ``moa-bench shapes``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from moa_bench.forecast.drafts import Drafts, Shape
from moa_bench.pace import Pace
from moa_bench.shapes.fixed import name_of
from moa_bench.shapes.recording import Recording
from moa_bench.shapes.replay import Replay, hold
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.errors import MoaError

#: From no draft at all to the largest; between them as many as make a step from one to the next small.
SHAPES = (
    Budget.chain(0, nodes=0),
    *(Budget.chain(levels) for levels in (0, 1, 2, 3, 4, 6)),
    Budget.tree(8, 3, 4),
    Budget.tree(16, 4, 4),
    Budget.tree(32, 6, 10),
    Budget.tree(62, 8, 10),
)
_ANY = Pace(0.0, 0.0, 0.0, 0.0, 0.0)


def drafts_of(
    recording: Recording,
    asked: Mapping[tuple[int, ...], str] = MappingProxyType({}),
    on_answer: Callable[[], None] = lambda: None,
) -> Drafts:
    """Have the real loop draft in every shape at every position of the recorded answers.

    Args:
        asked: the task of each question, by its tokens; without any there is one task, ``"all"``.
        on_answer: called for each answer.

    Raises:
        MoaError: an answer to another question.
    """
    tasks = _tasks(recording, asked)
    rounds: dict[Budget, list[tuple[str, RoundEnded]]] = {shape: [] for shape in SHAPES}
    for answer, task in zip(recording.answers, tasks, strict=True):
        replay = Replay(recording, answer)
        for shape, seen in rounds.items():
            watching = _Watching(FixedShape(shape))
            hold(replay, watching, _ANY)
            seen += [(task, outcome) for outcome in watching.rounds]
        on_answer()
    tokens = Counter[str]()
    for answer, task in zip(recording.answers, tasks, strict=True):
        tokens[task] += len(answer.answer) - 1
    about = (
        f"{recording.drafter}, {len(tasks)} answers, {sum(tokens.values())} tokens, greedy"
        f"{', with copying' if recording.ngrams else ''}; moa-bench forecast --recording"
    )
    share = {task: tasks.count(task) / len(tasks) for task in dict.fromkeys(tasks)}
    return Drafts(about, share, [_shape(budget, seen) for budget, seen in rounds.items()])


class _Watching:
    """A controller that keeps its rounds. Implements :class:`moa_runtime.drafting.draft_controllers.Controller`."""

    token_s = 0.0

    def __init__(self, controller: FixedShape) -> None:
        self._controller = controller
        self.rounds: list[RoundEnded] = []

    def budget(self) -> Budget:
        return self._controller.budget()

    def ahead(self, drafted: int, probability: float) -> bool:
        return False

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        if isinstance(outcome, RoundEnded) and not outcome.supplied:
            self.rounds.append(outcome)


def _shape(budget: Budget, seen: Sequence[tuple[str, RoundEnded]]) -> Shape:
    """Means over rounds; a draft has whole steps and nodes."""
    outcomes = [outcome for _, outcome in seen]
    count = len(outcomes)
    nodes = round(sum(outcome.drafted for outcome in outcomes) / count)
    depth = round(sum(outcome.depth for outcome in outcomes) / count)
    steps = round(sum(len(outcome.steps) for outcome in outcomes) / count)
    queries = round(sum(sum(outcome.steps) for outcome in outcomes) / count)
    accepted: dict[str, list[float]] = {}
    for task, outcome in seen:
        counts = accepted.setdefault(task, [])
        counts += [0.0] * (outcome.accepted + 1 - len(counts))
        counts[outcome.accepted] += 1
    shares = [queries // steps + (number < queries % steps) for number in range(steps)] if steps else []
    return Shape(name_of(budget), nodes, depth, tuple(shares), accepted)


def _tasks(recording: Recording, asked: Mapping[tuple[int, ...], str]) -> list[str]:
    """Of each answer: the first turn of its conversation says it."""
    tasks = []
    for answer in recording.answers:
        prompt = tuple(answer.prompt)
        task = next((task for first, task in asked.items() if prompt[: len(first)] == first), None)
        if asked and task is None:
            raise MoaError("the recording holds answers to other questions: name those that it was made with")
        tasks.append(task or "all")
    return tasks
