"""Sampling and policies of an answer, and the events of a client session."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

LARGEST_REAL = 3e38  # largest number in the wire's float fields
MOST_BIASED = 1024  # tokens of a logit_bias
MOST_LOGPROBS = 20  # tokens of each place of an answer whose log probabilities can be asked for


#: Kinds of grammars, as the wire names them.
GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


@dataclass(frozen=True)
class Grammar:
    """What an answer conforms to.

    Attributes:
        kind: any JSON object, or a JSON schema, regular expression or Lark grammar as llguidance reads them.
        text: the schema, expression or grammar; empty for any JSON object.
    """

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True)
class Sampling:
    """How the target chooses a token.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus sampling, 0 to 1; 1 disables it.
        seed: determines, with a token's absolute position, the noise of the choice; 64 bits.
        top_k: number of most likely tokens to choose from; 0 disables it.
        min_p: smallest probability relative to the most likely token's, 0 to 1; 0 disables it.
        presence_penalty, frequency_penalty: taken from the logit of a token of the answer, once and for each time that
            it has it; -2 to 2.
        repetition_penalty: divides the logit of a token of the conversation if it is positive, and multiplies it
            otherwise; above 0, at most 10; 1 disables it.
        logit_bias: pairs of a token and what is added to its logit, -100 to 100; at most :data:`MOST_BIASED`.
        min_tokens: tokens of the answer before which it cannot stop.
        grammar: what the answer conforms to; None for any text.
        logprobs: number of likeliest tokens whose log probabilities are wanted beside each token's own, at most
            :data:`MOST_LOGPROBS`; None for none at all. Changes no choice.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether there is a penalty."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def biased(self) -> bool:
        """Whether there is a ``logit_bias`` or ``min_tokens``."""
        return bool(self.logit_bias or self.min_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; later fields than ``min_p`` only if they change something."""
        later = {field.name: field.default for field in fields(Sampling)[5:]}
        return {name: value for name, value in asdict(self).items() if value != later.get(name)}

    @property
    def problem(self) -> str:
        """Error message if a value is out of range; empty if all are valid."""
        if not 0 <= self.temperature <= LARGEST_REAL:
            return f"a temperature is 0 or more, not {self.temperature}"
        if not 0 <= self.top_p <= 1:
            return f"top_p is from 0 to 1, not {self.top_p}"
        if not 0 <= self.min_p <= 1:
            return f"min_p is from 0 to 1, not {self.min_p}"
        for name in ("top_k", "min_tokens"):
            if not 0 <= getattr(self, name) < 1 << 32:
                return f"{name} is a whole number of 32 bits, 0 or more, not {getattr(self, name)}"
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                return f"{name} is from -2 to 2, not {getattr(self, name)}"
        if not 0 < self.repetition_penalty <= 10:
            return f"repetition_penalty is above 0 and at most 10, not {self.repetition_penalty}"
        if len(self.logit_bias) > MOST_BIASED:
            return f"logit_bias has at most {MOST_BIASED} tokens, not {len(self.logit_bias)}"
        for token, bias in self.logit_bias:
            if not (0 <= token < 1 << 32 and -100 <= bias <= 100):
                return f"a logit_bias gives a token a number from -100 to 100, not {token}, {bias}"
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            return f"logprobs are of 0 to {MOST_LOGPROBS} tokens, not {self.logprobs}"
        return ""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities in one place of an answer, by the target's logits as they are before grammar,
    biases, penalties, temperature and masks.

    Attributes:
        logprob: of the token that was chosen.
        top_tokens, top_logprobs: the likeliest tokens, likeliest first, and theirs.
    """

    logprob: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class GrammarState(Protocol):
    """A grammar along an answer. Every call names the answer's tokens so far."""

    def accepts(self, answer: Sequence[int]) -> bool:
        """Whether an answer can begin with these tokens."""

    def mask(self, answer: Sequence[int]) -> NDArray[np.bool_]:
        """Return the tokens that may follow, at least one: ``[vocab_size]``."""

    def among(self, answer: Sequence[int], tokens: Sequence[int]) -> tuple[list[bool], int]:
        """Return of each of ``tokens`` whether it may follow, and how many tokens may."""

    def allowed(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return of each token of a tree after the answer whether the grammar allows the path to it. Where that takes
        long, the rest counts as not allowed."""

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Return the next tokens, as long as only one may follow: all, or the first of them."""

    def problem(self, answer: Sequence[int]) -> str:
        """Return why no token may follow but one that ends the answer: a limit that the grammar met; else no text."""


@dataclass(frozen=True)
class AnswerSampling(Sampling):
    """The sampling of a running answer.

    Attributes:
        answer_from: position of the answer's first token, from which penalties and ``min_tokens`` count.
        state: of the grammar; None without one, or on a device that cannot follow it.
    """

    answer_from: int = 0
    state: GrammarState | None = field(default=None, compare=False)


class Origin(enum.Enum):
    """Origin of an answer's token."""

    DRAFTED = "drafted"  # drafted by the device, confirmed by the target
    OFFLINE = "offline"  # written by the device while offline
    CORRECTED = "corrected"  # chosen by the target: a correction, a bonus token, or pushed
    KEPT = "kept"  # written offline and kept by policy, without asking the target


class Policy(enum.Enum):
    """What happens to offline tokens after the device is online again."""

    ROLLBACK = "rollback"  # they stay up to the first disagreement with the target
    KEEP = "keep"  # they stay
    ASK = "ask"  # like ROLLBACK, but the application learns of the disagreement and may keep them after all


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    GRAMMAR = "grammar"  # it met a limit, so the text may not conform to it


class Cause(enum.Enum):
    """Why a verdict was sent."""

    ASKED = "asked"  # a Prompt or Draft of this connection asked for it
    PUSHED = "pushed"  # sent within the credit
    FETCHED = "fetched"  # decided before this connection, sent after the Welcome


@dataclass(frozen=True)
class Welcomed:
    """The link is up.

    Attributes:
        resumed: whether the server had kept the conversation.
        drafts: whether the server drafts for the verdicts that it pushes.
    """

    resumed: bool
    drafts: bool = False


@dataclass(frozen=True)
class Echoed:
    """The server has answered the frame with this stamp, ``held_s`` seconds after it arrived."""

    stamp: int
    held_s: float


@dataclass(frozen=True)
class RowsReceived:
    """Memory rows for the drafter from position ``start`` on: float32 ``keys, values [n, kv_heads, head_dim]``."""

    start: int
    keys: NDArray[np.float32]
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Decided:
    """A verdict was accepted; the events of its effects follow.

    Attributes:
        cause: why the verdict was sent.
        supplied: number of tokens of the Prompt that it answers; 0 for a Draft.
        drafted: number of tokens of the Draft that it answers, or of the part that was verified; if pushed, of the
            unsolicited Draft or of the server's own draft.
        accepted: number of drafted tokens that the target accepted.
        compute_s: time of the target, seconds.
        draft_s: time of the server's own draft, seconds, if pushed.
        draft_stamp: stamp of the verified unsolicited Draft, or of a requested Draft verified only in part; else 0.
        sent: number of tokens of the Draft that it answers, verified or not; 0 if pushed.
    """

    cause: Cause
    supplied: int
    drafted: int
    accepted: int
    compute_s: float
    draft_s: float = 0.0
    draft_stamp: int = 0
    sent: int = 0


@dataclass(frozen=True)
class Committed:
    """Answer tokens became final, in order, from absolute position ``start`` on.

    There are none if the policy ``KEEP`` overrules all tokens of a late verdict. ``logprobs`` has an item for each
    token, None if it is unknown; it is empty if none were asked for, or none are known.
    """

    start: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True)
class RolledBack:
    """Tentative tokens were dropped, from absolute position ``start`` on."""

    start: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class Finished:
    """The answer ended."""

    reason: FinishReason


@dataclass(frozen=True)
class Faulted:
    """The server refused a request, or sent a broken frame.

    Attributes:
        code: name of a ``FaultCode`` without its prefix, such as ``"CONTEXT_FULL"``.
        text: sentence for people.
        retry_after_ms: delay after which a retry may succeed, milliseconds; 0 for never.
    """

    code: str
    text: str
    retry_after_ms: int


@dataclass(frozen=True)
class Resumed:
    """The server had lost ``replayed`` tokens of the conversation, which are sent again."""

    replayed: int


SessionEvent = Welcomed | Echoed | RowsReceived | Decided | Committed | RolledBack | Finished | Faulted | Resumed
