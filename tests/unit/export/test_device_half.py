"""The two halves of the drafter, run step by step with caches, against its training forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.device_module import DeviceModule
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import target_states
from moa_drafter.training.batch import packed_masks
from moa_runtime.drafters.moa import MoaDrafter
from support.drafted import draft_of


@torch.no_grad()
def test_drafting_with_caches_gives_the_logits_of_the_training_forward(target: Target, drafter: MoADrafter) -> None:
    # Rounds of several lengths: catch up with the committed tokens, then one token at a time.
    tokens = torch.randint(3, 512, (24,), generator=torch.Generator().manual_seed(3))
    segments = [(0, 7), (7, 12), (12, 13), (13, 24)]
    limits = list(range(7))
    for start, stop in segments[1:]:
        limits += [start - 1] * (stop - start)
    positions, self_mask, memory_mask = packed_masks([24], limits)
    kv = target_states(target, tokens.tolist(), drafter.reads).kv
    hidden = drafter(tokens, positions, kv, self_mask, memory_mask)
    expected = drafter.logits(hidden).log_softmax(-1)

    rows = drafter.memory_rows(kv, positions)
    vocab = drafter.config.draft_vocab_size
    half = DeviceModule(drafter, top_k=vocab)
    cache = (torch.zeros(0, 2, 16), torch.zeros(0, 2, 16))

    def feed(start: int, stop: int, visible: int) -> torch.Tensor:
        """Logits in the order of the draft vocabulary at the last token."""
        nonlocal cache
        new, held = stop - start, len(cache[0])
        mask = torch.from_numpy(np.tri(new, held + new, held, dtype=np.bool_))
        memory = rows[0][:visible], rows[1][:visible]
        top, logprobs, keys, values = half(
            tokens[start:stop], positions[start:stop], torch.tensor([new - 1]), *cache, mask, *memory
        )
        cache = torch.cat((cache[0], keys)), torch.cat((cache[1], values))
        at = torch.searchsorted(drafter.draft_to_target, top[0])
        return torch.empty(vocab).index_copy(0, at, logprobs[0])

    feed(0, 7, 1)
    for start, stop in segments[1:]:
        for position in range(start, stop):
            got = feed(position, position + 1, start)
            torch.testing.assert_close(got, expected[position], atol=2e-4, rtol=0)


@torch.no_grad()
def test_the_runtime_drafter_follows_the_greedy_path_of_the_training_forward(
    target: Target, drafter: MoADrafter
) -> None:
    prefix = [1, 40, 90, 200, 31, 7]
    kv = target_states(target, prefix, drafter.reads).kv
    keys, values = drafter.memory_rows(kv, torch.arange(len(prefix)))
    runtime = MoaDrafter(torch_backend_of(drafter, top_k=8), max_context=64)
    runtime.add_rows(0, keys[:-1].numpy(), values[:-1].numpy())
    drafted = draft_of(runtime, prefix, 4)

    sequence = list(prefix)
    for token in drafted:
        n = len(sequence)
        padded = torch.cat((kv, torch.zeros(n - len(kv), *kv.shape[1:])))
        visible = torch.arange(n) < len(prefix) - 1
        hidden = drafter(
            torch.tensor(sequence), torch.arange(n), padded, torch.ones(n, n).tril().bool(), visible.expand(n, n)
        )
        best = drafter.logits(hidden[-1]).log_softmax(-1).max(0)
        assert token.token == drafter.draft_to_target[best.indices]
        assert token.logprob == pytest.approx(float(best.values), abs=1e-4)
        sequence.append(token.token)
