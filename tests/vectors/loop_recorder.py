"""Random conversations of a drafting loop with the toy target, on a clock of their own."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict
from typing import Any

from moa_runtime.drafting.events import Draft
from moa_runtime.options import LoopSettings
from moa_runtime.session.handshake import fault
from moa_runtime.session.server import Verify
from moa_runtime.session.tree import depths
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_pair import LIMITS, PRINTS, STOP, VOCAB, Server, choice, wrong
from vectors import trace_json
from vectors.fixtures_draws import Draws
from vectors.loop_replay import PlayedLoop, Said

WALKS = 120
_STEPS = 160


class TimedServer(Server):
    """The toy verifier, with times, and at times with drafts of its own."""

    def __init__(self, draws: Draws) -> None:
        super().__init__(LIMITS)
        self.drafts = draws.flag()
        self.pass_s, self.token_s = 0.005 * 2 ** draws.whole(0, 5), 0.0002 * draws.whole(0, 10)
        self.skill = draws.share()
        self.busy = draws.share() < 0.2
        self._draws = draws

    def _greet(self, message: wire.ClientMessage, resume_token: str) -> list[wire.ServerMessage]:
        said = super()._greet(message, resume_token)
        if self.drafts and said[0].HasField("welcome"):
            said[0].welcome.capabilities.append(wire.CAPABILITY_DRAFTS)
        return said

    def _verify(self, work: Verify, *, sent: bool = True) -> wire.ServerMessage:
        said = super()._verify(work, sent=sent)
        tokens = len(work.draft) + work.supplied
        said.verdict.compute_us = int(1e6 * (self.pass_s + self.token_s * tokens) * (0.9 + 0.2 * self._draws.share()))
        said.verdict.draft_us = 1000 * len(work.draft) if work.pushed else 0
        said.verdict.drafts_wanted = self.busy
        said.verdict.sharing = self._draws.whole(1, 12) if self.busy else 0
        return said


class LoopWalk:
    """One walk.

    Attributes:
        steps: its trace.
    """

    def __init__(self, seed: int) -> None:
        self._draws = draws = Draws(100_000 + seed)
        self._server = TimedServer(draws)
        self._trip_s = 0.002 * 2 ** draws.whole(0, 7)
        self._step_s = 0.001 * 2 ** draws.whole(0, 4)
        self._skill = draws.share()
        self._now, self._free, self._serial = 1000.0, 0.0, 0
        self._coming: list[tuple[float, int, str, bytes]] = []
        self._connected = False
        self._stamp: tuple[int, float] | None = None
        said = self._created()
        self._played = PlayedLoop(said)
        self.steps: list[Said] = [{"call": "create", "args": said}]
        self._state: Said = {}

    def _created(self) -> Said:
        draws = self._draws
        manners = {"least_probability": 0.1 * draws.whole(0, 5), "repeated": 3, "longest": draws.whole(0, 30)}
        stand_in: Said = {"manners": manners if draws.flag() else None, "head_dim": 1}
        drafter = stand_in | {"needs_rows": draws.share() < 0.7}
        if draws.share() < 0.05:
            drafter["head_dim"] = 2
        shape = {"nodes": draws.whole(1, 16), "levels": draws.whole(0, 6), "width": draws.whole(1, 4)}
        fixed = {"kind": "fixed", "branches": draws.flag(), "lookahead": draws.whole(0, 3)}
        settings = LoopSettings(
            offline_limit=draws.one_of([0, 8, 256]),
            drafting=draws.one_of(["auto", "auto", "device", "server"]),
            offline=draws.one_of(["writer", "writer", "drafter", "off"]),
        )
        return {
            "fingerprints": asdict(PRINTS),
            "stop_tokens": [STOP],
            "policy": draws.one_of(["rollback", "keep", "ask"]),
            "row_encoding": wire.ROW_ENCODING_FLOAT16,
            "vocab_size": VOCAB,
            "drafter": drafter if draws.share() < 0.9 else None,
            "writer": stand_in | {"needs_rows": False} if draws.flag() else None,
            "settings": asdict(settings),
            "controller": shape | (fixed if draws.share() < 0.3 else {"kind": "throughput"}),
        }

    # -- the walk ------------------------------------------------------------------------------

    def walk(self) -> list[Said]:
        """A conversation in which anything happens."""
        self._connect()
        self._ask()
        while len(self.steps) < _STEPS:
            self._happen()
            self._go_on()
        return self.steps

    def _do(self, call: str, **args: Any) -> Said:
        came = self._played.do(call, args)
        changed, self._state = came["state"] != self._state, came["state"]
        kept = {key: value for key, value in came.items() if key != "state" or changed}
        self.steps.append({"call": call, "args": args} | kept)
        return came

    def _go_on(self) -> None:
        """Do the loop's next task and report its result."""
        todo = self._do("next", now=self._now)["todo"]
        if "draft" in todo:
            self._send()
            assert isinstance(self._played.todo, Draft)
            tree = self._tree(self._played.todo)
            seconds = self._step_s * len(tree["steps"]) * (0.8 + 0.4 * self._draws.share()) + 1e-4
            self._now += seconds
            self._do("drafted", tree=tree, seconds=seconds, now=self._now)
            self._send()
            self._arrive()
            return
        self._send()
        until = todo["wait"]
        times = [at for at in (until, self._coming[0][0] if self._coming else None) if at is not None]
        self._now = max(self._now, min(times)) if times else self._now + 0.5
        self._arrive()

    def _happen(self) -> None:
        """Something, now and then."""
        draws, loop = self._draws, self._played.loop
        what = draws.share()
        if not loop.answering:
            self._ask()
        elif not self._connected and what < 0.15:
            self._now += draws.one_of([0.1, 3.0])
            self._connect()
        elif not self._connected and what < 0.25:
            self._do("connecting")
            self._do("lost", why="nobody there", retry_in_s=0.5, now=self._now, on_purpose=False)
        elif what < 0.03 and self._connected:
            self._lose()
        elif what < 0.04:
            self._do("cancel")
        elif what < 0.06:
            conditions = {name: draws.share() < 0.3 for name in ("background", "low_power", "metered")}
            self._do("set_conditions", value=conditions)
        elif what < 0.07:
            self._do("set_policy", value=draws.one_of(["rollback", "keep", "ask"]))
        elif what < 0.08:
            self._do("set_offline", value=draws.one_of(["writer", "drafter", "off"]))
        elif what < 0.09:
            self._keep()
        elif what < 0.10:
            self._do("resend")
        elif what < 0.12 and self._connected:
            self._free = max(self._free, self._now) + 2.5  # a stall
        elif what < 0.14:
            self._trip_s = 0.002 * 2 ** draws.whole(0, 7)

    def _ask(self) -> None:
        draws, length = self._draws, len(self._played.loop.committed)
        kept = length if draws.flag() and length < 60 else draws.whole(0, min(length, 20))
        draft = draws.prompt() if draws.share() < 0.15 else []
        self._do(
            "ask",
            kept=kept,
            tokens=draws.prompt(12),
            seed=str(draws.one_of([0, 1, 2**64 - 1])),
            max_new_tokens=draws.one_of([0, 2, 10, 40]),
            while_away=draws.flag(),
            draft=draft,
        )

    def _keep(self) -> None:
        start, tokens = len(self._played.loop.committed), self._draws.prompt()
        if self._do("may_keep", start=start, tokens=tokens)["returns"]:
            self._do("keep", start=start, tokens=tokens)

    # -- the drafter ---------------------------------------------------------------------------

    def _tree(self, todo: Draft) -> Said:
        """A path that is right as often as its scores say, with branches if the budget allows them."""
        draws, budget = self._draws, todo.budget
        length = min(budget.nodes, budget.depth, budget.levels + draws.whole(0, 1))
        tokens: list[int] = []
        prefix = list(todo.prefix)
        while len(tokens) < length and (prefix + tokens)[-1] != STOP:
            right = choice(prefix + tokens)
            tokens.append(right if draws.share() < self._skill else wrong(right))
        each = math.log(max(0.05, self._skill))
        parents = list(range(len(tokens)))
        scores = [each * depth for depth in range(1, len(tokens) + 1)]
        for _ in range(draws.whole(0, 3) if budget.branches and tokens else 0):
            if len(tokens) < budget.nodes:
                parents.append(draws.whole(0, len(parents)))
                tokens.append(draws.whole(1, VOCAB - 1))
                scores.append((scores[parents[-1] - 1] if parents[-1] else 0.0) - 3.0)
        steps = [
            1 + draws.whole(0, budget.width - 1) for _ in range(min(budget.levels, max(depths(parents), default=0)))
        ]
        return {"tokens": tokens, "parents": parents, "scores": scores, "steps": steps}

    # -- the link ------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._do("connecting")
        self._do("opened")
        self._connected = True
        self._send()

    def _lose(self) -> None:
        draws = self._draws
        self._connected, self._stamp = False, None
        self._coming.clear()
        self._server.disconnected()
        purpose = draws.share() < 0.2
        self._do("lost", why="it broke", retry_in_s=draws.one_of([None, 1.0]), now=self._now, on_purpose=purpose)
        if draws.share() < 0.2:
            self._server.restart(LIMITS)
        self._server.go_on(draws.whole(0, 10))

    def _send(self) -> None:
        for said in self._do("frames_to_send", now=self._now)["frames"]:
            if self._connected:
                self._put(self._now + self._trip_s / 2, "up", trace_json.frame_bytes(said, wire.ClientMessage))

    def _put(self, at: float, kind: str, frame: bytes = b"") -> None:
        self._serial += 1
        heapq.heappush(self._coming, (at, self._serial, kind, frame))

    def _arrive(self) -> None:
        """All that has arrived by now."""
        while self._coming and self._coming[0][0] <= self._now:
            at, _, kind, frame = heapq.heappop(self._coming)
            if kind == "down":
                self._do("received", frame=trace_json.down(frame), now=self._now)
            else:
                self._serve(max(at, self._free), kind, frame)

    def _serve(self, at: float, kind: str, frame: bytes) -> None:
        """The server processes a frame, or continues within the credit."""
        draws = self._draws
        message = wire.ClientMessage.FromString(frame)
        event = message.WhichOneof("event")
        if event and (stamp := getattr(getattr(message, event), "stamp", 0)):
            self._stamp = stamp, at
        if event in ("prompt", "draft") and draws.share() < 0.05:
            code = draws.one_of([wire.FAULT_CODE_BUSY, wire.FAULT_CODE_INTERNAL])
            answers = [fault(code, "not now", retry_after_ms=300).SerializeToString()]
        elif kind == "push":
            answers = self._server.push(draws.whole(0, 4) if self._server.drafts else 0)
        else:
            answers = self._server.receive(frame, "resume")
        for answer in answers:
            said = wire.ServerMessage.FromString(answer)
            at += said.verdict.compute_us / 1e6
            which = said.WhichOneof("event")
            if self._stamp and which in ("verdict", "standing", "pong"):
                stamp, came = self._stamp
                echo = wire.Echo(stamp=stamp, held_us=int(1e6 * (at - came)))
                getattr(said, which).echo.CopyFrom(echo)
                self._stamp = None
            self._put(at + self._trip_s / 2, "down", said.SerializeToString(deterministic=True))
        self._free = at
        if self._server.session.pushes and not any(each[2] == "push" for each in self._coming):
            self._put(at, "push")


def loop_walks(count: int = WALKS) -> list[Said]:
    """Return the traces of the first walks."""
    return [{"name": f"loop {seed}", "steps": LoopWalk(seed).walk()} for seed in range(count)]
