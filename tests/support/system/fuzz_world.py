"""A real chat and a real verifier of a toy target in one event loop, and a drafter that is right at times."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from moa_runtime.chat import Chat
from moa_runtime.drafters.base import GREEDY, Budget, Float32
from moa_runtime.drafters.moa import Steps
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.options import Drafting, LoopSettings
from moa_runtime.session.events import Faulted, Policy, Sampling
from moa_runtime.session.tree import DraftTree, chain
from moa_runtime.transport import Endpoint
from moa_server.app import Verifier
from moa_server.auth import Bearer
from moa_server.connection import Connection
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.engine.base import Capabilities
from moa_server.settings import Settings
from support.memory_link import MemoryLink, ServerEnd
from support.tiny import CHAT_TEMPLATE, VOCAB_SIZE, _train_tokenizer
from support.toy_engine import PRINTS, STOP, ToyEngine
from support.virtual_loop import VirtualLoop

_CHAINS = Capabilities(trees=False, max_draft_tokens=8)
_ITSELF = Capabilities(trees=False, max_draft_tokens=8, schedules_itself=True)
#: How engines may behave.
MANNERS: Sequence[dict[str, Any]] = (
    {"delay_s": (0.01, 0.0)},
    {"delay_s": (0.02, 0.001)},
    {"capabilities": _CHAINS, "preempts": 0.2, "delay_s": (0.01, 0.0)},
    {"capabilities": _ITSELF, "preempts": 0.2, "delay_s": (0.01, 0.0)},
)
SETTINGS = Settings(keep_seconds=20.0, idle_seconds=60.0, answer_seconds=5.0, retry_after_ms=300)
PATIENCE = LoopSettings(offline_limit=20, late_after_s=2.0, prefill_late_after_s=4.0)


@dataclass(frozen=True)
class Limits:
    """What differs from schedule to schedule."""

    manner: int
    max_context: int
    stops: tuple[int, ...]
    policy: Policy
    draft_length: int
    ahead: int
    skill: float
    trees: bool
    delay_s: float
    step_tokens: int | None
    drafting: Drafting = "auto"
    server_skill: float | None = None  # of the server's drafter; None for none
    credit: int = 256  # tokens that the server may go on for


#: Whatever the device drafts is wrong, so all that it writes on is replaced; or it is right.
WRONG = Limits(0, 1000, (), Policy.ASK, draft_length=3, ahead=0, skill=0.0, trees=False, delay_s=0.02, step_tokens=None)
RIGHT = replace(WRONG, skill=1.0)


def toy_bundle(folder: Path) -> SimpleNamespace:
    """What a chat needs of a bundle: the tiny target's tokenizer and template, the toy's fingerprints."""
    _train_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "template").write_text(CHAT_TEMPLATE)
    manifest = SimpleNamespace(
        architecture="moa",
        fingerprints=PRINTS,
        stop_tokens=(STOP,),
        special_tokens={},
        vocab_size=VOCAB_SIZE,
        has_rows=True,
    )
    return SimpleNamespace(
        manifest=manifest, tokenizer_path=folder / "tokenizer.json", chat_template_path=folder / "template"
    )


class ToyBackend:
    """What the drafts of a server need to be given memory rows."""


class ToyDrafts(ServerDrafting):
    """Drafts of a server by :class:`ToyDrafter`.

    Attributes:
        broken: whether its drafters fail.
    """

    broken = False

    def __init__(self, world: World, engine: ToyEngine, skill: float) -> None:
        limits = SETTINGS.limits(engine.max_context, engine.capabilities)
        super().__init__(ToyBackend(), limits, engine.stop_tokens, clock=world.loop.time)  # type: ignore[arg-type]
        self._world, self._skill = world, skill

    def _new_drafter(self, mixture: NgramMixture) -> ToyDrafter:  # type: ignore[override]
        return ToyDrafter(self._world, self._world.rng, self._skill, lambda: self.broken)


class ToyDrafter:
    """Knows the target's choice, and says it with probability ``skill``. Checks the memory rows that it is given."""

    needs_rows = True
    stopping_rule = None

    def __init__(
        self, world: World, rng: random.Random, skill: float, broken: Callable[[], bool] = lambda: False
    ) -> None:
        self._world, self._rng, self._skill, self._broken = world, rng, skill, broken
        self.rows = 0

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        assert start <= self.rows, f"rows from {start} on, {self.rows} are held"
        for position, key in enumerate(keys[:, 0, 0], start):
            assert abs(key - (position + 1)) < 0.01 * (position + 1), f"row {position} is {key}"
        self.rows = start + len(keys)

    def truncate_rows(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """A chain, at times longer than its levels, and branches where they are wanted."""
        if self._broken():
            raise RuntimeError("the toy is broken")
        tokens, length = list(prefix), min(budget.nodes, budget.depth, budget.levels + self._rng.randint(0, 2))
        while len(tokens) < len(prefix) + length and tokens[-1] != STOP:
            tokens.append(self._next(tokens))
        drafted = tokens[len(prefix) :]
        parents, scores = chain(len(drafted)), [-0.5 * depth for depth in range(1, len(drafted) + 1)]
        branches = self._rng.randint(0, 6) if budget.branches and drafted else 0
        for _ in range(min(branches, budget.nodes - len(drafted))):
            parents.append(self._rng.randint(0, len(drafted)))
            drafted.append(self._rng.randrange(1, VOCAB_SIZE))
            scores.append(-9.0)
        return DraftTree(tuple(drafted), tuple(parents), tuple(scores))

    def steps(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> Steps[DraftTree]:
        """The same, as work that needs no step."""
        yield from ()
        return self.propose(prefix, budget, sampling)

    def _next(self, prefix: Sequence[int]) -> int:
        right = self._world.choice(prefix)
        return right if self._rng.random() < self._skill else 1 + right % 40


class World:
    """The chat, the link and the verifier, which can be started anew.

    Attributes:
        seed: of the answer that is being written, 0 for greedy ones.
        program_up: set while there is a chat; one that is killed leaves its store to the next.
        delay: longest seconds that a frame is under way.
        up: whether the verifier's process lives.
        stalled: whether the verifier ended a connection on which it had waited for long, in the middle of an answer.
        drafts: the verifier's own, if it makes some.
    """

    def __init__(
        self, loop: VirtualLoop, limits: Limits, bundle: Any, rng: random.Random, store: Path | None = None
    ) -> None:
        self.loop, self.limits, self.rng = loop, limits, rng
        self.bundle, self.stored = bundle, store
        self.seed = 0
        self.stalled = False
        self.delay = limits.delay_s
        self.others: list[asyncio.Task[None]] = []
        self.engine: ToyEngine
        self.drafts: ToyDrafts | None
        self.verifier: Verifier
        self.link = MemoryLink(self._serve, self._under_way, self._under_way)
        self._start_server()
        bundle.manifest.max_context = limits.max_context
        self.program_up = asyncio.Event()
        self.start_program()

    def start_program(self) -> None:
        """Make the chat; :meth:`Chat.open` it next."""
        limits = self.limits
        self.drafter = ToyDrafter(self, self.rng, limits.skill)
        self.chat = Chat(
            self.bundle,
            Endpoint("ws://verifier"),
            drafter=self.drafter,
            controller=FixedShape(Budget(32, limits.draft_length, branches=limits.trees), limits.ahead),
            policy=limits.policy,
            settings=replace(PATIENCE, drafting=limits.drafting),
            store=self.stored,
        )
        self.chat._loop.listen(self._hear)
        self.program_up.set()

    async def kill_program(self) -> None:
        """What the disk does not have by now is lost."""
        self.program_up.clear()
        keeper = self.chat._saver
        store, keeper._store, keeper._wanted = keeper._store, None, None
        if keeper._writing is not None:
            keeper._writing.cancel()
        if store is not None:
            store.close()
        self.link.cut()
        await self.chat.close()

    def choice(self, prefix: Sequence[int]) -> int:
        return self.engine.choice(prefix, self.seed)

    async def restart(self, down_s: float) -> None:
        """The verifier's process is killed, and started again some seconds later."""
        self.up = self.link.open = False
        self.link.kill_server_side()
        await self.link.closed()
        await self.verifier.background_answers.close()
        await self.verifier.worker.close()
        if self.drafts is not None:
            self.drafts.close()
        await asyncio.sleep(down_s)
        self._start_server()
        self.link.open = True

    async def end(self) -> None:
        """Everybody leaves; nothing may be left."""
        await self.chat.close()
        await self.link.closed()
        await self.verifier.background_answers.close()
        assert not len(self.verifier.worker), "jobs are left"
        self.loop.jump(SETTINGS.keep_seconds + 1)
        self.verifier.store.sweep()
        assert not len(self.verifier.store), "conversations left"
        if self.drafts is not None:
            assert not len(self.drafts), "drafts are left"
            self.drafts.close()
        await self.verifier.worker.close()
        assert not self.engine.sequences_open, "sequences are left"
        self.engine.close()

    def _hear(self, event: object) -> None:
        if isinstance(event, Faulted) and event.code == "IDLE" and self.chat._loop.answering:
            self.stalled = True

    def _start_server(self) -> None:
        self.engine = ToyEngine(
            self.limits.stops, self.limits.max_context, vocab_size=VOCAB_SIZE, **MANNERS[self.limits.manner]
        )
        skill = self.limits.server_skill
        self.drafts = None if skill is None else ToyDrafts(self, self.engine, skill)
        settings = replace(SETTINGS, step_tokens=self.limits.step_tokens)
        self.verifier = Verifier(self.engine, settings, drafts=self.drafts, clock=self.loop.time)
        self.up = True

    async def _serve(self, end: ServerEnd) -> None:
        await Connection(end, self.verifier, Bearer()).serve()  # type: ignore[arg-type]

    def _under_way(self) -> float:
        return self.rng.random() * self.delay


@contextlib.asynccontextmanager
async def living(
    loop: VirtualLoop, limits: Limits, bundle: Any, rng: random.Random, store: Path | None = None
) -> AsyncIterator[World]:
    """A world whose chat has begun to connect."""
    world = World(loop, limits, bundle, rng, store)
    connecting = mock.patch("moa_runtime.transport.connect", world.link.connect)
    renewed = mock.patch("moa_runtime.drafting.draft_policy._RENEWED_AFTER", min(32, limits.credit))
    with connecting, renewed, mock.patch("moa_runtime.drafting.draft_policy._CREDIT", limits.credit):
        await world.chat.open(wait=False)
        yield world
        await world.end()
