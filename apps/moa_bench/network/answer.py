"""One answer: what every way of serving gets, and what it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from moa_bench.latency import Burst
from moa_runtime.session.events import Origin
from moa_runtime.transport import Endpoint


@dataclass(frozen=True)
class Turn:
    """A question and its right answer.

    Attributes:
        prompt: the question's tokens by the chat template, up to where the answer begins.
        reference: what the target alone answers, at most as long as answers may get.
    """

    text: str
    prompt: Sequence[int]
    reference: Sequence[int]


@dataclass
class Answer:
    """The committed tokens of an answer as they arrived.

    Attributes:
        sent: when the question was sent; seconds on the clock of ``bursts``, which is :func:`time.perf_counter`.
        origins: one a token.
        bursts: one for each message that brought tokens.
        payload_up, payload_down: bytes in HTTP bodies or WebSocket messages, as the client counts them.
    """

    sent: float
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    payload_up: int = 0
    payload_down: int = 0

    def add(self, at: float, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
        """A message brought these tokens at the time ``at``."""
        self.tokens += tokens
        self.origins += origins
        self.bursts.append(Burst(at, len(tokens)))


Ask = Callable[[], Awaitable[Answer]]


class Mode(Protocol):
    """A way of serving: how tokens get from the target to the device.

    Attributes:
        in_rounds: whether the device sends a message for each one it receives.
    """

    in_rounds: bool

    def connect(self, endpoint: Endpoint, turn: Turn) -> AbstractAsyncContextManager[Ask]:
        """A new connection for one answer; calling what it gives sends the question.

        Raises:
            MoaError: on entering or in the call, if the verifier is away or refuses.
        """
