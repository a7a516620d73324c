"""Two sessions wired in memory: a toy target whose choice depends on the whole prefix, and a lossy link."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Committed, Event, Finished, Origin, Policy
from moa_runtime.session.handshake import Fingerprints, Limits, check_hello
from moa_runtime.session.rows import encode_rows
from moa_runtime.session.server import ServerSession, Verify, parse_client_message
from moa_runtime.session.tree import accepted_path
from moa_runtime.wire.moa.v1 import session_pb2 as wire

VOCAB, STOP = 13, 0
PRINTS = Fingerprints("target", "tokenizer", "drafter")
LIMITS = Limits(max_context=96, max_draft_tokens=16)


def choice(prefix: Sequence[int]) -> int:
    """The toy target: a hash of the prefix; it ends its turn about every thirtieth token."""
    state = 17
    for token in prefix:
        state = (state * 31 + token + 7) % 100_003
    return STOP if state % 31 == 0 else 1 + state % (VOCAB - 1)


def decode(prompt: Sequence[int], max_length: int) -> list[int]:
    """What the target alone writes after ``prompt``, stop token included."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(choice(tokens))
        if tokens[-1] == STOP:
            break
    return tokens


def row_of(position: int) -> float:
    return float(position % 100)


class Server:
    """A ServerSession with the toy target as engine, fed with frames."""

    def __init__(self) -> None:
        self.session = ServerSession(LIMITS, VOCAB, [STOP])
        self.passes = 0

    def restart(self) -> None:
        """All conversations are lost, as after SIGKILL."""
        self.session = ServerSession(LIMITS, VOCAB, [STOP])

    def receive(self, data: bytes, resume_token: str) -> list[bytes]:
        message = parse_client_message(data)
        if isinstance(message, wire.ServerMessage):
            return [message.SerializeToString()]
        if message.WhichOneof("event") == "hello":
            refused = check_hello(message.hello, PRINTS)
            return [(refused or self.session.welcome(resume_token)).SerializeToString()]
        work = self.session.receive(message)
        if work is None:
            return []
        if isinstance(work, wire.ServerMessage):
            return [work.SerializeToString()]
        return [self._verify(work).SerializeToString()]

    def _verify(self, work: Verify) -> wire.ServerMessage:
        self.passes += 1
        paths: list[list[int]] = [list(work.prefix)]
        for token, parent in zip(work.draft, work.parents, strict=True):
            paths.append([*paths[parent], token])
        choices = [choice(path) for path in paths]
        accepted = accepted_path(work.draft, work.parents, choices)
        decision = self.session.decide(work, accepted, choices[accepted[-1] + 1 if accepted else 0])
        keys = np.array([row_of(p) for p in decision.rows], np.float32).reshape(-1, 1, 1)
        decision.verdict.rows.CopyFrom(encode_rows(decision.rows.start, keys, -keys, wire.ROW_ENCODING_FLOAT16))
        return wire.ServerMessage(verdict=decision.verdict)


class Pair:
    """A client, a server and two queues of frames between them."""

    def __init__(self, policy: Policy = Policy.ROLLBACK) -> None:
        self.client = ClientSession(PRINTS, stop_tokens=[STOP], policy=policy, row_encoding=wire.ROW_ENCODING_FLOAT16)
        self.server = Server()
        self.up: list[bytes] = []
        self.down: list[bytes] = []
        self.events: list[Event] = []

    def connect(self) -> None:
        self.client.connect()
        self.flush()

    def cut(self) -> None:
        self.client.disconnected()
        self.up.clear()
        self.down.clear()

    def flush(self) -> None:
        self.up += self.client.frames_to_send()

    def deliver_up(self, index: int = 0) -> None:
        self.down += self.server.receive(self.up.pop(index), "resume")

    def deliver_down(self, index: int = 0) -> None:
        self.events += self.client.receive(self.down.pop(index))
        self.flush()

    def settle(self) -> None:
        """Deliver everything in order until nothing is under way."""
        self.flush()
        while self.up or self.down:
            if self.up:
                self.deliver_up()
            else:
                self.deliver_down()

    def finish(self, most: int = 4) -> None:
        """Heal the link and run the answer to its end, without drafting anything more."""
        if self.client.link is not LinkState.UP:
            self.cut()
            self.connect()
            self.settle()
        for _ in range(400):
            if not self.client.answering:
                return
            if not self.client.propose(most):
                self.client.resend()
            self.settle()
        raise AssertionError("the answer did not end")

    def write(self, count: int, right: bool, origin: Origin = Origin.DRAFTED) -> None:
        """Draft ``count`` tokens: the target's own, or the same with the last one wrong."""
        for step in range(count):
            if self.client.tentatively_finished:
                return
            token = choice(self.client.tokens)
            if not right and step == count - 1:
                token = 1 + token % (VOCAB - 1)
            self.client.extend([token], origin)

    def committed_by_events(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Committed) for t in e.tokens]

    @property
    def finished(self) -> bool:
        return any(isinstance(e, Finished) for e in self.events)
