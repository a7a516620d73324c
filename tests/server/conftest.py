"""The tiny target in the verifier's engine, loaded once for all server tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def transformers_engine(tiny_target, tiny_drafter):
    import torch

    from moa_server.transformers_engine import TransformersEngine

    torch.set_num_threads(1)  # threads that wait for each other on busy cores cost more than they bring
    return TransformersEngine.load(str(tiny_target), tiny_drafter)


@pytest.fixture(scope="session")
def engine(transformers_engine):
    """The engine of a test that names no other."""
    return transformers_engine
