"""Targets with recurrent layers: drafts, rewinds, shared blocks and memory rows, equal to transformers' own text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moa_drafter.architectures.registry import new_drafter
from moa_drafter.target import load_target
from moa_drafter.target_features import target_states
from moa_runtime.session.events import Sampling
from moa_server.engine.base import StepRequest
from moa_server.engine.baseline import decode
from moa_server.engine.engine import LocalEngine
from moa_server.engine.layer_cache import CHECKPOINT
from moa_server.engine.torch_engine import torch_engine
from support.families import FAMILIES, make_target

RECURRENT = ["LFM 2", "Qwen 3 Next", "Qwen 3.5", "Granite 4 (hybrid)"]
LONG = 2 * CHECKPOINT + 90
WARM = Sampling(temperature=1.0, seed=3)


@pytest.fixture(params=RECURRENT)
def engine(request, tiny_target: Path, tmp_path: Path, monkeypatch) -> LocalEngine:
    kind, fields = FAMILIES[request.param]
    monkeypatch.setitem(FAMILIES, request.param, (kind, {**fields, "max_position_embeddings": LONG + 60}))
    return torch_engine(load_target(str(make_target(request.param, tiny_target, tmp_path))))


def prompt(length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def written(engine: LocalEngine, prefix: list[int], count: int, number: int, *, wrong: random.Random) -> list[int]:
    """Write ``count`` tokens after ``prefix``, with drafts of plain decoding's tokens and a wrong one among them."""
    plain = [token for token, _ in decode(engine, prefix, WARM, count)]
    tokens = list(prefix)
    while len(tokens) < len(prefix) + count:
        done = len(tokens) - len(prefix)
        draft = plain[done : done + wrong.randrange(6)]
        if draft:
            draft[wrong.randrange(len(draft))] = wrong.randrange(3, 500)
        [outcome] = engine.step_now([StepRequest(number, tuple(tokens), draft, sampling=WARM)])
        tokens += [*(draft[index] for index in outcome.path), outcome.token]
    assert tokens[len(prefix) : len(prefix) + count] == plain
    return tokens


def test_drafts_do_not_change_sampled_text(engine) -> None:
    assert not engine.capabilities.trees
    written(engine, prompt(40), 30, 10**6, wrong=random.Random(1))


def test_a_rewind_goes_on_from_a_checkpoint(engine) -> None:
    """The text after it is the same, and no more than 256 tokens are computed again."""
    number, long = 10**6, prompt(LONG)
    tokens = written(engine, long, 20, number, wrong=random.Random(2))
    edited = [*tokens[: LONG - 30], *prompt(20)]
    cache = engine._sequences[number].cache
    assert cache.resumable(LONG - 30) == 2 * CHECKPOINT
    assert sum(count % CHECKPOINT != 0 for count in cache.states) <= 2
    written(engine, edited, 20, number, wrong=random.Random(3))


def test_conversations_share_what_they_begin_with(engine) -> None:
    for number in (10**6, 10**6 + 1):
        engine.share(number, "owner")
        written(engine, [*prompt(CHECKPOINT + 70), number % 10 + 5], 10, number, wrong=random.Random(number))
    assert engine.tokens_reused >= CHECKPOINT


def test_memory_rows_are_made_of_the_layers_with_keys_and_values(engine) -> None:
    target, text = engine.target, prompt(CHECKPOINT + 20)
    drafter = new_drafter("moa", target, draft_vocab_size=256).eval()
    drafter.bind_target(target.embedding, target.head, target.layers)
    assert drafter.config.lsa_layers == (1, 3)
    with torch.no_grad():
        wanted, _ = drafter.rows(target_states(target, text, drafter.row_reads), torch.arange(len(text)))
    rowed = torch_engine(target, drafter, "fingerprint")
    [outcome] = rowed.step_now([StepRequest(1, tuple(text), sampling=WARM, rows_from=0)])
    assert torch.allclose(torch.from_numpy(outcome.rows.keys), wanted, atol=1e-3)
