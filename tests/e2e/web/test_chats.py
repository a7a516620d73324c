"""TypeScript clients on links that are cut, with verifiers and programs that are killed: the text is the target's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moa_bench.link import with_round_trip
from moa_bench.link.proxy import BackgroundLink, background_link
from support.system.killed import QUESTIONS, Setting, VerifierProgram, check
from support.web.typescript import client_command

pytestmark = pytest.mark.skipif(os.name == "nt", reason="forks and signals")

_ROUND_TRIP_MS = 10
#: Of a conversation, at most.
_HAPPENINGS = 6


_WITHIN_S = 120.0


class Client:
    """Conversation ``number`` of a program in Node, and the programs after it.

    Attributes:
        happened: how often what did before the conversation's end.
    """

    def __init__(
        self, web: Path, program: VerifierProgram, link: BackgroundLink, number: int, seed: int, engine: dict[str, str]
    ) -> None:
        self._program, self._link, self._number, self._engine = program, link, number, engine
        self._web, self._rng = web, random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._process = self._start()

    def live(self, happenings: int) -> None:
        """Have so much happen to it, and its conversation come to its end."""
        try:
            for _ in range(happenings):
                time.sleep(0.4 * self._rng.random())
                what = self._rng.choice(list(self.HAPPENINGS))
                if self._process.poll() is not None:
                    break
                self.happened[what] += 1
                self.HAPPENINGS[what](self)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_WITHIN_S)
            status = self._process.poll()
        finally:
            self._process.kill()
        assert status == 0, f"status {status} after {dict(self.happened)}: {self._log.read_text()}"

    def _cut(self) -> None:
        self._link.cut()
        time.sleep(self._rng.random())
        self._link.restore()

    def _restart(self) -> None:
        """Killed, not closed; the next one may have another mind who is to draft."""
        self._process.kill()
        self._process.communicate()
        self._process = self._start()

    def _hand_over(self) -> None:
        """A server that goes on by itself is told to stop, and to go on again."""
        self._tell({"conditions": {"background": True}})
        time.sleep(0.05)
        self._tell({"conditions": {}})

    def _for_a_while(self, what: str, value: Any, otherwise: Any) -> None:
        self._tell({what: value})
        time.sleep(0.5 * self._rng.random())
        self._tell({what: otherwise})

    def _tell(self, told: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its conversation has come to its end
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()

    #: By name.
    HAPPENINGS: ClassVar[dict[str, Callable[[Client], None]]] = {
        "a cut": _cut,
        "a broken link": lambda client: client._link.reset(),
        "another program": _restart,
        "another verifier": lambda client: client._program.kill("verifier"),
        "a hand-over": _hand_over,
        "a hidden page": lambda client: client._for_a_while("conditions", {"background": True}, {}),
        "a metered network": lambda client: client._for_a_while("conditions", {"metered": True}, {}),
        "offline by choice": lambda client: client._for_a_while("offline", True, False),
        "another network": lambda client: client._tell({"network": "changed"}),
    }

    @property
    def _log(self) -> Path:
        return self._program.setting.file("log", self._number)

    def _start(self) -> subprocess.Popen[bytes]:
        setting, number = self._program.setting, self._number
        samplings = [setting.sampling(number, answer) for answer in range(len(QUESTIONS))]
        command = client_command(
            self._web,
            setting.bundle,
            self._link.port,
            lambda kind: setting.file(kind, number),
            samplings,
            token="",
            questions=QUESTIONS,
            drafting=self._rng.choice(["auto", "device", "server"]),
            length=setting.length,
            **self._engine,
        )
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


@pytest.fixture
def tiny(tiny_target: Path, tiny_drafter: Path, web_bundle: Path, tmp_path: Path, unused_port: int) -> Setting:
    options = ("--model", str(tiny_target), "--drafter", str(tiny_drafter))
    return Setting(tmp_path, web_bundle, unused_port, options, 0.0, 64)


def converse(
    compiled: Path, setting: Setting, conversations: int, seed: int, engine: dict[str, str] | None = None
) -> Counter[str]:
    """Have a number of conversations, one after the other, and check their results; return the happenings.

    Args:
        engine: ``engine`` and ``ort`` of :func:`support.web.typescript.client_command`; None for Node.
    """
    rng, happened, program = random.Random(seed), Counter[str](), VerifierProgram(setting)
    try:
        with background_link(with_round_trip(_ROUND_TRIP_MS), "127.0.0.1", setting.port) as link:
            for number in range(conversations):
                try:
                    client = Client(compiled, program, link, number, rng.randrange(2**32), engine or {})
                    client.live(rng.randint(1, _HAPPENINGS))
                    check(program, number)
                except Exception as error:
                    raise AssertionError(f"seed {seed}, conversation {number}: {error}") from error
                happened += client.happened
    finally:
        program.close()
    assert "Traceback" not in program.log and "moa-serve: error" not in program.log, program.log
    print(f"{conversations} conversations, {sum(happened.values())} happenings: {dict(happened)}")
    return happened


def test_six_conversations_to_which_things_happen(compiled: Path, tiny: Setting) -> None:
    assert sum(converse(compiled, replace(tiny, temperature=0.8), 6, 1).values()) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_hundred_conversations_to_which_things_happen(compiled: Path, tiny: Setting, temperature: float) -> None:
    happened = converse(compiled, replace(tiny, temperature=temperature), 100, random.randrange(2**32))
    assert min(happened.values()) > 0 and len(happened) == len(Client.HAPPENINGS)
