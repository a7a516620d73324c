"""Memory rows from packed products: the server half's, whatever the drafter looks like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moa_drafter.model import MoADrafter
from moa_drafter.target_features import TargetStates
from moa_server.drafting.batched_model import PackedRows


@pytest.mark.parametrize("layers", [0, 2], ids=lambda count: f"{count} target layers")
@pytest.mark.parametrize("scaled", [True, False], ids=["layer scale", "as published"])
@pytest.mark.parametrize("count", [0, 1, 7, 130])
def test_rows_are_those_of_the_server_half(drafter, scaled, count, layers):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        own = MoADrafter(replace(drafter.config, layer_scale=scaled, target_layers=layers)).eval()
        if scaled:
            own.layer_scale.data.uniform_(0.5, 2.0)
        kv = torch.randn(count, len(own.row_reads.kv_layers), own.config.target_kv_size)
    states = TargetStates(kv, kv[:, :0], kv[:, 0, :0])
    positions = torch.arange(40, 40 + count)
    with torch.no_grad():
        expected = own.rows(states, positions)
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        for got, wanted in zip(PackedRows(own, dtype)(states, positions), expected, strict=True):
            assert got.dtype is torch.float32
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), atol=error)
