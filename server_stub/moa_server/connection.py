"""One WebSocket connection of a client: handshake, one answer after another, and the frames that are read ahead."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from starlette.websockets import WebSocket, WebSocketDisconnect

from moa_runtime.errors import MoaError
from moa_runtime.session.events import GrammarState
from moa_runtime.session.handshake import check_hello, fault
from moa_runtime.session.server import ServerSession, Verify, parse_client_message, parse_grammar
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import Bearer
from moa_server.edge.rate_limits import Kind
from moa_server.logging import add_log_fields, log_unexpected
from moa_server.scheduling.step_drafts import MOST_US
from moa_server.scheduling.verify_job import GivenUpError
from moa_server.sessions import Conversation, OlderConnectionError, SessionWork, busy
from moa_server.settings import Settings
from moa_server.unless import LeftError, unless

if TYPE_CHECKING:
    from moa_server.app import Verifier

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Seconds of silence after which an answer continues without its client; most rounds take less.
_SILENCE_S = 2.0
#: Pause after a frame that needs no further handling, as a multiple of the processor time of parsing it.
_REST = 50


class _CloseError(Exception):
    """The connection is to be closed, or already is; ``code`` is None for the latter."""

    def __init__(self, code: int | None, why: str) -> None:
        self.code, self.why = code, why


class Connection:
    """Serves one accepted WebSocket until it ends. Invalid frames get a fault.

    The timeline gets a mark ``receive`` and the span ``send`` of each frame, and what :class:`SessionWork` adds.

    Args:
        bearer: owner of the connection; work over its rate limits is delayed.
    """

    def __init__(self, websocket: WebSocket, verifier: Verifier, bearer: Bearer) -> None:
        self._websocket, self._verifier, self._bearer = websocket, verifier, bearer
        self._budgets = verifier.authenticator.budgets(bearer)
        self._settings, self._metrics, self._timeline = verifier.settings, verifier.metrics, verifier.timeline
        self._work = SessionWork(verifier, self._budgets)
        self._opened = time.monotonic()
        self._epoch = 0  # of the frame that is being answered
        self._stamped: tuple[int, float] | None = None  # a client's stamp to echo, and its arrival time
        self._greeted: tuple[Conversation, asyncio.Event] | None = None  # with this connection's claim to it
        self._pings = PingResponder(self._send)
        # A track for each connection: the last send of one that hangs may last into the next one's work.
        self._track = self._work.track = "no session"
        self._reader = FrameReader(websocket, self._settings, self._note, self._work.abandon)

    def leave(self) -> None:
        """Answer the received frames, then close: the verifier is shutting down."""
        self._reader.end(CloseReason.LEAVING)

    async def serve(self) -> None:
        """Serve until the connection has ended."""
        most = self._verifier.authenticator.most_sessions(self._bearer, self._settings.max_sessions)
        counted = self._budgets.open_session(most)
        unwatch = self._verifier.authenticator.watch(self._bearer, lambda: self._reader.end(CloseReason.WITHDRAWN))
        why = "the verifier ended"
        try:
            if not counted:
                text = f"this token may have {most} sessions at once; close one"
                await self._refuse(busy(text, self._settings), TRY_AGAIN_LATER)
            conversation, claim = await self._greet()
            watching = asyncio.create_task(self._watch(claim))
            try:
                while True:
                    if self._reader.ready or not await self._go_on(conversation, claim):
                        await self._answer(conversation, claim, await self._next_of(conversation))
            finally:
                watching.cancel()
                self._verifier.store.detach(conversation, claim)
                self._verifier.worker.rest(conversation.sequence)
        except _CloseError as closed:
            why = closed.why
            if closed.code is not None:
                await self._close(closed.code)
        except WebSocketDisconnect:
            why = CloseReason.LEFT.value
        except GivenUpError:
            why = CloseReason.LEAVING.value
            await self._close(GOING_AWAY)
        except Exception as error:
            why = "the verifier failed"
            log_unexpected(_log, "a session", error)
            with contextlib.suppress(Exception):  # whatever went wrong may go wrong again
                text = "the verifier failed; connecting again may help"
                await self._send(fault(wire.FAULT_CODE_INTERNAL, text, retry_after_ms=self._settings.retry_after_ms))
            await self._close(FAILED)
        finally:
            unwatch()
            if counted:
                self._budgets.close_session()
            self._log_end(why)
            await asyncio.gather(self._reader.close(), self._pings.close())
            del self._reader, self._pings  # they call this one: a circle would keep all until garbage is collected

    # -- what happens while a job is under way -----------------------------------------------------

    def _note(self, message: wire.ClientMessage) -> bool:
        """Handle the arrival of a frame; return whether it needs no further handling."""
        if self._overrules(message):
            self._work.abandon()
        return self._greeted is not None and (self._pings.take(message) or self._keep_draft(message, *self._greeted))

    def _keep_draft(self, message: wire.ClientMessage, conversation: Conversation, claim: asyncio.Event) -> bool:
        """Keep an unsolicited draft, or drop it if many frames arrive; return whether it is one."""
        if not message.draft.unsolicited:
            return False
        if not self._ended(claim) and self._budgets.take_spare(Kind.FRAMES, 1):
            conversation.session.keep_draft(message.draft)
            self._stamped = (message.draft.stamp, time.monotonic()) if message.draft.stamp else self._stamped
        return True

    def _overrules(self, message: wire.ClientMessage) -> bool:
        """Whether a frame ends the answer or begins another, so that work for the present one is wasted."""
        event = message.WhichOneof("event")
        return event == "bye" or (event in ("prompt", "cancel") and getattr(message, event).epoch > self._epoch)

    async def _watch(self, claim: asyncio.Event) -> None:
        await claim.wait()
        self._reader.end(CloseReason.REPLACED)

    # -- frames ------------------------------------------------------------------------------------

    async def _greet(self) -> tuple[Conversation, asyncio.Event]:
        """Receive the Hello and send the Welcome."""
        store, fingerprints = self._verifier.store, self._verifier.engine.fingerprints
        message = await self._next_frame(min(self._settings.hello_seconds, self._settings.idle_seconds))
        if isinstance(message, wire.ServerMessage):
            await self._refuse(message, REFUSED)
        if message.WhichOneof("event") != "hello":
            text = f"a connection begins with Hello, not with {message.WhichOneof('event')}"
            await self._refuse(fault(wire.FAULT_CODE_PROTOCOL, text), REFUSED)
        hello = message.hello
        if (refused := check_hello(hello, fingerprints)) is not None:
            await self._refuse(refused, REFUSED)
        if hello.row_encoding not in wire.RowEncoding.values():
            text = f"this verifier knows no row encoding {hello.row_encoding}"
            await self._refuse(fault(wire.FAULT_CODE_PROTOCOL, text), REFUSED)
        try:
            attached = store.attach(hello.resume.token, self._bearer, hello.resume.connection)
        except OlderConnectionError:
            text = "a newer connection continues this conversation"
            await self._refuse(fault(wire.FAULT_CODE_REPLACED, text), REFUSED)
        if attached is None:
            text = f"this verifier already serves {len(store)} sessions; try again later"
            await self._refuse(busy(text, self._settings), TRY_AGAIN_LATER)
        conversation, claim = attached
        # A client sends its Hello as soon as it hears that the WebSocket is open.
        conversation.session.round_trip_us = max(1, min(int(1e6 * (self._reader.taken_at - self._opened)), MOST_US))
        self._track = self._work.track = f"session {conversation.number}, connection {conversation.connections}"
        add_log_fields(session=conversation.number, connection=conversation.connections)
        try:
            async with conversation.lock:  # the connection before may still be answering
                greeting = conversation.session.greet(
                    hello,
                    conversation.token,
                    rows=bool(fingerprints.drafter),
                    capabilities=[
                        wire.CAPABILITY_UNSOLICITED_DRAFTS,
                        wire.CAPABILITY_PENALTIES,
                        wire.CAPABILITY_LOGIT_BIAS,
                        wire.CAPABILITY_LOGPROBS,
                        *([] if self._verifier.grammars is None else [wire.CAPABILITY_GRAMMAR]),
                        *([] if self._verifier.drafts is None else [wire.CAPABILITY_DRAFTS]),
                    ],
                    load=self._verifier.worker.load,
                    dtype=self._verifier.engine.facts.dtype,
                )
            for message in greeting:
                await self._send(message)
        except BaseException:
            store.detach(conversation, claim)
            raise
        self._greeted = attached
        held = greeting[0].welcome.committed_length
        _log.info("session opened, %d tokens held", held, extra={"data": {"tokens_held": held}})
        return conversation, claim

    async def _answer(
        self, conversation: Conversation, claim: asyncio.Event, message: wire.ClientMessage | wire.ServerMessage
    ) -> None:
        """Process one frame and send its verdict or fault, if any."""
        await self._reader.pause(self._budgets.wait_s(Kind.FRAMES, 1))
        if isinstance(message, wire.ServerMessage):
            await self._say(message)
            return
        event = message.WhichOneof("event")
        if event == "bye":
            raise _CloseError(NORMAL, "the client said goodbye")
        async with conversation.lock:
            if self._ended(claim):
                return
            frame = getattr(message, event)
            self._epoch = getattr(frame, "epoch", self._epoch)
            if stamp := getattr(frame, "stamp", 0):
                self._stamped = stamp, self._reader.taken_at
            grammar = None
            if message.prompt.sampling.HasField("grammar"):
                grammar = await self._reader.unless_over(self._grammar_of(message, conversation.session))
                if grammar is None and self._reader.over:  # its place is free again before the grammar is compiled
                    return
            answer = conversation.session.receive(message, grammar)
            if isinstance(answer, Verify):
                # The verdict may be unwanted even before work on it begins.
                needless = self._reader.over or any(map(self._overrules, self._reader.waiting))
                answer = None if needless else await self._work.do(conversation, answer)
        await self._say(answer)

    async def _grammar_of(self, message: wire.ClientMessage, session: ServerSession) -> GrammarState | MoaError | None:
        """Compile the grammar of a Prompt; return why it does not compile, or None if it cannot be."""
        grammars = self._verifier.grammars
        if grammars is None:
            return None
        try:
            grammar = parse_grammar(message.prompt.sampling.grammar)
            if grammar is None:
                return None
            so_far = session.answer_so_far(message.prompt)
            # One of each bearer: the compiler's queue is short, whatever others send.
            async with self._budgets.compiling if so_far or not grammars.knows(grammar) else contextlib.nullcontext():
                return await grammars.compiled(grammar, so_far)
        except MoaError as error:
            return error

    async def _go_on(self, conversation: Conversation, claim: asyncio.Event) -> bool:
        """Do unrequested work: push a verdict, make or send memory rows. Return whether there was any."""
        session = conversation.session
        owed_s = max(self._budgets.wait_s(Kind.ROW_BYTES, 0), conversation.row_credit.wait_s(0))
        async with conversation.lock:
            if self._ended(claim):
                return False
            work = session.next_work(rows=not owed_s and self._verifier.store.rows_pay(conversation))
            said = None if work is None else await self._work.do(conversation, work)
        if said is not None and said.HasField("fault") and not session.engine_failed():
            said = None  # no client waits for these rows
        await self._say(said)
        if owed_s and session.rows_due and work is None:
            await self._reader.wait(max(owed_s, 0.001))  # what is left of a debt may be less than a clock's tick
            return True
        sent = False
        # Those of an ended claim are the next connection's.
        while not (owed_s or self._ended(claim)) and (rows := session.take_rows()) is not None:
            self._budgets.wait_s(Kind.ROW_BYTES, len(rows.rows.data) + len(rows.rows.scales))
            conversation.row_credit.wait_s(rows.rows.count)
            await self._send(rows)
            sent = True
            if not session.pushes:  # else all that may follow the verdict
                break
        return work is not None or sent

    def _ended(self, claim: asyncio.Event) -> bool:
        """Whether another connection took over, or the token was withdrawn; the next receive says so."""
        return claim.is_set() or not self._verifier.authenticator.valid(self._bearer)

    async def _next_of(self, conversation: Conversation) -> wire.ClientMessage | wire.ServerMessage:
        """Wait for the next frame; after some silence in the middle of an answer, continue it in the background."""
        self._verifier.worker.parked(conversation.sequence)
        silence = min(_SILENCE_S, self._settings.idle_seconds) if conversation.session.continues_without_client else 0.0
        if silence and not await self._reader.wait(silence):
            self._verifier.background_answers.begin(conversation)
        try:
            return await self._next_frame(self._settings.idle_seconds - silence, silence)
        finally:
            self._verifier.background_answers.end(conversation)

    async def _next_frame(self, seconds: float, silent_before: float = 0.0) -> wire.ClientMessage | wire.ServerMessage:
        """Receive the next frame, or the fault that answers an invalid one; ``silent_before`` are earlier seconds of
        silence.

        Raises:
            _CloseError: the connection ends.
        """
        received = await self._reader.next(seconds)
        if isinstance(received, tuple):
            message, size = received
            self._timeline.mark("receive", self._track, bytes=size)
            return message
        if (refusal := refusal_of(received, silent_before + seconds, self._settings)) is not None:
            await self._refuse(*refusal)
        raise _CloseError(GOING_AWAY if received is CloseReason.LEAVING else None, received.value)

    async def _say(self, message: wire.ServerMessage | None) -> None:
        """Send an answer, if any, and echo the stamp of the newest answered frame."""
        if message is None:
            return
        if message.HasField("fault"):
            self._metrics.refused(_code(message))
            _log.info("a frame was refused: %s", message.fault.text, extra={"data": {"reason": _code(message)}})
        event = message.WhichOneof("event")
        if self._stamped is not None and event in ("verdict", "standing", "pong"):
            (stamp, came), self._stamped = self._stamped, None
            held_us = min(int(1e6 * (time.monotonic() - came)), MOST_US)
            getattr(message, event).echo.CopyFrom(wire.Echo(stamp=stamp, held_us=held_us))
        await self._send(message)

    async def _refuse(self, message: wire.ServerMessage, code: int) -> NoReturn:
        """Send a fault and close."""
        self._metrics.refused(_code(message))
        await self._send(message)
        raise _CloseError(code, message.fault.text)

    async def _close(self, code: int) -> None:
        await self._reader.close()  # granian closes only after a receive that waits
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # closed by the client meanwhile
            await self._websocket.close(code)

    def _log_end(self, why: str) -> None:
        if self._greeted is None:
            _log.info("a session was refused: %s", why)
            return
        tokens, verdicts = self._work.committed, self._work.verdicts
        data = {"why": why, "tokens": tokens, "rounds": verdicts}
        _log.info("session ended: %s; %d tokens in %d verdicts", why, tokens, verdicts, extra={"data": data})

    async def _send(self, message: wire.ServerMessage) -> None:
        if self._pings.lost:
            raise WebSocketDisconnect(1006)
        data = message.SerializeToString()
        with self._timeline.measure("send", self._track, bytes=len(data)):
            await self._websocket.send_bytes(data)


def _code(message: wire.ServerMessage) -> str:
    return wire.FaultCode.Name(message.fault.code).removeprefix("FAULT_CODE_").lower()


#: Seconds from a Ping that is answered at once to the next such one.
_INTERVAL_S = 0.5


class PingResponder:
    """Answers the Pings of one connection before the frames that precede them, so that a client does not give up a link
    that is only busy. Clients without WebSocket pings, such as browsers, use it. Like a WebSocket ping, a Ping is no
    activity of the client.

    Args:
        send: sends a message to the client.

    Attributes:
        lost: whether sending failed because the client is gone; do not send again.
    """

    def __init__(self, send: Callable[[wire.ServerMessage], Awaitable[None]]) -> None:
        self._send = send
        self.lost = False
        self._sending: asyncio.Task[None] | None = None
        self._next = 0.0

    def take(self, message: wire.ClientMessage) -> bool:
        """Answer a Ping, unless another was answered just before; return whether it was answered."""
        sending = self._sending is not None and not self._sending.done()
        if message.WhichOneof("event") != "ping" or sending or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _INTERVAL_S
        echo = wire.Echo(stamp=message.ping.stamp) if message.ping.stamp else None
        self._sending = asyncio.create_task(self._answer(wire.ServerMessage(pong=wire.Pong(echo=echo))))
        return True

    async def close(self) -> None:
        """Stop sending."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _answer(self, pong: wire.ServerMessage) -> None:
        try:
            await self._send(pong)
        except WebSocketDisconnect:
            self.lost = True
        except RuntimeError:
            pass  # closed meanwhile


# WebSocket close codes (RFC 6455 and the IANA registry).
NORMAL, GOING_AWAY, REFUSED, FAILED, TRY_AGAIN_LATER = 1000, 1001, 1008, 1011, 1013


def refusal_of(end: CloseReason, seconds: float, settings: Settings) -> tuple[wire.ServerMessage, int] | None:
    """Return the last message of a connection that is closed for ``end``, such as ``seconds`` of silence, and the close
    code; None to send nothing."""
    if end in (CloseReason.LEFT, CloseReason.LEAVING):
        return None
    if end is CloseReason.SILENT:
        return fault(wire.FAULT_CODE_IDLE, f"nothing was received for {seconds:g} seconds"), GOING_AWAY
    text, code = end.value, wire.FAULT_CODE_PROTOCOL
    if end is CloseReason.REPLACED:
        code = wire.FAULT_CODE_REPLACED
    elif end is CloseReason.FLOODED:
        most, size = settings.max_waiting_frames, 2 * settings.max_frame_bytes
        text = f"more than {most} frames or {size} bytes wait: a client awaits its verdicts"
    return fault(code, text), REFUSED


#: Largest first frame, bytes; a Hello has no long text.
MAX_HELLO_BYTES = 4 << 10


class CloseReason(enum.Enum):
    """Reason why a connection accepts no more frames."""

    LEFT = "the client left"
    REPLACED = "another connection continued this conversation"
    LEAVING = "this verifier is shutting down"
    FLOODED = "more frames than a client can await verdicts for"
    SILENT = "nothing was received"
    WITHDRAWN = "the bearer token was withdrawn"


class FrameReader:
    """Parsed frames of one WebSocket, in order.

    A frame of more than ``max_frame_bytes``, or a first one of more than :data:`MAX_HELLO_BYTES`, is answered with a
    fault. More than ``max_waiting_frames`` queued frames, or twice ``max_frame_bytes``, end the connection.

    Args:
        on_message: called with each message on arrival; returns True if the message needs no further handling.
        on_end: called when the connection ends for any reason but LEAVING: no answer can be delivered.

    Attributes:
        taken_at: arrival time (``time.monotonic``) of the last frame that :meth:`next` returned.
    """

    def __init__(
        self,
        websocket: WebSocket,
        settings: Settings,
        on_message: Callable[[wire.ClientMessage], bool],
        on_end: Callable[[], None],
    ) -> None:
        self._websocket, self._settings, self._on_message, self._on_end = websocket, settings, on_message, on_end
        self._most_bytes = min(MAX_HELLO_BYTES, settings.max_frame_bytes)  # of the next frame
        self._frames: deque[tuple[wire.ClientMessage | wire.ServerMessage, int, float]] = deque()
        self.taken_at = 0.0
        self._changed = asyncio.Event()
        self._end: CloseReason | None = None
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._reading = asyncio.create_task(self._read())

    @property
    def waiting(self) -> Iterator[wire.ClientMessage]:
        """Messages that :meth:`next` has not returned yet."""
        return (message for message, _, _ in self._frames if isinstance(message, wire.ClientMessage))

    @property
    def ready(self) -> bool:
        """Whether :meth:`next` returns without waiting."""
        return bool(self._frames or self._failure or self._end)

    @property
    def over(self) -> bool:
        """Whether the client is gone or replaced, so that no answer can be delivered."""
        return self._over.is_set()

    async def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a frame or the end; return whether there is one."""
        while not self.ready:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), seconds)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                return False
        return True

    async def pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the connection is over."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def unless_over(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return what work returns; drop it, and return None, if the connection is over before."""
        with contextlib.suppress(LeftError):
            return await unless(self._over.wait(), work, LeftError())
        return None

    async def next(self, seconds: float) -> tuple[wire.ClientMessage | wire.ServerMessage, int] | CloseReason:
        """Return the next message, or the fault for an invalid frame, with its size in bytes; or the reason of the end.

        Frames that arrived before the shutdown began are still returned.

        Args:
            seconds: silence after which the connection ends.
        """
        if not await self.wait(seconds):
            return CloseReason.SILENT
        if self._failure is not None:
            raise self._failure
        if self._frames and not self.over:
            message, size, self.taken_at = self._frames.popleft()
            return message, size
        assert self._end is not None
        return self._end

    def end(self, why: CloseReason) -> None:
        """Accept no more frames. The first reason stays, except that LEAVING may be replaced."""
        if self._end in (None, CloseReason.LEAVING):
            self._end = why
            self._changed.set()
            if why is not CloseReason.LEAVING:
                self._over.set()
                self._on_end()

    async def close(self) -> None:
        """Stop reading."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while self._end is None:
                await self._read_frame()
        except Exception as error:  # raised by next()
            self._failure = error
            self._changed.set()
            self._on_end()

    async def _read_frame(self) -> None:
        received = await self._websocket.receive()
        data, waiting = received.get("bytes"), sum(size for _, size, _ in self._frames)
        most = self._settings.max_waiting_frames
        if received["type"] == "websocket.disconnect":
            self.end(CloseReason.LEFT)
        elif len(self._frames) >= most or waiting > 2 * self._settings.max_frame_bytes:
            self.end(CloseReason.FLOODED)
        else:
            began = time.thread_time()  # without waits for other threads, which would make an honest client wait
            message = self._parse(data)
            spent_s = time.thread_time() - began
            self._most_bytes = self._settings.max_frame_bytes
            if isinstance(message, wire.ClientMessage) and self._on_message(message):
                # No limit of waiting frames ends a flood of these: a connection gets a small part of the time.
                await asyncio.sleep(_REST * spent_s)
                return
            self._frames.append((message, len(data or b""), time.monotonic()))
            self._changed.set()

    def _parse(self, frame: bytes | None) -> wire.ClientMessage | wire.ServerMessage:
        if frame is None:
            return fault(wire.FAULT_CODE_PROTOCOL, "a text frame; this protocol is binary")
        if len(frame) > self._most_bytes:
            which = "frame" if self._most_bytes == self._settings.max_frame_bytes else "first frame"
            text = f"a {which} of {len(frame)} bytes; this verifier takes {self._most_bytes}"
            return fault(wire.FAULT_CODE_TOO_LARGE, text)
        message = parse_client_message(frame)
        if isinstance(message, wire.ClientMessage) and 4 * message.ByteSize() < len(frame):
            # Each of its parts keeps its memory while the frame waits: 35 MB of one megabyte.
            return fault(wire.FAULT_CODE_PROTOCOL, "a frame whose parts replace each other")
        return message
