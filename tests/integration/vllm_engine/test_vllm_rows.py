"""Keys and values that vLLM's caches hold are those of transformers, in every layout of its kernels for CPUs."""

from __future__ import annotations

import random

import pytest

from moa_server.engine.base import StepRequest, new_sequence

pytestmark = pytest.mark.slow

#: Of keys and values in float32; the figure that a prototype came to.
TOLERANCE = 7e-5
TEXT = [random.Random(5).randrange(3, 512) for _ in range(100)]


def test_keys_and_values_are_those_of_transformers(vllm, reference):
    import torch

    from moa_drafter.target_features import layer_keys_values
    from moa_server.engine.vllm.paged_cache import PagedStates
    from support.server.stepping import step

    number = new_sequence()
    for end in (40, 41, 70, 100):  # in pieces, across blocks
        step(vllm, StepRequest(number, TEXT[:end]))
    held = PagedStates(vllm._layers, vllm._core.table(vllm._held[number].name))
    with torch.no_grad():
        cache = reference.target.model.model(input_ids=torch.tensor([TEXT]), use_cache=True).past_key_values
    layers = range(4)
    assert (held.read(layers, 0, 100) - layer_keys_values(cache, layers)).abs().max() < TOLERANCE
    assert torch.equal(held.read((3, 1), 31, 65), held.read(layers, 0, 100)[31:65][:, [3, 1]])
    vllm.release(number)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_each_layout_of_the_cpu_kernels_is_learnt(vllm_here, isa, dtype):
    import torch
    from vllm import _custom_ops as ops

    from moa_server.engine.vllm.paged_cache import BLOCK, PagedLayer, PagedStates

    if isa == "amx" and not (torch.cpu._is_amx_tile_supported() and dtype == "bfloat16"):
        pytest.skip("this processor has no AMX, or not for this type")
    heads, size, kind = 3, 64, getattr(torch, dtype)
    cache = torch.zeros(5, heads, BLOCK, 2 * size, dtype=kind)
    keys_in, values_in = cache.view(5, heads, 2 * BLOCK, size).chunk(2, dim=2)

    def store(keys, values, slots):
        ops.cpu_attn_reshape_and_cache(keys, values, keys_in, values_in, slots, isa)

    layer = PagedLayer.learnt(cache, store, heads, size)
    keys, values = torch.randn(2, 50, heads, size).to(kind)
    table = [3, 1]
    slots = torch.tensor([table[position // BLOCK] * BLOCK + position % BLOCK for position in range(50)])
    store(keys, values, slots)
    found = PagedStates({0: layer}, table).read((0,), 0, 50)[:, 0]
    assert torch.equal(found, torch.cat((keys, values), 1).flatten(1))


def test_features_of_a_head_and_its_drafts_are_those_of_torch(paged_target, tmp_path):
    import torch

    from moa_drafter.checkpoint import load_bound
    from moa_drafter.target import load_target
    from moa_drafter.target_features import target_states
    from moa_runtime.session.handshake import Limits
    from moa_server.drafting.server_drafting import ServerDrafting
    from moa_server.engine.load import drafting_backend
    from moa_server.engine.vllm.engine import VllmEngine
    from support.drafter.eagle3_heads import write_head
    from support.server.drafted_answers import GREEDY, answers, prompts
    from support.server.stepping import plain, step

    folder, target = write_head(tmp_path), load_target(str(paged_target))
    head, engine = load_bound(folder, target), VllmEngine.load(str(paged_target), folder, max_context=256)
    for end in (40, 41, 70, 100):  # in pieces, across blocks
        rows = step(engine, StepRequest(1, TEXT[:end], rows_from=end - 1)).rows
        with torch.no_grad():
            states = target_states(target, TEXT[:end], head.row_reads)
            expected = head.rows(states, torch.arange(end))
        for own, half in zip((rows.keys, rows.values), expected, strict=True):
            assert abs(own - half[end - 1 :].numpy()).max() < 1e-3
    drafting = ServerDrafting(drafting_backend(engine), Limits(256, trees=False), engine.stop_tokens)
    found = answers(engine, drafting, prompts(2), GREEDY, 20)
    assert [text for text, _ in found] == [plain(engine, prompt, GREEDY, 20) for prompt in prompts(2)]
    drafting.close()
    engine._worker.shutdown()  # closing it would end vLLM's groups, which the session's engine shares
