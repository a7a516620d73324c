"""What a stranger, or a client with a token, may send to stall a verifier; each attack is one connection's life."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event

from moa_runtime.manifest import Fingerprints
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.grammars import ARRAYS
from support.server.in_memory import draft, hello, prompt
from support.server.running import trusting

#: Of attacks by many at once; others have 4.
_CONNECTIONS = {"idle sockets": 300, "slow bodies": 300, "half handshakes": 300}
CONT, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


@dataclass(frozen=True)
class Victim:
    """A verifier or gateway under attack, and the path of its POST requests. Without a right token in ``headers`` the
    attacker is a stranger."""

    port: int
    fingerprints: Fingerprints
    headers: str = ""
    tls: bool = False
    path: str = "/v1/decode"

    def open(self) -> socket.socket:
        raw = socket.create_connection(("127.0.0.1", self.port), 5)
        return trusting().wrap_socket(raw) if self.tls else raw

    def head(self, line: str, more: str = "") -> bytes:
        return f"{line} HTTP/1.1\r\nHost: localhost\r\n{self.headers}{more}\r\n".encode()

    def upgraded(self) -> socket.socket:
        """A WebSocket; with a Welcome, if the token is right."""
        connected = self.open()
        fields = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        connected.sendall(self.head("GET /v1/session", f"{fields}Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"))
        if b" 101 " not in connected.recv(4096):
            raise ConnectionError("refused")
        return connected

    def session(self) -> socket.socket:
        connected = self.upgraded()
        connected.sendall(message(hello("", wire.ROW_ENCODING_INT8, self.fingerprints)))
        connected.recv(4096)
        return connected


def frame(opcode: int, payload: bytes = b"", fin: bool = True) -> bytes:
    """A WebSocket frame with a mask of zeros."""
    head = bytes([(0x80 if fin else 0) | opcode])
    if len(payload) < 126:
        return head + bytes([0x80 | len(payload)]) + bytes(4) + payload
    wide = len(payload) >= 1 << 16
    size = struct.pack("!BQ", 0xFF, len(payload)) if wide else struct.pack("!BH", 0xFE, len(payload))
    return head + size + bytes(4) + payload


def message(said: wire.ClientMessage) -> bytes:
    return frame(BINARY, said.SerializeToString())


#: One connection's life, until the deadline at most.
Attack = Callable[[Victim, float], None]


def _again(connected: socket.socket, data: bytes, until: float) -> None:
    while time.monotonic() < until:
        connected.sendall(data)


def _asked(line: str, more: str, body: bytes) -> Attack:
    """A request, a POST by default, and its body again and again."""

    def attack(victim: Victim, until: float) -> None:
        with victim.open() as connected:
            connected.sendall(victim.head(line or f"POST {victim.path}", more))
            _again(connected, body, until)

    return attack


def _headers(fields: str) -> Attack:
    def attack(victim: Victim, until: float) -> None:
        with victim.open() as connected:
            connected.sendall(victim.head("GET /x", fields))
            connected.recv(4096)

    return attack


def _frames(sent: bytes, session: bool) -> Attack:
    """Frames again and again, by a session or before its Hello."""

    def attack(victim: Victim, until: float) -> None:
        with victim.session() if session else victim.upgraded() as connected:
            _again(connected, sent, until)

    return attack


def _prompts(make: Callable[[int], wire.ClientMessage], drafted: Sequence[int] = ()) -> Attack:
    """Epoch after epoch, each with a Prompt, and perhaps with a Draft after the first token of its answer."""

    def attack(victim: Victim, until: float) -> None:
        with victim.session() as connected:
            connected.settimeout(0.2)
            epoch = 0
            while time.monotonic() < until:
                epoch += 1
                asked = make(epoch)
                connected.sendall(message(asked))
                with contextlib.suppress(TimeoutError):
                    connected.recv(1 << 20)
                    if drafted:
                        connected.sendall(message(draft(epoch, len(asked.prompt.tokens) + 1, drafted)))
                        connected.recv(1 << 20)

    return attack


def _epochs(rows_from: int) -> Attack:
    """New prompts, and perhaps their memory rows from the first on."""
    return _prompts(lambda epoch: prompt(epoch, 0, list(range(5, 45)), rows_from=rows_from))


def _grammars(kind: int, text: str, answer: Sequence[int] = (), drafted: Sequence[int] = ()) -> Attack:
    """New prompts with another grammar each (NUMBER in its text), and perhaps with an answer so far or a Draft."""

    def make(epoch: int) -> wire.ClientMessage:
        said = prompt(epoch, 0, [5, *answer])
        said.prompt.answer_from = 1 if answer else 0
        said.prompt.sampling.grammar.kind = kind
        said.prompt.sampling.grammar.text = text.replace("NUMBER", str(time.monotonic_ns()))
        return said

    return _prompts(make, drafted)


def _idle(victim: Victim, until: float) -> None:
    with victim.open():
        time.sleep(max(0.0, min(15.0, until - time.monotonic())))


def _slow_body(victim: Victim, until: float) -> None:
    with victim.open() as connected:
        connected.sendall(victim.head(f"POST {victim.path}", "Content-Length: 1000000\r\n"))
        while time.monotonic() < until:
            connected.sendall(b" ")
            time.sleep(0.2)


def _segments(victim: Victim, until: float) -> None:
    """A header in segments of a byte."""
    with victim.open() as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in victim.head(f"POST {victim.path}", "x: " + "y" * 60000 + "\r\n"):
            connected.sendall(bytes([byte]))
            if time.monotonic() > until:
                return


def _never_reads(victim: Victim, until: float) -> None:
    with victim.session() as connected:
        connected.settimeout(max(0.1, until - time.monotonic()))
        epoch = 0
        while time.monotonic() < until:
            epoch += 1
            connected.sendall(message(prompt(epoch, 0, list(range(5, 45)), rows_from=1)))
            time.sleep(0.01)


def _handshakes(victim: Victim, until: float) -> None:
    while time.monotonic() < until:
        victim.open().close()


def _requests(line: str, more: str = "") -> Attack:
    """One request a connection."""

    def attack(victim: Victim, until: float) -> None:
        while time.monotonic() < until:
            with victim.open() as connected:
                connected.sendall(victim.head(line, more))
                connected.recv(4096)

    return attack


def _half_handshakes(victim: Victim, until: float) -> None:
    """The beginning of a ClientHello, and then a byte now and then."""
    with socket.create_connection(("127.0.0.1", victim.port), 5) as connected:
        connected.sendall(bytes.fromhex("16030100c8010000c40303"))
        while time.monotonic() < until:
            connected.sendall(b"x")
            time.sleep(0.2)


_CHUNKED = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
_PROMPT = message(prompt(1, 0, list(range(5, 45))))
_TERMINALS = " & ".join(f"/(.*a{number}.*)/" for number in range(100))  # whose product has a state for each subset
_AMBIGUOUS = wire.GRAMMAR_KIND_LARK, 'start: "NUMBER"? (s "b")*\ns: s s | /[^b]/ | ""'
_LETTERS = list(range(5, 45)) * 10  # each a token
_ALIKE = wire.GRAMMAR_KIND_JSON_SCHEMA, json.dumps({"title": "NUMBER", **ARRAYS})
_BEGUN, _OPENED = [61, 4, 90, 4, 14], [61] * 8  # ["x", and [[[[[[[[ of the tiny target
_EMPTY_PARTS = bytes(
    byte
    for field in (wire.ClientMessage.PROMPT_FIELD_NUMBER, wire.ClientMessage.DRAFT_FIELD_NUMBER)
    for byte in (field << 3 | 2, 0)
)

#: Attacks that need no token.
STRANGERS: dict[str, Attack] = {
    "1-byte chunks": _asked("", _CHUNKED, b"1\r\nx\r\n" * 40000),
    "12,500 header lines": _headers("a:b\r\n" * 12500),
    "chunk extensions": _asked("", _CHUNKED, b"1;a=b\r\nx\r\n" * 25000),
    "folded headers": _headers("a: b\r\n" + " c\r\n" * 12000),
    "pipelined requests": _asked("GET /healthz", "", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000),
    "idle sockets": _idle,
    "slow bodies": _slow_body,
    "header byte by byte": _segments,
    "handshakes": _handshakes,
    "requests": _requests("GET /healthz"),
    "refused upgrades": _requests("GET /v1/session", "Upgrade: websocket\r\nConnection: Upgrade\r\n"),
    "long addresses": _requests(f"GET /{'%61' * 5000}"),
    "half handshakes": _half_handshakes,
}

#: Attacks by a session.
MEMBERS: dict[str, Attack] = {
    "1-byte chunks with a token": STRANGERS["1-byte chunks"],
    "tiny frames": _frames(frame(BINARY, b"x") * 30000, session=True),
    "tiny frames before Hello": _frames(frame(BINARY, b"x") * 30000, session=False),
    "text frames": _frames(frame(TEXT, b"x") * 30000, session=True),
    "pings": _frames(frame(PING) * 30000, session=True),
    "pongs": _frames(frame(PONG) * 30000, session=True),
    "empty fragments": _frames(frame(BINARY, b"x", False) + frame(CONT, b"", False) * 30000, session=True),
    "huge fragments": _frames(frame(CONT, bytes(1 << 20), False), session=True),
    "same prompt": _frames(_PROMPT * 300, session=True),
    "stale drafts": _frames(_PROMPT + message(draft(1, 40, [9] * 8)) * 1000, session=True),
    "wire pings": _frames(message(wire.ClientMessage(ping=wire.Ping(stamp=1))) * 3000, session=True),
    "new epochs": _epochs(0),
    "rows from 0 in new epochs": _epochs(1),
    "never reads": _never_reads,
    "grammars that compile for minutes": _grammars(wire.GRAMMAR_KIND_LARK, f"start: A\nA: {_TERMINALS} & /.*NUMBER.*/"),
    "answers of an ambiguous grammar": _grammars(*_AMBIGUOUS, answer=_LETTERS),
    "drafts of an ambiguous grammar": _grammars(*_AMBIGUOUS, drafted=_LETTERS),
    "answers of arrays that begin alike": _grammars(*_ALIKE, answer=[*_BEGUN, *_OPENED]),
    "drafts of arrays that begin alike": _grammars(*_ALIKE, drafted=[*_BEGUN[1:], *_OPENED]),
    "parts that replace each other": _frames(frame(BINARY, _EMPTY_PARTS * 50_000), session=True),
}


def keep_up(attack: Attack, victim: Victim, seconds: float) -> int:
    """Connect one after the other for ``seconds``. Returns the number of connections."""
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        count += 1
        try:
            attack(victim, until)
        except OSError:
            time.sleep(0.01)
    return count


def attack_until(name: str, port: int, fingerprints: Fingerprints, stop: Event) -> None:
    """Attack over many connections until told to stop; the target of a process."""
    made, victim = {**STRANGERS, **MEMBERS}[name], Victim(port, fingerprints)

    def on() -> None:
        while not stop.is_set():
            keep_up(made, victim, 0.5)

    for _ in range(_CONNECTIONS.get(name, 4)):
        threading.Thread(target=on, daemon=True).start()
    stop.wait()
