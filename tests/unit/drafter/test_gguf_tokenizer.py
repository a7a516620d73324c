"""Tokenizers of GGUF files, made without transformers."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFWriter

from moa_decoder.errors import TargetError
from moa_decoder.gguf_file import GgufFile
from moa_drafter.gguf_tokenizer import special_tokens, tokenizer_of
from support.drafter.gguf_files import write_gguf
from support.refusals import refused
from support.tiny import VOCAB_SIZE


@pytest.mark.parametrize("pattern", [None, "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("adds", [(), ("bos",), ("bos", "eos")])
def test_it_is_that_of_transformers_to_the_byte(tiny_target, tmp_path, pattern, adds):
    """Bundles and stored chats name it by a fingerprint."""
    from transformers import PreTrainedTokenizerFast

    def add(writer: GGUFWriter) -> None:
        if pattern:
            writer.add_tokenizer_pre(pattern)
        for end in adds:
            getattr(writer, f"add_add_{end}_token")(True)

    (file,) = write_gguf(tiny_target, tmp_path / "x.gguf", add=add)
    metadata = GgufFile(file).metadata
    tokenizer_of(file.name, metadata, VOCAB_SIZE).save(str(tmp_path / "own.json"))
    PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=file.name).save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "own.json").read_bytes() == (tmp_path / "theirs/tokenizer.json").read_bytes()
    assert special_tokens(file.name, metadata) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def _another_model(metadata):
    metadata["tokenizer.ggml.model"] = "llama"


def _another_pattern(metadata):
    metadata["tokenizer.ggml.pre"] = "another"


def _fewer_merges(metadata):
    del metadata["tokenizer.ggml.merges"]


def _types_of_fewer(metadata):
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"][:9]


def _merges_of_others(metadata):
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.tokens"]


def _an_end_without_text(metadata):
    metadata["tokenizer.ggml.eos_token_id"] = VOCAB_SIZE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_another_model, "unsupported_tokenizer"),
        (_another_pattern, "unsupported_tokenizer"),
        (_fewer_merges, "damaged"),
        (_types_of_fewer, "damaged"),
        (_merges_of_others, "damaged"),
        (_an_end_without_text, "damaged"),
        (lambda metadata: metadata.pop("tokenizer.ggml.tokens"), "damaged"),
        (lambda metadata: metadata.update({"tokenizer.ggml.model": np.arange(2)}), "unsupported_tokenizer"),
        (lambda metadata: metadata.update({"tokenizer.ggml.pre": np.arange(2)}), "unsupported_tokenizer"),
        (lambda metadata: metadata.update({"tokenizer.ggml.token_type": 3}), "damaged"),
    ],
)
def test_another_or_damaged_one_is_refused(tiny_target, tmp_path, change, code):
    (file,) = write_gguf(tiny_target, tmp_path / "x.gguf")
    metadata = GgufFile(file).metadata
    change(metadata)
    with refused(code, TargetError):
        tokenizer_of(file.name, metadata, VOCAB_SIZE)


def test_more_tokens_than_embeddings_are_refused(tiny_target, tmp_path):
    (file,) = write_gguf(tiny_target, tmp_path / "x.gguf")
    with refused("damaged", TargetError):
        tokenizer_of(file.name, GgufFile(file).metadata, VOCAB_SIZE - 1)
