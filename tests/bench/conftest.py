"""For all benchmarks' tests: the tiny target and drafter with a bundle, made once, and two questions."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from moa_runtime.bundle import Fingerprints, Manifest, TargetEntry, read_manifest, tokenizer_fingerprint, write_manifest
from tiny import CHAT_TEMPLATE, make_tiny_drafter, make_tiny_target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``(target folder, drafter folder, bundle folder, backend, engine)``; the backend runs in PyTorch."""
    from moa_drafter.checkpoint import drafter_fingerprint, load_checkpoint
    from moa_export.device_half import signature
    from moa_export.torch_backend import TorchBackend
    from moa_server.transformers_engine import TransformersEngine

    root = tmp_path_factory.mktemp("tiny")
    target_folder = make_tiny_target(root / "target")
    drafter_folder = make_tiny_drafter(target_folder, root / "drafter")
    engine = TransformersEngine.load(str(target_folder), drafter_folder)
    drafter = load_checkpoint(drafter_folder)
    drafter.bind_target(engine.target.embedding, engine.target.head)

    bundle = root / "bundle"
    bundle.mkdir()
    shutil.copy(target_folder / "tokenizer.json", bundle)
    (bundle / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (bundle / "graph").write_text("the tests load another backend")
    inputs, outputs = signature(drafter.config, 8)
    fingerprints = Fingerprints(
        engine.fingerprints.target,
        tokenizer_fingerprint(bundle / "tokenizer.json"),
        drafter_fingerprint(drafter_folder),
    )
    decoder = drafter.config.decoder
    write_manifest(
        bundle,
        Manifest(
            fingerprints=fingerprints,
            target="tiny",
            kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            top_k=8,
            vocab_size=engine.vocab_size,
            draft_vocab_size=drafter.config.draft_vocab_size,
            max_context=engine.max_context,
            stop_tokens=tuple(engine.stop_tokens),
            special_tokens={},
            recipe={},
            tools={},
            targets={"onnx": TargetEntry("graph", 0, inputs, outputs)},
            files={},
        ),
    )
    return target_folder, drafter_folder, bundle, TorchBackend(drafter, top_k=8), engine


@pytest.fixture(scope="session")
def onnx_bundle(tiny, tmp_path_factory):
    """The bundle's folder again, with a graph that any process can run."""
    from moa_drafter.checkpoint import load_checkpoint
    from moa_export.recipe import Recipe
    from moa_export.targets.base import TargetOptions
    from moa_export.targets.onnx import OnnxTarget

    _, drafter_folder, bundle, _, engine = tiny
    drafter = load_checkpoint(drafter_folder)
    drafter.bind_target(engine.target.embedding, engine.target.head)
    folder = tmp_path_factory.mktemp("onnx") / "bundle"
    shutil.copytree(bundle, folder)
    (graph,) = OnnxTarget(Recipe(), TargetOptions()).export(drafter, folder)
    entry = TargetEntry(graph.file, 0, graph.inputs, graph.outputs)
    write_manifest(folder, dataclasses.replace(read_manifest(folder), targets={"onnx": entry}))
    return folder


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["Name three primary colours.", "And now?"]},
        {"question_id": 2, "category": "qa", "turns": ["What is the capital of France?"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
