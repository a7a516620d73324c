"""Ways of serving the same target over a network; one question asked in one of them, perhaps with its link cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar
from urllib.parse import urlsplit

from moa_bench.link import LinkProfile
from moa_bench.link.proxy import BackgroundLink, background_link
from moa_bench.result import Burst, ratio, token_latencies
from moa_bench.verifier import Verifier, VerifierGoneError, stream_decode
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.base import GREEDY, Budget, Drafter, Float32
from moa_runtime.drafters.factory import backend_for, drafter_for
from moa_runtime.drafting.draft_controllers import controller_for
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, AnswerUpdate, LinkStatus, TokenOrigin
from moa_runtime.options import Drafting, DraftLength, LoopSettings
from moa_runtime.session.events import Origin, Sampling
from moa_runtime.session.tree import DraftTree
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.tokens import common_length
from moa_runtime.transport import Endpoint, Timing

if TYPE_CHECKING:
    import httpx

MODES = ("stream", "per-call", "device", "server", "auto", "oracle")
_POLL_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class AnswerSettings:
    """Settings of every answer, the same for every mode that has a use for them.

    Args:
        threads: processor threads of the drafter.
        answer_timeout_s: seconds after which an answer, connecting included, is given up.
    """

    draft_length: DraftLength = "auto"
    max_new_tokens: int = 32
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    threads: int = 1
    answer_timeout_s: float = 120.0


@dataclass(frozen=True)
class Turn:
    """A question, its tokens up to the answer, and the answer (tokens) that the target writes alone."""

    text: str
    prompt: Sequence[int]
    reference: Sequence[int]


@dataclass
class Answer:
    """The committed tokens of an answer as they arrived.

    Attributes:
        sent: when the question was sent, by default now; seconds of :func:`time.perf_counter`, as in ``bursts``.
        bursts: one for each message that brought tokens.
        payload_up, payload_down: bytes in HTTP bodies or WebSocket messages, as the client counts them.
    """

    sent: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    payload_up: int = 0
    payload_down: int = 0

    def add(self, at: float, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
        """Append the tokens of a message that arrived at the time ``at``."""
        self.tokens += tokens
        self.origins += origins
        self.bursts.append(Burst(at, len(tokens)))

    def until(self, moment: float) -> Answer:
        """Return its question and the times of its tokens up to ``moment``."""
        return Answer(self.sent, bursts=[burst for burst in self.bursts if burst.at <= moment])

    @property
    def first_s(self) -> float:
        """Seconds from the question to the first token."""
        return self.bursts[0].at - self.sent

    @property
    def seconds_a_token(self) -> float | None:
        """Mean latency of its tokens but the first; None if it has one token."""
        latencies = token_latencies(self.bursts)
        return sum(latencies) / len(latencies) if latencies else None


#: Sends the question and fills an answer as its tokens arrive.
Ask = Callable[[Answer], Awaitable[None]]


@dataclass(frozen=True)
class StreamMode:
    """``POST /v1/decode`` with ``"stream": true``, over an HTTP connection that is open already. ``in_rounds``: whether
    the device sends a message for each one that it receives."""

    settings: AnswerSettings
    in_rounds: ClassVar[bool] = False

    @asynccontextmanager
    async def connect(self, endpoint: Endpoint, turn: Turn) -> AsyncIterator[Ask]:
        """Open a connection for one answer; calling its result sends the question. Raises MoaError: on entering or in
        the call, if the verifier is gone or refuses."""
        import httpx

        url = Verifier(endpoint).http_url
        # No time limit here: slowness is measured, an outage is waited for, and the caller has a limit.
        async with httpx.AsyncClient(verify=endpoint.tls or True, timeout=None, trust_env=False) as client:
            try:
                await client.get(f"{url}/healthz")
            except httpx.TransportError as error:
                text = f"no verifier answers at {url}: {error!r}"
                raise VerifierGoneError(text, code="verifier_gone") from error

            async def ask(answer: Answer) -> None:
                exchanged: list[httpx.Response] = []

                async def note(response: httpx.Response) -> None:
                    exchanged.append(response)

                client.event_hooks = {"response": [note]}
                asked = (turn.prompt, self.settings.max_new_tokens, self.settings.sampling)
                async for token in stream_decode(client, url, endpoint.token, *asked):
                    answer.add(time.perf_counter(), [token], [Origin.CORRECTED])
                answer.payload_up = sum(len(response.request.content) for response in exchanged)
                answer.payload_down = sum(response.num_bytes_downloaded for response in exchanged)

            yield ask


@dataclass(frozen=True)
class ChatMode:
    """The runtime's chat, a new conversation for each answer.

    Args:
        new_drafter: makes the drafter for a turn. If it makes None, the device proposes nothing and each round asks the
            target for one token.
        loop: settings of the drafting loop.
        timeline: see :meth:`moa_runtime.chat.Chat.connect`.
    """

    bundle: Bundle
    new_drafter: Callable[[Turn], Drafter | None]
    settings: AnswerSettings
    loop: LoopSettings
    timeline: Timeline = NO_TIMELINE
    in_rounds: ClassVar[bool] = True

    @asynccontextmanager
    async def connect(self, endpoint: Endpoint, turn: Turn) -> AsyncIterator[Ask]:
        """See :meth:`StreamMode.connect`."""
        settings = self.settings
        chat = Chat(
            self.bundle,
            endpoint,
            drafter=self.new_drafter(turn),
            controller=controller_for(settings.draft_length),
            settings=self.loop,
            timeline=self.timeline,
        )
        async with chat:
            await chat.open()

            async def ask(answer: Answer) -> None:
                events = chat.send(turn.text, max_new_tokens=settings.max_new_tokens, sampling=settings.sampling)
                async for event in events:
                    if isinstance(event, AnswerUpdate):
                        committed = [token for token in event.tokens if token.committed]
                        if new := committed[len(answer.tokens) :]:
                            tokens, origins = [token.token for token in new], [token.origin for token in new]
                            answer.add(time.perf_counter(), tokens, origins)
                    elif isinstance(event, AnswerFinished):
                        statistics = event.statistics
                        answer.payload_up, answer.payload_down = statistics.bytes_up, statistics.bytes_down

            yield ask


Mode = StreamMode | ChatMode


class OracleDrafter:
    """A drafter that proposes the target's known answer, in no time: the limit of any drafter. Implements
    :class:`moa_runtime.drafters.base.Drafter`; it is sent memory rows as any drafter is, and ignores them.

    Args:
        prompt_length: tokens before the answer.
        answer: the target's answer.
    """

    needs_rows = False
    stopping_rule = None

    def __init__(self, prompt_length: int, answer: Sequence[int]) -> None:
        self._prompt_length, self._answer = prompt_length, answer
        self.rows = 0

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        self.rows = start + len(keys)

    def truncate_rows(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """Return a chain of the answer's next tokens, fewer at its end."""
        written, most = len(prefix) - self._prompt_length, min(budget.nodes, budget.levels, budget.depth)
        tokens = self._answer[written : written + most]
        return DraftTree.chain(tokens, [0.0] * len(tokens))


def make_modes(
    names: Sequence[str], bundle: Bundle, settings: AnswerSettings, timeline: Timeline = NO_TIMELINE
) -> dict[str, Mode]:
    """Make the modes that ``names`` lists, of :data:`MODES` or a peer's, which streams; ``timeline`` gets the device's
    work in those that draft. Raises MoaError: the bundle's graph cannot be loaded."""

    def chat(new_drafter: Callable[[Turn], Drafter | None], drafting: Drafting = "device") -> Mode:
        return ChatMode(bundle, new_drafter, settings, LoopSettings(drafting=drafting), timeline)

    def ours() -> Callable[[Turn], Drafter | None]:
        backend = backend_for(bundle, threads=settings.threads)
        # The graph is shared; each answer has caches of its own.
        return lambda turn: drafter_for(bundle.manifest, backend)

    makers: dict[str, Callable[[], Mode]] = {
        "stream": lambda: StreamMode(settings),
        "per-call": lambda: chat(lambda turn: None),
        "device": lambda: chat(ours()),
        "server": lambda: chat(ours(), "server"),
        "auto": lambda: chat(ours(), "auto"),
        "oracle": lambda: chat(lambda turn: OracleDrafter(len(turn.prompt), turn.reference)),
    }
    return {name: makers.get(name, makers["stream"])() for name in names}


# -- asking ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """An answer with its cost.

    Attributes:
        reference: the answer that the target writes alone.
        passes: of the target, those over the prompt included.
        bytes_up, bytes_down: through the link emulator, with the framing of HTTP or WebSocket, without that of TCP;
            without an emulator the client's count, without any framing. Connecting is left out.
        in_rounds: see :class:`StreamMode`.
    """

    answer: Answer
    reference: Sequence[int]
    passes: int
    bytes_up: int
    bytes_down: int
    in_rounds: bool

    @property
    def agreed(self) -> int:
        """Leading tokens that are the reference's."""
        return common_length(self.answer.tokens, self.reference)

    @property
    def identical(self) -> bool:
        return self.answer.tokens == list(self.reference)


def ask(
    verifiers: Mapping[str, Verifier],
    modes: Mapping[str, Mode],
    settings: AnswerSettings,
    profile: LinkProfile | None,
    mode: str,
    turn: Turn,
) -> Outcome:
    """Ask the mode's verifier through a link of its own (None: no emulation), so that every answer meets the same
    outages; raises as :func:`watched`."""
    with ExitStack() as stack:
        verifier = verifiers[mode]
        link, endpoint, before = None, verifier.endpoint, verifier.forwards()
        if profile is not None:
            link = stack.enter_context(background_link(profile, *verifier.host_and_port))
            endpoint = through(link, endpoint)

        async def asked() -> tuple[Answer, int, int]:
            async with modes[mode].connect(endpoint, turn) as send:
                up, down = (0, 0) if link is None else (link.bytes_up, link.bytes_down)
                answer = Answer()
                await send(answer)
                if link is None:
                    return answer, answer.payload_up, answer.payload_down
                return answer, link.bytes_up - up, link.bytes_down - down

        answer, up, down = asyncio.run(watched(asked(), verifier, settings.answer_timeout_s))
    return Outcome(answer, turn.reference, verifier.forwards() - before, up, down, modes[mode].in_rounds)


def through(link: BackgroundLink, endpoint: Endpoint) -> Endpoint:
    """Return the endpoint of the same verifier through an emulated link."""
    address = urlsplit(endpoint.address)._replace(netloc=f"127.0.0.1:{link.port}")
    return replace(endpoint, url=address.geturl())


async def watched(work: Coroutine[Any, Any, T], verifier: Verifier, timeout_s: float) -> T:
    """Await ``work``; a client would wait for ever for a verifier that is gone. Raises VerifierGoneError: the verifier
    died; MoaError: ``work`` raised it, or took longer than ``timeout_s``."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_until_gone(verifier))
    try:
        done, _ = await asyncio.wait({working, watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            text = f"an answer was not complete after {timeout_s:g} s: ask for fewer tokens, or raise --answer-timeout"
            raise MoaError(text, code="timeout")
        if working not in done:
            watching.result()
        if isinstance(working.exception(), MoaError):
            verifier.status()  # a verifier that is gone is the better explanation
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(verifier: Verifier) -> NoReturn:
    """Raise VerifierGoneError once the verifier takes no connections."""
    while True:
        await asyncio.sleep(_POLL_S)
        try:
            # A connection alone: a request would take time from the measured answer.
            _, writer = await asyncio.open_connection(*verifier.host_and_port)
        except OSError:
            verifier.status()
        else:
            writer.close()


# -- cutting the link of an answer -----------------------------------------------------------------------


@dataclass(frozen=True)
class CutSettings:
    """When the link is cut: after that many confirmed tokens of the answer, for ``seconds``."""

    after: int
    seconds: float


@dataclass(frozen=True)
class CutAnswer:
    """One answer whose link was cut. Times in seconds.

    Attributes:
        confirmed, tentative: tokens on screen when the link returned: the target's, and the device's after them.
        kept: of the tentative ones, leading tokens that the target would have written.
        hello_s: from the link's return to the client's Hello; None if the connection survived the cut.
        token_s, whole_s: from the Hello, or else the link's return, to the next confirmed token and to the last one.
        identical: whether it is the answer that the target writes alone.
    """

    confirmed: int
    tentative: int
    kept: int
    hello_s: float | None
    token_s: float
    whole_s: float
    tokens: int
    identical: bool


def cut_figures(answers: Sequence[CutAnswer]) -> dict[str, Any]:
    """Return means (None without answers) and every answer, for JSON."""

    def mean(name: str, *, times: int = 1) -> float | None:
        figures = [times * figure for figure in (getattr(answer, name) for answer in answers) if figure is not None]
        return ratio(sum(figures), len(figures), 1)

    return {
        "answers": len(answers),
        **{name: mean(name) for name in ("confirmed", "tentative", "kept", "tokens")},
        **{f"{name}_ms": mean(f"{name}_s", times=1000) for name in ("hello", "token", "whole")},
        "identical": all(answer.identical for answer in answers) if answers else None,
        "every": [asdict(answer) for answer in answers],
    }


def ask_and_cut(
    verifier: Verifier,
    bundle: Bundle,
    settings: AnswerSettings,
    cut: CutSettings,
    profile: LinkProfile,
    drafting: Drafting,
    turn: Turn,
    timing: Timing | None = None,
) -> CutAnswer | None:
    """Ask with the runtime's chat through an emulated link that is cut in the middle of the answer.

    Nothing passes during the cut, and sockets hang, as in a tunnel. The device writes on with the bundle's offline
    writer, and the verifier finishes the answer meanwhile. Returns None if the answer ended before the cut, or before
    the link was back; raises as :func:`watched`.

    Args:
        settings: of the answer, which may take ``answer_timeout_s`` besides the cut.
        timing: of the client's connections.
    """
    if len(turn.reference) <= cut.after:
        return None
    timeline = Timeline("device")
    with background_link(profile, *verifier.host_and_port) as link:
        chat = Chat.connect(
            bundle,
            through(link, verifier.endpoint),
            threads=settings.threads,
            controller=controller_for(settings.draft_length),
            settings=LoopSettings(drafting=drafting),
            timeline=timeline,
            timing=timing,
        )
        observer = CutObserver(link, cut)
        following = _follow(chat, observer, turn.text, settings)
        asyncio.run(watched(following, verifier, cut.seconds + settings.answer_timeout_s))
    return observer.answer(turn.reference, timeline.events)


async def _follow(connecting: Awaitable[Chat], observer: CutObserver, text: str, settings: AnswerSettings) -> None:
    chat = await connecting
    try:
        async for event in chat.send(text, max_new_tokens=settings.max_new_tokens, sampling=settings.sampling):
            if isinstance(event, AnswerUpdate | AnswerFinished):
                observer.see(event.tokens)
    finally:
        observer.close()
        await chat.close()


class CutObserver:
    """Follows an answer, cuts its link after the set number of confirmed tokens, and restores it."""

    def __init__(self, link: BackgroundLink, settings: CutSettings) -> None:
        self._link, self._settings = link, settings
        self._tokens: Sequence[TokenOrigin] = ()
        self._at_return: Sequence[TokenOrigin] = ()
        self._returned_at = self._token_at = self._last_at = 0.0  # as time.time; 0 before it happens
        self._cutting: asyncio.Task[None] | None = None

    def see(self, tokens: Sequence[TokenOrigin]) -> None:
        """Take the tokens that are on screen now."""
        self._tokens, self._last_at = tokens, time.time()
        if self._cutting is None and _confirmed(tokens) >= self._settings.after:
            self._cutting = asyncio.create_task(self._cut())
        if self._returned_at and not self._token_at and _confirmed(tokens) > _confirmed(self._at_return):
            self._token_at = self._last_at

    def close(self) -> None:
        """Leave the link as it is."""
        if self._cutting is not None:
            self._cutting.cancel()

    def answer(self, reference: Sequence[int], events: Sequence[dict[str, Any]]) -> CutAnswer | None:
        """Return the observed answer; None if the link did not return before its end.

        Args:
            reference: the answer that the target writes alone.
            events: of the client's timeline.
        """
        if not self._token_at:
            return None
        later = [event for event in events if event.get("ts", 0) >= 1e6 * self._returned_at]
        hello_s, begin_at = None, self._returned_at
        if any(event["name"] == LinkStatus.ONLINE.value for event in later):  # its first frame was its Hello
            begin_at = next(event["ts"] / 1e6 for event in later if event["name"] == "send")
            hello_s = begin_at - self._returned_at
        confirmed = _confirmed(self._at_return)
        offline = [token.token for token in self._at_return[confirmed:]]
        kept = common_length(offline, reference[confirmed:])
        tokens = [token.token for token in self._tokens]
        times = (hello_s, self._token_at - begin_at, self._last_at - begin_at)
        return CutAnswer(confirmed, len(offline), kept, *times, len(tokens), tokens == list(reference))

    async def _cut(self) -> None:
        self._link.cut()
        await asyncio.sleep(self._settings.seconds)
        self._at_return, self._returned_at = self._tokens, time.time()
        self._link.restore()


def _confirmed(tokens: Sequence[TokenOrigin]) -> int:
    return sum(token.committed for token in tokens)
