"""For all benchmarks' tests: the tiny model ready to be measured, and two questions."""

from __future__ import annotations

import json

import pytest

from moa_drafter.architectures.registry import torch_backend_of


@pytest.fixture(scope="session")
def tiny(tiny_target, tiny_drafter, drafter, onnx_bundle):
    """``(target folder, drafter folder, bundle folder, backend, engine)``; the backend runs in PyTorch."""
    from moa_server.engine.transformers import TransformersEngine

    engine = TransformersEngine.load(str(tiny_target), tiny_drafter)
    return tiny_target, tiny_drafter, onnx_bundle, torch_backend_of(drafter, top_k=8), engine


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["Name three primary colours.", "And now?"]},
        {"question_id": 2, "category": "qa", "turns": ["What is the capital of France?"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
