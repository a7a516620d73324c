"""Self-distillation: the target writes the prompts, then the answers (arXiv 2410.03804, section 4.1 trains
on given data; that answers of the target itself work better was found by EAGLE-3 and others)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moa_drafter.target import Target
from moa_runtime.errors import MoaError

_MARK = "\u241e"  # stands for the user's message while the template is cut there


@dataclass(frozen=True)
class GenerateSettings:
    """Lengths are in tokens; ``sampled_share`` of the answers are sampled at ``answer_temperature``, the
    others are greedy."""

    conversations: int
    batch_size: int = 64
    prompt_tokens: int = 96
    answer_tokens: int = 176
    longest_prompt: int = 448
    prompt_temperature: float = 1.0
    prompt_top_p: float = 0.98
    sampled_share: float = 0.25
    answer_temperature: float = 0.8
    seed: int = 0


def generate_conversations(
    target: Target,
    out: Path,
    settings: GenerateSettings,
    *,
    prompts: Path | None = None,
    report: Callable[[int], None],
) -> None:
    """Append conversations to the token store ``out`` until it holds ``settings.conversations``.

    Interrupted at any point, it goes on from the last whole line; batch ``n`` is the same in every run.

    Args:
        prompts: JSON lines of ``{"messages": [{"role": "user", "content": ...}]}`` or ``{"prompt": ...}``;
            of several user turns the first is used. Without it the target writes the user's messages too.
        report: called with the number of conversations held.

    Raises:
        MoaError: a broken prompts file, or one with too few prompts.
    """
    held, batch = _whole_lines(out)
    given = _prompt_batches(prompts, settings) if prompts else None
    with out.open("a") as store:
        report(held)
        while held < settings.conversations:
            batch += 1
            torch.manual_seed(settings.seed * 1_000_003 + batch)
            rng = random.Random(f"{settings.seed}/{batch}")
            messages = _given(given, batch) if given else _write_messages(target, settings)
            lines = list(_answer(target, messages, settings, rng))[: settings.conversations - held]
            for prompt, answer in lines:
                store.write(json.dumps({"p": prompt, "r": answer, "b": batch}, separators=(",", ":")) + "\n")
            store.flush()
            held += len(lines)
            report(held)


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


def _prompt_batches(path: Path, settings: GenerateSettings) -> list[list[str]]:
    texts: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MoaError(f"cannot read the prompts {path}: {error}; expected JSON lines") from error
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            text = raw["prompt"] if "prompt" in raw else raw["messages"][0]["content"]
            texts.append(str(text))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise MoaError(
                f"{path}, line {number}: expected {{'prompt': text}} or {{'messages': [...]}} ({error!r})"
            ) from error
    return [texts[i : i + settings.batch_size] for i in range(0, len(texts), settings.batch_size)]


def _given(batches: list[list[str]], number: int) -> list[str]:
    if number > len(batches):
        raise MoaError(f"the prompts file holds {sum(map(len, batches))} prompts, which is fewer than asked for")
    return batches[number - 1]


def _write_messages(target: Target, settings: GenerateSettings) -> list[str]:
    """Let the target write user messages: the chat template, cut where the user's message begins."""
    template = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=False
    )
    opening = target.tokenizer(template.partition(_MARK)[0], add_special_tokens=False)["input_ids"]
    written = _generate(
        target,
        [opening] * settings.batch_size,
        settings.prompt_tokens,
        do_sample=True,
        temperature=settings.prompt_temperature,
        top_p=settings.prompt_top_p,
    )
    stop = target.stop_tokens
    # A message that was cut off, or is hardly one, teaches nothing.
    whole = [tokens for tokens in written if tokens[-1] in stop and len(tokens) > 4 and not repetitive(tokens)]
    return [target.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in whole]


def _answer(
    target: Target, messages: Sequence[str], settings: GenerateSettings, rng: random.Random
) -> Iterator[tuple[list[int], list[int]]]:
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for message in messages
    ]
    prompts = [prompt for prompt in prompts if len(prompt) <= settings.longest_prompt]
    rng.shuffle(prompts)
    sampled = round(len(prompts) * settings.sampled_share)
    for part, options in (
        (prompts[:sampled], {"do_sample": True, "temperature": settings.answer_temperature, "top_p": 1.0}),
        (prompts[sampled:], {"do_sample": False}),
    ):
        if part:
            answers = _generate(target, part, settings.answer_tokens, **options)
            yield from ((p, a) for p, a in zip(part, answers, strict=True) if len(a) > 1 and not repetitive(a))


def answer_greedily(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The target's greedy answers to token prompts, one batch; each ends with its stop token where it ended."""
    return _generate(target, prompts, new_tokens, do_sample=False)


@torch.no_grad()
def _generate(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> list[list[int]]:
    """Batched generation; each result ends with its stop token where it ended."""
    longest = max(map(len, prompts))
    stop = target.stop_tokens
    pad = stop[0]
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    out = target.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        eos_token_id=stop,
        pad_token_id=pad,
        top_k=0,
        # Seen to be almost twice as fast as a growing cache at large batches on a CPU.
        cache_implementation="static",
        disable_compile=True,
        **options,
    )
    return [_until_stop(row, stop) for row in out[:, longest:].tolist()]


def _until_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def repetitive(tokens: Sequence[int], span: int = 4, share: float = 0.5) -> bool:
    """Whether more than ``share`` of a text's ``span``-grams repeat earlier ones, as looping text does."""
    grams = [tuple(tokens[i : i + span]) for i in range(len(tokens) - span + 1)]
    return len(grams) >= 16 and len(set(grams)) < (1 - share) * len(grams)
