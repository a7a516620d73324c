"""Self-distillation: the target writes the prompts, then the answers (arXiv 2410.03804, section 4.1 trains
on given data; that answers of the target itself work better was found by EAGLE-3 and others)."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from moa_drafter import vllm_environment
from moa_drafter.target import Target
from moa_drafter.training.data import open_lines
from moa_drafter.training.settings import DEFAULT_CONVERSATIONS, GenerateSettings, SettingsT, for_writer
from moa_runtime.errors import MoaError

# Compiled graphs are made for one shape, so on a GPU batches and prompts are rounded up to few sizes.
_PROMPT_BLOCK = 128
_BATCH_BLOCK = 64


@dataclass(frozen=True)
class Sampled:
    """How a text is sampled; ``top_p`` of 1 and ``min_p`` of 0 leave out no token."""

    temperature: float
    top_p: float = 1.0
    min_p: float = 0.0


class Decoder(Protocol):
    """A target that writes. Nothing but a decoder knows which program runs it.

    Attributes:
        name: of the writer, a key of :data:`moa_drafter.training.settings.WRITERS`.
    """

    name: str
    target: Target

    def begin(self, seed: int) -> None:
        """Begin a batch: from here on texts follow from the seed and the calls of this batch alone."""

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """What the target writes behind each prompt.

        Args:
            prompts: token ids.
            new_tokens: of each text at most.
            ways: how each text is chosen; None: greedily.

        Returns:
            token ids in the order of the prompts. A text ends with its stop token where it ended; it is empty where
            the prompt leaves no room in the context.
        """

    def close(self) -> None:
        """Free what is held beside the target."""


class TransformersDecoder:
    """Implements :class:`Decoder` with the target as it is loaded: a padded batch for each way of choosing."""

    name = "transformers"

    def __init__(self, target: Target) -> None:
        self.target = target

    def begin(self, seed: int) -> None:
        """See :meth:`Decoder.begin`."""
        torch.manual_seed(seed)

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """See :meth:`Decoder.write`; no context is ever too full."""
        found: list[list[int]] = [[] for _ in prompts]
        for way in dict.fromkeys(ways):
            alike = [index for index, each in enumerate(ways) if each == way]
            texts = generate(self.target, [prompts[index] for index in alike], new_tokens, **_options(way))
            for index, text in zip(alike, texts, strict=True):
                found[index] = text
        return found

    def close(self) -> None:
        """See :meth:`Decoder.close`: nothing is held."""


def _options(way: Sampled | None) -> dict[str, Any]:
    """Of transformers' ``generate``."""
    if way is None:
        return {"do_sample": False}
    options = {"do_sample": True, "temperature": way.temperature, "top_p": way.top_p}
    return {**options, "min_p": way.min_p} if way.min_p else options


def answer_greedily(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The target's greedy answers to token prompts, one batch; each ends with its stop token where it ended."""
    return generate(target, prompts, new_tokens, do_sample=False)


@torch.no_grad()
def generate(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> list[list[int]]:
    """What the target writes behind each prompt; each result ends with its stop token where it ended.

    On a GPU transformers compiles the single-token step with CUDA graphs.

    Args:
        options: of transformers' ``generate``: ``do_sample``, ``temperature``, ``top_p``.
    """
    rows = list(prompts)
    longest = max(map(len, rows))
    compiled = target.device.type == "cuda"
    if compiled:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled is slower, and no reason to stop
        longest = _rounded(longest, _PROMPT_BLOCK)
        rows += [rows[-1]] * (_rounded(len(rows), _BATCH_BLOCK) - len(rows))
    stop = target.stop_tokens
    pad = stop[0]
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in rows], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows], device=target.device)
    out = target.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        eos_token_id=list(stop),
        pad_token_id=pad,
        top_k=0,
        # Seen to be almost twice as fast as a growing cache at large batches on a CPU.
        cache_implementation="static",
        disable_compile=not compiled,
        **options,
    )
    return [_until_stop(row, stop) for row in out[: len(prompts), longest:].tolist()]


def _rounded(number: int, block: int) -> int:
    return -(-number // block) * block


def _until_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def repetitive(tokens: Sequence[int], span: int = 4, share: float = 0.5) -> bool:
    """Whether more than ``share`` of a text's ``span``-grams repeat earlier ones, as looping text does."""
    grams = [tuple(tokens[i : i + span]) for i in range(len(tokens) - span + 1)]
    return len(grams) >= 16 and len(set(grams)) < (1 - share) * len(grams)


_WINDOW = 16  # batches whose prompts are sorted by length together
_MARK = "\u241e"  # stands for a message while the template is cut there
_LEAST_MESSAGE = 5  # tokens; less is hardly a message
_FEWEST = 10  # conversations that can be trained on, with some held out
#: How a user's message begins, by kind; the target writes the rest. ``open`` leaves it all to the target.
OPENINGS: dict[str, tuple[str, ...]] = {
    "open": ("",),
    "chat": (
        "Can you recommend",
        "What is the best way to",
        "I have been feeling",
        "Tell me about",
        "Pretend that you are",
        "Why do people",
        "Give me some ideas for",
    ),
    "code": (
        "Write a Python function that",
        "Write a JavaScript function which",
        "Explain what this code does:\n\n```python\ndef",
        "How do I fix this error in my code?\n\n```\n",
        "Write a SQL query that",
        "Write a shell command to",
    ),
    "maths": (
        "Solve this problem step by step: A",
        "A shop sells",
        "If a train",
        "Calculate",
        "Maria has",
        "What is the probability that",
    ),
    "summary": (
        "Summarize the following text in one sentence:\n\nThe",
        "Give me the main points of this article:\n\n",
        "Write a short summary of this conversation:\n\n",
    ),
    "passage": (
        "Read the passage and answer the question.\n\nPassage: The",
        "Answer the question using only the text below.\n\nText: In",
        "Context: ",
    ),
    "translation": (
        "Translate the following sentence into German: ",
        "Translate into English: Der",
        "Translate into English: Le",
        "How do you say this in Spanish: ",
        "Translate the following text into French:\n\n",
    ),
    "extraction": (
        "Extract all names and dates from this text:\n\n",
        "List the key facts of this text as JSON:\n\n",
        "Which products and prices are mentioned here?\n\n",
    ),
    "rewriting": (
        "Rewrite this sentence so that it is more formal: ",
        "Correct the grammar of this text: ",
        "Make this paragraph shorter and simpler:\n\n",
        "Rephrase the following email politely:\n\n",
    ),
}


def generate_conversations(
    decoder: Decoder,
    out: Path,
    settings: GenerateSettings,
    *,
    prompts: Path | None = None,
    report: Callable[[int], None],
    until: float = math.inf,
    few_from: float = math.inf,
) -> bool:
    """Append conversations to the token store ``out`` until it holds ``settings.conversations``.

    Interrupted at any point, it goes on behind the last whole line; batch ``n`` is the same in every run.

    Args:
        decoder: of the target that writes; what the settings leave to the writer is its own default.
        prompts: see :func:`read_prompts`; every turn is answered. Without it the target writes the user's
            messages too.
        report: called with the number of conversations held.
        until: reading of ``time.monotonic`` at which to stop.
        few_from: reading from which on as few as can be trained on are enough.

    Returns:
        whether there are as many as wanted.

    Raises:
        MoaError: a broken prompts file, one with too few prompts, or a mix that names what there is not.
    """
    settings = for_writer(settings, decoder.name)
    wanted = settings.conversations or DEFAULT_CONVERSATIONS
    held, batch = _whole_lines(out)
    given = read_prompts(prompts, settings.write_batch) if prompts else None
    report(held)
    if held >= wanted:
        return True
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as store:
        while held < wanted:
            now = time.monotonic()
            if now >= until or (now >= few_from and held >= _FEWEST):
                return False
            batch += 1
            decoder.begin(settings.seed * 1_000_003 + batch)
            writer = _Writer(decoder, settings, random.Random(f"{settings.seed}/{batch}"))
            dialogues = writer.answered(_given(given, batch)) if given else writer.own_conversations()
            lines = [dialogue.line(batch) for dialogue in dialogues if dialogue.answered][: wanted - held]
            store.write("".join(lines))
            store.flush()
            held += len(lines)
            report(held)
    return True


def lines_held(path: Path) -> int:
    """Whole lines of a file that may not be there."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _whole_lines(path: Path) -> tuple[int, int]:
    """Cut off a line that an interruption left unfinished; returns lines held and the last batch's number."""
    if not path.is_file():
        return 0, 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        path.write_bytes(whole)
    lines = whole.splitlines()
    return len(lines), json.loads(lines[-1]).get("b", 0) if lines else 0


def _given(batches: list[list[list[str]]], number: int) -> list[list[str]]:
    if number > len(batches):
        raise MoaError(f"the prompts file holds {sum(map(len, batches))} prompts, which is fewer than asked for")
    return batches[number - 1]


@dataclass
class _Dialogue:
    """A conversation while it is written: its tokens, and the spans of the user's messages after the first answer."""

    says: list[str]  # the user's messages that are still to come
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    answered: bool = False

    def take(self, text: list[int], answer: list[int]) -> None:
        """Add an answer to ``text``, which is the conversation so far with the user's last message."""
        if self.answered:
            self.asked.append((len(self.tokens), len(text)))
        else:
            self.prompt = len(text)
        self.tokens, self.answered = [*text, *answer], True

    def line(self, batch: int) -> str:
        first = self.prompt
        raw: dict[str, Any] = {"p": self.tokens[:first], "r": self.tokens[first:]}
        if self.asked:
            raw["u"] = [[start - first, stop - first] for start, stop in self.asked]
        return json.dumps({**raw, "b": batch}, separators=(",", ":")) + "\n"


class _Writer:
    """Writes one batch of conversations, turn by turn."""

    def __init__(self, decoder: Decoder, settings: GenerateSettings, rng: random.Random) -> None:
        self._decoder, self._settings, self._rng = decoder, settings, rng
        self._target = decoder.target

    def own_conversations(self) -> list[_Dialogue]:
        """The target speaks for the user too: openings of several kinds, written on, some with a second question."""
        settings = self._settings
        begun = self._template(_MARK).partition(_MARK)[0]
        openings = draw_openings(settings.mix, settings.write_batch, self._rng)
        written = self._messages([self._encode(begun + opening) for opening in openings])
        dialogues = self.answered([[opening + text] for opening, text in zip(openings, written, strict=True) if text])
        more = [d for d in dialogues if d.answered and self._rng.random() < settings.follow_up_share]
        more = [d for d in more if len(d.tokens) + settings.prompt_tokens <= settings.longest_prompt]
        if more:
            written = self._messages([d.tokens + self._behind(d, _MARK) for d in more])
            for dialogue, text in zip(more, written, strict=True):
                dialogue.says = [text] if text else []
            self._answer_all(more)
        return dialogues

    def answered(self, conversations: Sequence[Sequence[str]]) -> list[_Dialogue]:
        """Answer every turn of conversations of which the user's part is given."""
        dialogues = [_Dialogue(list(says)) for says in conversations]
        self._rng.shuffle(dialogues)
        self._answer_all(dialogues)
        return dialogues

    def _answer_all(self, dialogues: Sequence[_Dialogue]) -> None:
        while dialogues := [dialogue for dialogue in dialogues if dialogue.says]:
            self._answer(dialogues)

    def _answer(self, dialogues: Sequence[_Dialogue]) -> None:
        """Answer the next message of each; where that goes wrong, the conversation ends before it."""
        asked: list[tuple[_Dialogue, list[int]]] = []
        for dialogue in dialogues:
            message = dialogue.says.pop(0)
            text = dialogue.tokens + self._behind(dialogue, message) if dialogue.answered else self._first(message)
            if len(text) <= self._settings.longest_prompt:
                asked.append((dialogue, text))
            else:
                dialogue.says = []
        if not asked:
            return
        sampled = round(len(asked) * self._settings.sampled_share)
        ways = [Sampled(self._settings.temperature) if index < sampled else None for index in range(len(asked))]
        answers = self._decoder.write([text for _, text in asked], self._settings.answer_tokens, ways)
        for (dialogue, text), answer in zip(asked, answers, strict=True):
            if len(answer) > 1 and not repetitive(answer):
                dialogue.take(text, answer)
            else:
                dialogue.says = []

    def _messages(self, prompts: Sequence[list[int]]) -> list[str]:
        """What the user goes on to say behind each prompt; empty where that is no message."""
        settings = self._settings
        way = Sampled(settings.prompt_temperature, settings.prompt_top_p, settings.prompt_min_p)
        written = self._decoder.write(prompts, settings.prompt_tokens, [way] * len(prompts))
        stop = self._target.stop_tokens
        return [
            # A message that was cut off, or is hardly one, teaches nothing.
            self._target.tokenizer.decode(tokens, skip_special_tokens=True)
            if len(tokens) >= _LEAST_MESSAGE and tokens[-1] in stop and not repetitive(tokens)
            else ""
            for tokens in written
        ]

    def _first(self, message: str) -> list[int]:
        """The prompt of a conversation's first answer."""
        return self._encode(self._template(message, answering=True))

    def _behind(self, dialogue: _Dialogue, message: str) -> list[int]:
        """What stands between the last answer and the next one; with the mark as message, what stands before it."""
        parts = self._template("x", _MARK, message, answering=True).split(_MARK)
        between = self._encode(parts[1])
        # An answer that ended has its end-of-turn token; one that was cut off gets it here.
        ended = dialogue.tokens[-1] in self._target.stop_tokens and between[:1] == dialogue.tokens[-1:]
        return between[1:] if ended else between

    def _template(self, *texts: str, answering: bool = False) -> str:
        """The chat template over texts of user and assistant in turn."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        return self._target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)

    def _encode(self, text: str) -> list[int]:
        return self._target.tokenizer(text, add_special_tokens=False)["input_ids"]


def read_prompts(path: Path, batch_size: int) -> list[list[list[str]]]:
    """Read what users say, in batches of conversations of like length, which waste little padding.

    The batches themselves are in random order, the same in every call, so that a run that stops early has
    answered long prompts too.

    Args:
        path: JSON lines of ``{"messages": [{"role": "user", "content": ...}, ...]}``, of which the user's are
            taken, or of ``{"prompt": ...}``; gzip if named ``.gz``.

    Returns:
        batches of conversations, each a list of what the user says turn by turn.

    Raises:
        MoaError: the file cannot be read, or a line is broken (named by number).
    """
    said: list[list[str]] = []
    try:
        with open_lines(path) as lines:
            for number, line in enumerate(lines, 1):
                said.append(_turns(line, f"{path}, line {number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MoaError(f"cannot read the prompts {path}: {error}; expected JSON lines") from error
    batches: list[list[list[str]]] = []
    for start in range(0, len(said), _WINDOW * batch_size):
        window = sorted(said[start : start + _WINDOW * batch_size], key=lambda turns: (len(turns), len(turns[0])))
        alike = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        batches += random.Random(start).sample(alike, len(alike))
    return batches


def _turns(line: str, where: str) -> list[str]:
    try:
        raw = json.loads(line)
        if "prompt" in raw:
            return [str(raw["prompt"])]
        turns = [str(message["content"]) for message in raw["messages"] if message.get("role", "user") == "user"]
        if not turns:
            raise ValueError("no message of the user")
        return turns
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MoaError(f"{where}: expected {{'prompt': text}} or {{'messages': [...]}}, one of the user") from error


def draw_openings(mix: dict[str, float], count: int, rng: random.Random) -> Sequence[str]:
    """How ``count`` messages begin, their kinds drawn by weight.

    Raises:
        MoaError: a kind that there is not, or no weight above zero.
    """
    for kind, weight in mix.items():
        if kind not in OPENINGS:
            raise MoaError(f"mix names an unknown kind {kind!r}: known are {', '.join(OPENINGS)}")
        if not weight >= 0:
            raise MoaError(f"the weight of {kind!r} in mix must be at least 0, not {weight}")
    if not sum(mix.values()) > 0:
        raise MoaError("mix needs a weight above 0")
    kinds = rng.choices(list(mix), list(mix.values()), k=count)
    return [rng.choice(OPENINGS[kind]) for kind in kinds]


def resolve_writer(settings: SettingsT, device: str) -> SettingsT:
    """Replace the writer ``auto``: vLLM if it is installed for this device, otherwise transformers.

    The installed packages decide, without a trial, so that a command writes the same texts wherever the same packages
    are installed.

    Returns:
        the settings with the writer, and with its own values for settings that were left open.
    """
    writer = settings.writer
    if writer == "auto":
        found = vllm_environment.installed() if _is_there() else None
        fits = found is not None and found.device == device.partition(":")[0]
        writer = "vllm" if fits else "transformers"
    return for_writer(settings, writer)


def check_installed(settings: GenerateSettings) -> None:
    """Raise a MoaError if the writer is not installed."""
    if settings.writer == "vllm" and not _is_there():
        raise MoaError(
            "writer vllm needs vLLM, which is not installed here: choose --writer transformers, or install it in an "
            'environment of its own, pip install "moa-edge[vllm]" (vllm-cuda for CUDA)'
        )


def open_decoder(target: Target, settings: GenerateSettings) -> Decoder:
    """Open the decoder of the writer that :func:`resolve_writer` chose.

    Raises:
        MoaError: the writer is not installed, or cannot run the target on this device.
    """
    check_installed(settings)
    if settings.writer == "transformers":
        return TransformersDecoder(target)
    vllm_environment.prepare()  # before vLLM is imported
    from moa_drafter.training.vllm_decoder import VllmDecoder

    return VllmDecoder(target, settings)


def _is_there() -> bool:
    return importlib.util.find_spec("vllm") is not None
