"""Run EAGLE-3 heads in the code of their authors, and write what they compute as vectors for tests.

Needs an environment with torch, transformers, ``speculators`` (0.9.0 was used) and this repository's packages:

    PYTHONPATH=export:runtime:tests python tools/compare_eagle3.py tests/vectors/data/eagle3.npz

With ``--authors FOLDER``, a checkout of github.com/SafeAILab/EAGLE (cb7e084 was used), the plain head also runs in its
``eagle/model/cnets.py``. ``tests/unit/drafter/test_eagle3_vectors.py`` compares ours with the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from moa_drafter.target import load_target
from moa_drafter.target_features import Reads, target_states
from support.drafter.eagle3_heads import OPTIONS, write_head
from support.tiny import make_tiny_target

#: Tokens; passes, the first over true features, the others over estimates; and every which logit is kept.
TOKENS, DEPTHS, EVERY = 12, 3, 6


def speculators_logits(folder: Path, tokens: Tensor, states: Tensor, embedding: Tensor) -> Tensor:
    """Return the logits ``[DEPTHS, TOKENS - 1, v]`` of speculators' forward over all pairs."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers.models.auto.configuration_auto import AutoConfig

    raw = json.loads((folder / "config.json").read_text())
    layer = raw.pop("transformer_layer_config")
    raw["transformer_layer_config"] = AutoConfig.for_model(**layer, attn_implementation="eager")
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(**raw)).eval()
    tensors = {"embed_tokens.weight": embedding, **load_file(folder / "model.safetensors")}
    missing, superfluous = model.load_state_dict(tensors, strict=False)
    assert not superfluous and all(name.startswith("verifier_") for name in missing), (missing, superfluous)
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    pairs = tokens[None, 1:]
    model(states[:-1].flatten(1)[None], pairs, document_ids=torch.zeros_like(pairs), ttt_steps=DEPTHS)
    return torch.stack(found)


def authors_logits(checkout: Path, folder: Path, tokens: Tensor, states: Tensor, embedding: Tensor) -> Tensor:
    """Return the logits ``[TOKENS - 1, v]`` of the first pass of the authors' ``Model``."""
    package = types.ModuleType("eagle_model")
    package.__path__ = [str(checkout / "eagle/model")]
    sys.modules["eagle_model"] = package
    from eagle_model.cnets import Model
    from eagle_model.configs import EConfig

    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tensors = {"embed_tokens.weight": embedding, **load_file(folder / "model.safetensors")}
    config = EConfig(**raw)
    plain = types.SimpleNamespace(**{**config.to_dict(), "pad_token_id": None})
    plain.rope_scaling, plain.rope_theta = None, raw["rope_theta"]  # as transformers 4 gives them
    model = Model(plain).eval()
    missing, superfluous = model.load_state_dict(tensors, strict=False)
    assert not missing and not superfluous, (missing, superfluous)
    hidden = model(states[:-1].flatten(1)[None], tokens[None, 1:])
    return model.lm_head(model.norm(hidden))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--authors", type=Path)
    arguments = parser.parse_args()
    kept: dict[str, Any] = {}

    def keep(name: str, logits: Tensor) -> None:
        logprobs = logits.log_softmax(dim=-1)
        kept[name] = logprobs[..., ::EVERY].numpy()

    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        target = load_target(str(make_tiny_target(Path(scratch) / "target")))
        tokens = torch.randint(0, 512, (TOKENS,), generator=torch.Generator().manual_seed(0))
        states = target_states(target, tokens.tolist(), Reads(inner_layers=(1, 1, 0))).inner
        kept |= {"tokens": tokens.numpy(), "states": states.numpy(), "embedded": target.embedding[tokens].numpy()}
        given = tokens, states, target.embedding
        for name, options in OPTIONS.items():
            keep(name, speculators_logits(write_head(Path(scratch) / name, options), *given))
        if arguments.authors:
            head = write_head(Path(scratch) / "authors", of="authors")
            keep("authors", authors_logits(arguments.authors, head, *given))
    np.savez_compressed(arguments.out, **kept)


if __name__ == "__main__":
    main()
