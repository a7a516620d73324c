"""Self-distillation: the target writes prompts and answers. arXiv 2410.03804, section 4.1, trains on given data;
EAGLE-3 and others found the target's own answers better."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from moa_drafter import vllm_environment
from moa_drafter.config import key_value_size
from moa_drafter.target import Target
from moa_drafter.training.data import open_lines
from moa_drafter.training.settings import DEFAULT_CONVERSATIONS, GenerateSettings, SettingsT, for_writer
from moa_drafter.vllm_environment import VllmError, reason
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import install_command

_PLACES = 128  # texts that are written at once
_BLOCK = 32  # tokens of a cache block; only whole ones are shared, and CPUs need a multiple of 32
_TEMPLATE = 256  # tokens that a chat template adds at most
_GPU_SHARE = 0.5  # of the GPU's memory, beside the target in transformers; the caches have a size of their own
# Compiled graphs have one shape, so on a GPU batches and prompts are rounded up to few sizes.
_PROMPT_BLOCK = 128
_BATCH_BLOCK = 64


@dataclass(frozen=True)
class Sampled:
    """Sampling of a text; ``top_p`` of 1 and ``min_p`` of 0 keep all tokens."""

    temperature: float
    top_p: float = 1.0
    min_p: float = 0.0


class Decoder(Protocol):
    """A program that runs the target for writing.

    Attributes:
        name: a key of :data:`moa_drafter.training.settings.WRITERS`.
    """

    name: str
    target: Target

    def begin(self, seed: int) -> None:
        """Begin a batch, whose texts follow from the seed and the batch's calls alone."""

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """Return the token ids that the target writes after each prompt.

        A text ends with its stop token unless it is cut off; it is empty if the prompt leaves no room in the context.

        Args:
            prompts: token ids.
            new_tokens: of each text at most.
            ways: sampling of each text; None: greedy.
        """

    def close(self) -> None:
        """Free memory beside the target's."""


class TransformersDecoder:
    """Implements :class:`Decoder` with the loaded target: one padded batch for each kind of sampling."""

    name = "transformers"

    def __init__(self, target: Target) -> None:
        self.target = target

    def begin(self, seed: int) -> None:
        """See :meth:`Decoder.begin`."""
        torch.manual_seed(seed)

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """See :meth:`Decoder.write`; the context is not limited."""
        found: list[list[int]] = [[] for _ in prompts]
        for way in dict.fromkeys(ways):
            alike = [index for index, each in enumerate(ways) if each == way]
            texts = generate(self.target, [prompts[index] for index in alike], new_tokens, **_options(way))
            for index, text in zip(alike, texts, strict=True):
                found[index] = text
        return found

    def close(self) -> None:
        """See :meth:`Decoder.close`; nothing to free."""


class VllmDecoder:
    """Implements :class:`Decoder` with vLLM's public interface.

    The caches hold half as many tokens as :data:`_PLACES` texts of greatest length have; texts wait if that is too
    little. They are emptied before each batch, and steps are not scheduled ahead, so a batch does not depend on earlier
    ones. Inside a batch a text depends on the others, because rounding depends on the size of a product. ``settings``
    bound the length of texts. Raises VllmError if vLLM computes on another device or cannot run the target.
    """

    name = "vllm"

    def __init__(self, target: Target, settings: GenerateSettings) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        device, own = target.device.type, current_platform.device_type
        if device != own:
            raise VllmError(
                f"vLLM as it is installed here computes on {own}, not on {device}: choose --writer transformers, "
                "or install another build of vLLM",
                code="wrong_device",
            )
        self.target = target
        self._random = random.Random()
        longest = settings.longest_prompt + settings.prompt_tokens + settings.answer_tokens + _TEMPLATE
        self._length = min(longest, int(target.config.max_position_embeddings))
        blocks = -(-self._length // _BLOCK) * _PLACES // 2
        dtype = target.model.dtype
        block_bytes = _BLOCK * key_value_size(target.config) * target.config.num_hidden_layers * dtype.itemsize
        try:
            self._llm = LLM(
                str(target.folder),
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=str(dtype).removeprefix("torch."),
                seed=0,
                max_model_len=self._length,
                max_num_seqs=_PLACES,
                block_size=_BLOCK,
                kv_cache_memory_bytes=blocks * block_bytes,
                gpu_memory_utilization=_GPU_SHARE,
                enable_prefix_caching=True,
                async_scheduling=False,
                enforce_eager=own == "cpu",
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        except (ValueError, RuntimeError, TypeError, NotImplementedError, KeyError, ImportError) as error:
            raise VllmError(
                f"vLLM cannot run the target in {target.folder} here: {reason(error)}; --writer transformers may",
                code="unsupported_target",
            ) from error

    def begin(self, seed: int) -> None:
        """See :meth:`Decoder.begin`."""
        self._llm.reset_prefix_cache()
        self._random.seed(seed)

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ways: Sequence[Sampled | None]
    ) -> list[list[int]]:
        """See :meth:`Decoder.write`; each text has its own seed, so the order in which texts end does not matter."""
        from vllm import SamplingParams, TokensPrompt

        requests = {}
        for index, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
            sampling = {"temperature": 0.0} if way is None else {**asdict(way), "seed": self._random.getrandbits(31)}
            room = self._length - len(prompt)
            if room > 0:
                requests[index] = SamplingParams(
                    **sampling,
                    max_tokens=min(new_tokens, room),
                    stop_token_ids=list(self.target.stop_tokens),
                    ignore_eos=True,  # it is unknown without a tokenizer
                    detokenize=False,
                )
        texts = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompts[index])) for index in requests],
            list(requests.values()),
            use_tqdm=False,
        )
        written = {index: list(text.outputs[0].token_ids) for index, text in zip(requests, texts, strict=True)}
        return [written.get(index, []) for index in range(len(prompts))]

    def close(self) -> None:
        """See :meth:`Decoder.close`."""
        del self._llm
        gc.collect()


def _options(way: Sampled | None) -> dict[str, Any]:
    """Return options of transformers' ``generate``."""
    if way is None:
        return {"do_sample": False}
    options = {"do_sample": True, "temperature": way.temperature, "top_p": way.top_p}
    return {**options, "min_p": way.min_p} if way.min_p else options


def answer_greedily(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return the target's greedy answers to token prompts, see :func:`generate`."""
    return generate(target, prompts, new_tokens, do_sample=False)


@torch.no_grad()
def generate(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> list[list[int]]:
    """Return the tokens that the target writes after each prompt in one batch, each with its stop token if it ended.

    Args:
        options: of transformers' ``generate``: ``do_sample``, ``temperature``, ``top_p``, ``min_p``.
    """
    rows = list(prompts)
    longest = max(map(len, rows))
    compiled = target.device.type == "cuda"
    if compiled:
        torch._dynamo.config.suppress_errors = True  # the uncompiled step is slower, but works
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
        # Almost twice as fast as a growing cache at large batches on a CPU.
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
    """Whether more than ``share`` of a text's ``span``-grams repeat earlier ones."""
    grams = [tuple(tokens[i : i + span]) for i in range(len(tokens) - span + 1)]
    return len(grams) >= 16 and len(set(grams)) < (1 - share) * len(grams)


_WINDOW = 16  # batches whose prompts are sorted by length together
_MARK = "\u241e"  # placeholder of a message, at which the template is cut
_LEAST_MESSAGE = 5  # tokens
_FEWEST = 10  # conversations to train on, with some held out
#: Beginnings of a user's message by kind; the target writes the rest.
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
    """Append conversations to the token store ``out`` until it holds ``settings.conversations``; whether it does.

    After an interruption it continues after the last whole line; batch ``n`` is the same in every run. Raises MoaError
    for a broken prompts file, too few prompts, or an unknown kind in ``settings.mix``.

    Args:
        prompts: see :func:`read_prompts`; every turn is answered. By default the target writes the user's messages.
        report: called with the number of conversations held.
        until: reading of ``time.monotonic`` at which to stop.
        few_from: reading from which on the fewest that can be trained on suffice.
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
    """Count the whole lines of a file; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _whole_lines(path: Path) -> tuple[int, int]:
    """Cut off a line that an interruption left unfinished; return the number of lines and of the last batch."""
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
        raise MoaError(f"the prompts file holds only {sum(map(len, batches))} prompts", code="too_few")
    return batches[number - 1]


@dataclass
class _Dialogue:
    """A conversation being written: its tokens, and the spans of the user's messages after the first answer."""

    says: list[str]  # the user's messages to come
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    answered: bool = False

    def take(self, text: list[int], answer: list[int]) -> None:
        """Add an answer to ``text``, the conversation so far with the user's last message."""
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
        """Write the user's messages too, from openings of several kinds, some with a second question."""
        settings = self._settings
        begun = self._template(_MARK).partition(_MARK)[0]
        openings = draw_openings(settings.mix, settings.write_batch, self._rng)
        written = self._messages([self._encode(begun + opening) for opening in openings])
        dialogues = self.answered([[opening + text] for opening, text in zip(openings, written, strict=True) if text])
        more = [d for d in dialogues if d.answered and self._rng.random() < settings.follow_up_share]
        more = [d for d in more if len(d.tokens) + settings.prompt_tokens <= settings.longest_prompt]
        if more:
            written = self._messages([d.tokens + self._after(d, _MARK) for d in more])
            for dialogue, text in zip(more, written, strict=True):
                dialogue.says = [text] if text else []
            self._answer_all(more)
        return dialogues

    def answered(self, conversations: Sequence[Sequence[str]]) -> list[_Dialogue]:
        """Answer every turn of conversations whose user's messages are given."""
        dialogues = [_Dialogue(list(says)) for says in conversations]
        self._rng.shuffle(dialogues)
        self._answer_all(dialogues)
        return dialogues

    def _answer_all(self, dialogues: Sequence[_Dialogue]) -> None:
        while dialogues := [dialogue for dialogue in dialogues if dialogue.says]:
            self._answer(dialogues)

    def _answer(self, dialogues: Sequence[_Dialogue]) -> None:
        """Answer the next message of each; a conversation ends before an answer that fails."""
        asked: list[tuple[_Dialogue, list[int]]] = []
        for dialogue in dialogues:
            message = dialogue.says.pop(0)
            text = dialogue.tokens + self._after(dialogue, message) if dialogue.answered else self._first(message)
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
        """Write the user's message after each prompt; empty if it is no message."""
        settings = self._settings
        way = Sampled(settings.prompt_temperature, settings.prompt_top_p, settings.prompt_min_p)
        written = self._decoder.write(prompts, settings.prompt_tokens, [way] * len(prompts))
        stop = self._target.stop_tokens
        return [
            # A message that was cut off or is too short teaches nothing.
            self._target.tokenizer.decode(tokens, skip_special_tokens=True)
            if len(tokens) >= _LEAST_MESSAGE and tokens[-1] in stop and not repetitive(tokens)
            else ""
            for tokens in written
        ]

    def _first(self, message: str) -> list[int]:
        """Return the prompt of a conversation's first answer."""
        return self._encode(self._template(message, answering=True))

    def _after(self, dialogue: _Dialogue, message: str) -> list[int]:
        """Return the tokens between the last answer and the next one; with the mark as message, those before it."""
        parts = self._template("x", _MARK, message, answering=True).split(_MARK)
        between = self._encode(parts[1])
        # A finished answer has its end-of-turn token; one that was cut off gets it here.
        ended = dialogue.tokens[-1] in self._target.stop_tokens and between[:1] == dialogue.tokens[-1:]
        return between[1:] if ended else between

    def _template(self, *texts: str, answering: bool = False) -> str:
        """Apply the chat template to texts of user and assistant in turn."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        return self._target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)

    def _encode(self, text: str) -> list[int]:
        return self._target.tokenizer(text, add_special_tokens=False)["input_ids"]


def read_prompts(path: Path, batch_size: int) -> list[list[list[str]]]:
    """Read the user's messages of conversations, in batches of like length, which need little padding.

    The order of the batches is random but fixed, so that a run that stops early has answered long prompts too. Raises
    MoaError if the file cannot be read or a line, named by number, is broken.

    Args:
        path: JSON lines of ``{"messages": [{"role": "user", "content": ...}, ...]}`` or of ``{"prompt": ...}``; gzip
            if named ``.gz``.
    """
    said: list[list[str]] = []
    try:
        with open_lines(path) as lines:
            for number, line in enumerate(lines, 1):
                said.append(_turns(line, f"{path}, line {number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MoaError(f"cannot read the prompts {path}: {error}; expected JSON lines", code="unreadable") from error
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
        raise MoaError(f"{where}: expected {{'prompt': text}} or {{'messages': [...]}}", code="bad_line") from error


def draw_openings(mix: dict[str, float], count: int, rng: random.Random) -> Sequence[str]:
    """Draw the beginnings of ``count`` messages by weight. Raises MoaError for an unknown kind or bad weights."""
    for kind, weight in mix.items():
        if kind not in OPENINGS:
            raise MoaError(f"mix names an unknown kind {kind!r}: known are {', '.join(OPENINGS)}", code="unknown_kind")
        if not weight >= 0:
            raise MoaError(f"the weight of {kind!r} in mix must be at least 0, not {weight}", code="out_of_range")
    if not sum(mix.values()) > 0:
        raise MoaError("mix needs a weight above 0", code="out_of_range")
    kinds = rng.choices(list(mix), list(mix.values()), k=count)
    return [rng.choice(OPENINGS[kind]) for kind in kinds]


def resolve_writer(settings: SettingsT, device: str) -> SettingsT:
    """Replace the writer ``auto`` by vLLM if it is installed for this device, otherwise transformers, and settings that
    are None by the writer's defaults. Nothing is tried out, so that equal installations write equal texts."""
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
            "vLLM is not installed: choose --writer transformers, or install it in an environment of its own, "
            f"{install_command('vllm')} (vllm-cuda for CUDA)",
            code="not_installed",
        )


def open_decoder(target: Target, settings: GenerateSettings) -> Decoder:
    """Open the decoder of the resolved writer. Raises MoaError if it is not installed or cannot run the target."""
    check_installed(settings)
    if settings.writer == "transformers":
        return TransformersDecoder(target)
    vllm_environment.prepare()  # before vLLM is imported
    return VllmDecoder(target, settings)


def _is_there() -> bool:
    return importlib.util.find_spec("vllm") is not None
