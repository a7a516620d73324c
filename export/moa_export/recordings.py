"""Recorded conversations, as a device would see them, on which exports are compared.

Random inputs would misrepresent the loss by quantisation. So the target answers a fixed set of questions greedily, and
the drafter's server half makes memory rows from its states.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moa_drafter.config import Reads
from moa_drafter.drafter import Drafter, TokenDrafter
from moa_drafter.target import Target
from moa_drafter.target_features import target_states
from moa_drafter.training.generation import answer_greedily
from moa_runtime.atomic_file import replace_private
from moa_runtime.drafters.base import Float32
from moa_runtime.paths import cache_dir

ANSWER_TOKENS = 48
_BATCH = 12


@dataclass(frozen=True)
class Recording:
    """One conversation of one turn.

    Attributes:
        tokens: prompt and answer.
        prompt: how many of them come before the answer.
        keys, values: memory rows of all tokens, ``[n, kv_heads, head_dim]``; of none where the drafter reads none.
        losses: the target's, of each token of the answer (nats).
    """

    tokens: list[int]
    prompt: int
    keys: Float32
    values: Float32
    losses: Sequence[float] = ()


@torch.no_grad()
def record(target: Target, drafter: Drafter | None, questions: Sequence[str]) -> list[Recording]:
    """Let the target answer, and make memory rows of the conversations if there is a drafter that reads them."""
    recordings, logits_of = [], target.logits
    row_maker = None if drafter is None or isinstance(drafter, TokenDrafter) else drafter
    shape = (1, 1) if drafter is None else (drafter.config.kv_heads, drafter.config.decoder.head_dim)
    keys = values = np.zeros((0, *shape), np.float32)
    for prompt, answer in _conversations(target, questions):
        tokens = prompt + answer
        states = target_states(target, tokens, Reads() if row_maker is None else row_maker.row_reads)
        logits = logits_of(states.last[len(prompt) - 1 : -1]).float()
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(answer, device=logits.device), reduction="none")
        if row_maker is not None:
            made = row_maker.rows(states.to(torch.float32), torch.arange(len(tokens)))
            keys, values = (rows.numpy() for rows in made)
        recordings.append(Recording(tokens, len(prompt), keys, values, losses.tolist()))
    return recordings


def _conversations(target: Target, questions: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy answer of each question; kept on disk, for they depend on the target alone."""
    apply = target.tokenizer.apply_chat_template
    prompts: list[list[int]] = [
        apply([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for text in questions
    ]
    identity = json.dumps([target.fingerprint, ANSWER_TOKENS, prompts])
    kept = cache_dir() / "answers" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    if not kept.is_file():
        answers: list[list[int]] = []
        for start in range(0, len(prompts), _BATCH):
            answers += answer_greedily(target, prompts[start : start + _BATCH], ANSWER_TOKENS)
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_private(kept, [json.dumps(answers).encode()])
    return list(zip(prompts, json.loads(kept.read_text()), strict=True))


#: Questions on whose answers an export is proved: several kinds of text, none of them from a benchmark.
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds two numbers and explain it.",
    "Give me three tips for sleeping better.",
    "Tell me a very short story about a fox.",
    "Translate to French: Good morning, how are you today?",
    "A train travels 60 km in one hour. How far does it travel in three and a half hours?",
    "Summarise in two sentences: The library opens at nine and closes at six. On Sundays it stays shut. Members may "
    "borrow ten books for a month, and renew them twice unless somebody else has asked for them.",
    "Explain to a child why the sky is blue.",
    "List five vegetables that grow well in cold weather.",
    "Write a polite e-mail that asks a colleague to move a meeting to Thursday.",
    "What is the difference between a virus and a bacterium?",
    "Correct the grammar: She don't likes going to the market on Mondays.",
    "Extract the names and dates: Anna met Peter on 3 May 1998, and they married on 12 June 2001.",
    "What are the steps to change a bicycle tyre?",
    "Write a haiku about the sea.",
    "Is 91 a prime number? Explain your answer.",
    "Describe what a database index does.",
    "Pretend that you are a pirate and introduce yourself.",
    "Write a JSON object that describes a book with a title, an author and a year.",
    "What should I pack for a weekend in the mountains?",
    "Rewrite this in a formal tone: hey, can't come tomorrow, got a cold, sorry!",
    "According to this text, who won? The final was played in Rome. Brazil led twice, but Italy won in extra time.",
    "Name the planets of the solar system in order.",
    "Give two arguments for and two against working from home.",
)

#: Questions of the same kinds, on whose answers weights are rounded: a proof on the same ones would be biased.
CALIBRATION_PROMPTS = (
    "Which river flows through Cairo, and where does it end?",
    "Write a Python function that reverses a string, with a docstring.",
    "How can I learn to cook in a month?",
    "Tell me about a boy who finds an old key.",
    "Translate to Spanish: The shop is closed on Sundays.",
    "A box holds 12 eggs. How many boxes are needed for 90 eggs?",
    "Summarise: The council met on Monday. It decided to plant two hundred trees along the canal and to close the old "
    "bridge until spring, because its railings are loose.",
    "Explain what inflation is in simple words.",
    "Make a list of things to check before a long drive.",
    "Write a short thank-you note to a neighbour who watered the plants.",
    "How does a solar panel make electricity?",
    "Extract all place names: We drove from Lyon to Geneva and stopped in Annecy for lunch.",
    "Rewrite more simply: The aforementioned documentation is hereby rendered obsolete.",
    "Pretend to be a museum guide and welcome the visitors.",
    "Compare cats and dogs as pets.",
    "Based on this text, when does the train leave? The 9:40 to Leeds is delayed by 25 minutes.",
)
