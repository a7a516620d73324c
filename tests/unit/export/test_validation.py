"""Tau and parity by replay, the stopping rule by recorded answers, and drafting with caches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.device_module import DeviceModule
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import target_states
from moa_drafter.training.batch import packed_masks
from moa_export.fit_stopping import Stretch, choose_stopping_rule, fit_stopping_rule, outages
from moa_export.recipe import Tolerance
from moa_export.recordings import Recording, record
from moa_export.validation import compare, rehearse, replay
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.offline_stopping import StoppingRule

TEXT = [5, 1, 2, 3, 4, 5, 6, 7, 8, 9]
RECORDING = Recording(TEXT, 3, *np.zeros((2, len(TEXT), 1, 1), np.float32))


class Successor(Backend):
    """Drafts token + 1, and the wrong thing after some tokens. Notes how many memory rows it is given."""

    top_k, kv_shape, max_positions = 1, (1, 1), None

    def __init__(self, *wrong_after: int) -> None:
        self.wrong_after, self.rows_seen = wrong_after, list[int]()

    def step(self, inputs: StepInputs) -> StepResult:
        self.rows_seen.append(len(inputs.memory_keys))
        last = int(inputs.tokens[-1])
        guess = 99 if last in self.wrong_after else last + 1
        entries = np.zeros((len(inputs.tokens), 1, 1), np.float32)
        return StepResult(np.array([[guess]]), np.array([[-0.1]], np.float32), entries, entries)


@pytest.mark.parametrize(
    ("wrong_after", "length", "rounds"),
    [
        # Position 3 (token 3) comes with the prompt's verdict; six remain: drafts of 2 commit 3 and 3.
        ((), 2, 2),
        # From 3: wrong at once, which commits 4 alone; from 4: 5, then wrong: 5 and 6; from 6: 7, 8, 9.
        ((3, 5), 3, 3),
    ],
)
def test_drafts_are_accepted_up_to_a_wrong_token(wrong_after: tuple[int, ...], length: int, rounds: int) -> None:
    calls: list[int] = []
    several = [RECORDING] * 3
    tau = replay(Successor(*wrong_after), several, draft_length=length, on_conversation=lambda: calls.append(1))
    assert (tau.rounds, tau.tokens, tau.value, len(calls)) == (3 * rounds, 18, 6 / rounds, 3)


def test_a_draft_sees_the_rows_of_all_committed_tokens_but_the_last() -> None:
    backend = Successor(3, 4, 5, 6, 7, 8)
    replay(backend, [RECORDING], draft_length=1)
    assert backend.rows_seen == [3, 4, 5, 6, 7, 8]


class _Skewed:
    """A backend whose log-probabilities are off by a tenth."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.kv_shape = backend, backend.kv_shape

    def step(self, inputs: StepInputs) -> StepResult:
        result = self._backend.step(inputs)
        result.top_logprobs[:] += 0.1
        return result


def test_parity_measures_the_error_it_is_given(drafter: MoADrafter) -> None:
    rows = np.random.default_rng(0).standard_normal((2, 30, 2, 16)).astype(np.float32)
    backend = torch_backend_of(drafter, top_k=16)
    expected = [rehearse(backend, Recording(list(range(10, 40)), 12, *rows))]
    same, skewed = compare(expected, backend), compare(expected, _Skewed(backend))
    assert (same.max_logprob_error, same.top1_agreement, same.top_k_overlap) == (0, 1, 1)
    assert skewed.mean_logprob_error == pytest.approx(0.1, abs=1e-5)
    assert same.failures(Tolerance()) == []
    (failure,) = skewed.failures(Tolerance(mean_logprob_error=0.05))
    assert "0.1000 > 0.05" in failure


SURE, UNSURE, VERY_SURE = math.log(0.95), math.log(0.01), math.log(0.999)


def stretch(*logprobs: float, kept: int) -> Stretch:
    return Stretch(list(itertools.accumulate(logprobs)), kept)


def kept_and_written(rule: StoppingRule, stretches: Sequence[Stretch]) -> tuple[int, int]:
    written = [one.written(math.log(rule.least_probability), rule.longest) for one in stretches]
    return sum(min(one.kept, length) for one, length in zip(stretches, written, strict=True)), sum(written)


def test_what_tells_right_from_wrong_becomes_the_threshold() -> None:
    """Sure of four tokens, it is right; then it is not. It writes these, and in each outage the one that it doubts."""
    stretches = [stretch(*[SURE] * 4, *[UNSURE] * 4, kept=4)] * 5 + [stretch(*[UNSURE] * 16, kept=0)] * 5
    found = choose_stopping_rule(stretches, 8)
    assert found.least_probability > 0.01 and found.repeated == 8
    kept, written = kept_and_written(found, stretches)
    assert 2 * kept >= written == 30


@pytest.mark.parametrize(
    ("logprob", "kept", "longest"),
    [(SURE, 32, 32), (VERY_SURE, 0, 0), (VERY_SURE, 3, 6)],
    ids=["always right", "sure and wrong", "right for three tokens, and never in doubt"],
)
def test_a_length_bounds_what_is_written(logprob: float, kept: int, longest: int) -> None:
    assert choose_stopping_rule([stretch(*[logprob] * 32, kept=kept)] * 4, 8).longest == longest


def test_a_random_drafter_hardly_writes(target: Target, drafter: MoADrafter) -> None:
    recordings = record(target, drafter, ["Name three colours.", "Why is the sky blue?"])
    backend = torch_backend_of(drafter, top_k=8)
    stretches = [one for recording in recordings for one in outages(backend, recording, ())]
    assert stretches
    for one in stretches:
        assert len(one.logprobs) >= 1 and one.kept <= len(one.logprobs)
        assert all(later <= before <= 0 for before, later in itertools.pairwise(one.logprobs))
        assert all(logprob >= math.log(0.05) for logprob in one.logprobs[:-1])
    done: list[int] = []
    kept, written = kept_and_written(fit_stopping_rule(backend, recordings, (), lambda: done.append(1)), stretches)
    assert 2 * kept >= written and len(done) == len(recordings)


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
