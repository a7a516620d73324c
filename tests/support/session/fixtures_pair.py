"""Two sessions connected in memory: a toy target whose choice depends on the whole prefix, and a lossy link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moa_runtime.manifest import Fingerprints
from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Origin, Policy, RowsReceived, SessionEvent
from moa_runtime.session.handshake import Limits, check_hello, fault
from moa_runtime.session.server import RowsWork, ServerSession, Verify, parse_client_message
from moa_runtime.session.tree import DraftTree, accepted_path, chain, depths
from moa_runtime.wire.moa.v1 import session_pb2 as wire

VOCAB, STOP = 13, 0
PRINTS = Fingerprints("target", "tokenizer", "drafter")
LIMITS = Limits(max_context=96, max_draft_tokens=16)


def choice(prefix: Sequence[int]) -> int:
    """The toy target's choice: a hash of the prefix; about every thirtieth token ends the turn."""
    state = 17
    for token in prefix:
        state = (state * 31 + token + 7) % 100_003
    return STOP if state % 31 == 0 else 1 + state % (VOCAB - 1)


def decode(prompt: Sequence[int], max_length: int) -> list[int]:
    """Return the tokens of the target alone after ``prompt``, stop token included."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(choice(tokens))
        if tokens[-1] == STOP:
            break
    return tokens


def wrong(token: int) -> int:
    """Return another token, which does not end the turn."""
    return 1 + token % (VOCAB - 1)


def rows_of(tokens: Sequence[int]) -> list[float]:
    """Return the memory row of each token: one number that depends on the tokens up to it."""
    rows, state = [], 0
    for token in tokens:
        state = (state * 3 + token + 1) % 1009
        rows.append(float(state))
    return rows


class Server:
    """A ServerSession with the toy target as engine, fed with the frames of one connection after another.

    Attributes:
        capabilities: those of its Welcome.
    """

    def __init__(self, limits: Limits) -> None:
        self.passes = 0
        self.capabilities = [wire.CAPABILITY_UNSOLICITED_DRAFTS]
        self._greeted = False
        self.restart(limits)

    def restart(self, limits: Limits) -> None:
        """Lose all conversations, as after SIGKILL."""
        self.session = ServerSession(limits, VOCAB, [STOP])
        self._greeted = False

    def disconnected(self) -> None:
        """End the connection."""
        self._greeted = False

    def receive(self, data: bytes, resume_token: str, *, more: bool = False) -> list[bytes]:
        """Return the frames that answer a frame; memory rows follow if no further frame is waiting."""
        message = parse_client_message(data)
        if isinstance(message, wire.ServerMessage):
            return [message.SerializeToString()]
        if not self._greeted:
            return [answer.SerializeToString() for answer in self._greet(message, resume_token)]
        answer = self.session.receive(message)
        said = [] if answer is None else [self._verify(answer) if isinstance(answer, Verify) else answer]
        return [each.SerializeToString() for each in [*said, *([] if more else self._rows())]]

    def push(self, drafted: int = 0, *, own: bool = True) -> list[bytes]:
        """Return the frames of one piece of unrequested work: a verdict within the credit, or rows.

        Args:
            drafted: tokens that are verified for it.
            own: whether the server drafts them, all right; else they are the client's, if it sent any.
        """
        if not self._greeted:
            return []
        said, work = [], self.session.next_work()
        if isinstance(work, Verify):
            draft = decode(work.prefix, len(work.prefix) + drafted)[len(work.prefix) :]
            tokens, parents, stamp = tuple(draft), tuple(chain(len(draft))), 0
            if not own and (found := self.session.newest_draft()) is not None:
                tokens, parents, stamp = found.tokens[:drafted], found.parents[:drafted], found.stamp
            said = [self._verify(replace(work, draft=tokens, parents=parents), stamp)]
        elif work is not None:
            self._add_rows(work.start)
        rows = self.session.take_rows()
        return [each.SerializeToString() for each in [*said, *([] if rows is None else [rows])]]

    def go_on(self, tokens: int) -> None:
        """Continue the answer for a disconnected or silent client; the last piece of work is abandoned."""
        for _ in range(tokens):
            if (
                not (self._greeted and self.session.pushes)
                and (work := self.session.next_background_work()) is not None
            ):
                self._verify(work, sent=False)
        if not (self._greeted and self.session.pushes):
            self.session.next_background_work()

    def _greet(self, message: wire.ClientMessage, resume_token: str) -> list[wire.ServerMessage]:
        if message.WhichOneof("event") != "hello":
            return [fault(wire.FAULT_CODE_PROTOCOL, "no Hello")]
        refused = check_hello(message.hello, PRINTS)
        self._greeted = refused is None
        if refused is not None:
            return [refused]
        return self.session.greet(message.hello, resume_token, capabilities=self.capabilities)

    def _rows(self) -> list[wire.ServerMessage]:
        """Return the memory rows that are due; only a few after a pushed verdict."""
        said = []
        work = self.session.next_work()
        while isinstance(work, RowsWork):
            self._add_rows(work.start)
            work = self.session.next_work()
        while (rows := self.session.take_rows()) is not None:
            said.append(rows)
            if self.session.pushes:
                break
        return said

    def _add_rows(self, start: int) -> None:
        keys = np.array(rows_of(self.session.committed)[start:], np.float32).reshape(-1, 1, 1)
        self.session.add_rows(start, keys, -keys)

    def _verify(self, work: Verify, stamp: int = 0, *, sent: bool = True) -> wire.ServerMessage:
        self.passes += 1
        paths: list[list[int]] = [list(work.prefix)]
        for token, parent in zip(work.draft, work.parents, strict=True):
            paths.append([*paths[parent], token])
        choices = [choice(path) for path in paths]
        accepted = accepted_path(work.draft, work.parents, choices)
        token = choices[accepted[-1] + 1 if accepted else 0]
        verdict = self.session.decide(work, accepted, token, draft_stamp=stamp, sent=sent)
        if work.rows_from is not None:
            self._add_rows(work.rows_from)
        return verdict


class Pair:
    """A client, a server and two queues of frames between them.

    Attributes:
        rows: what the drafter's memory holds, one number a row.
        taken: of each frame that the client took, what was unconfirmed before, and the events.
    """

    def __init__(self, policy: Policy = Policy.ROLLBACK, *, trees: bool = True) -> None:
        self.client = ClientSession(PRINTS, stop_tokens=[STOP], policy=policy, row_encoding=wire.ROW_ENCODING_FLOAT16)
        self.server = Server(replace(LIMITS, trees=trees))
        self.up: list[bytes] = []
        self.down: list[bytes] = []
        self.events: list[SessionEvent] = []
        self.rows: list[float] = []
        self.taken: list[tuple[tuple[tuple[int, Origin], ...], list[SessionEvent]]] = []

    def reopen(self, snapshot: object) -> None:
        """End the client's process and restore the snapshot in another."""
        self.cut()
        self.client = ClientSession.restore(
            snapshot, PRINTS, stop_tokens=[STOP], row_encoding=wire.ROW_ENCODING_FLOAT16
        )
        self.rows = []

    def forget_rows(self, length: int) -> None:
        """Drop rows as the application does after a truncation."""
        del self.rows[length:]

    def connect(self) -> None:
        self.client.connect()
        self.flush()

    def cut(self) -> None:
        self.client.disconnected()
        self.server.disconnected()
        self.up.clear()
        self.down.clear()

    def flush(self) -> None:
        self.up += self.client.frames_to_send()

    def deliver_up(self, index: int = 0) -> None:
        frame = self.up.pop(index)
        self.down += self.server.receive(frame, "resume", more=bool(self.up))

    def deliver_down(self, index: int = 0) -> None:
        before = self.client.unconfirmed
        events = self.client.receive(self.down.pop(index))
        for event in events:
            if isinstance(event, RowsReceived):
                assert event.start <= len(self.rows), "memory rows are missing"
                self.rows[event.start :] = [float(key) for key in event.keys[:, 0, 0]]
        self.taken.append((before, events))
        self.events += events
        self.flush()

    def push(self, drafted: int = 0, *, own: bool = True) -> bool:
        """Do one piece of unrequested work at the server, if there is any; return whether there was."""
        said = self.server.push(drafted, own=own)
        self.down += said
        return bool(said)

    def settle(self) -> None:
        """Deliver everything in order until nothing is in flight and the server has nothing to push."""
        self.arrive()
        while self.push():
            self.arrive()

    def arrive(self) -> None:
        """Deliver everything that is in flight, in order."""
        self.flush()
        while self.up or self.down:
            if self.up:
                self.deliver_up()
            elif self.down:
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
            before = len(self.client.committed)
            if not self.client.propose(most):
                self.client.resend()
            self.settle()
            if len(self.client.committed) == before and self.client.credit_open:  # a pushed verdict was lost
                self.cut()
                self.connect()
                self.settle()
        raise AssertionError("the answer did not end")

    def write(self, count: int, right: bool, origin: Origin = Origin.DRAFTED) -> None:
        """Draft ``count`` tokens: those of the target, or the same with the last one wrong."""
        for step in range(count):
            if self.client.tentative_finish is not None:
                return
            token = choice(self.client.tokens)
            if not right and step == count - 1:
                token = wrong(token)
            self.client.extend([token], origin)

    def tree(
        self, branches: Sequence[tuple[int, Sequence[bool]]], by_level: bool, base: int | None = None
    ) -> DraftTree:
        """Return a tree of the tentative tokens as a path, with branches.

        Args:
            branches: the node that each hangs on (taken modulo their number), and which of its tokens are the target's.
            by_level: whether nodes are in the order of their depths, so that a cut takes the deepest ones.
            base: position of the tree, which then has branches only; None for the end of the committed tokens.
        """
        client = self.client
        start, stem = (len(client.committed), client.tentative) if base is None else (base, ())
        tokens, parents = list(stem), chain(len(stem))
        texts = [client.tokens[: start + count] for count in range(len(tokens) + 1)]
        for place, rights in branches:
            node = place % len(texts)
            for right in rights:
                token = choice(texts[node]) if right else wrong(choice(texts[node]))
                tokens.append(token)
                parents.append(node)
                texts.append([*texts[node], token])
                node = len(tokens)
        if by_level:
            levels = depths(parents)
            order = sorted(range(len(tokens)), key=levels.__getitem__)
            numbers = {0: 0} | {old + 1: new + 1 for new, old in enumerate(order)}
            tokens, parents = [tokens[old] for old in order], [numbers[parents[old]] for old in order]
        return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))

    @property
    def told(self) -> list[SessionEvent]:
        """The events without those of memory rows."""
        return [event for event in self.events if not isinstance(event, RowsReceived)]
