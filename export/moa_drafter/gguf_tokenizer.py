"""The tokenizer of a GGUF file, from its metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from moa_decoder.errors import TargetError
from moa_decoder.gguf_file import Texts

_KEY = "tokenizer.ggml."
_CONTROL, _OF_USERS = 3, 4
#: Ids of special tokens by their names in a tokenizer's configuration.
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
#: Patterns that split texts before merging, by their names in GGUF; None for that of GPT-2. The SmolLM models' own
#: splits numbers as well, but these files have always been read without it, and a tokenizer has a fingerprint.
_SPLITS = {
    None: None,
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def special_tokens(name: str, metadata: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by name, such as ``eos_token``. Raises TargetError (``damaged``) for an id
    without a text."""
    texts = _tokens(name, metadata)
    found = {}
    for token, key in SPECIAL.items():
        if (number := metadata.get(_KEY + key)) is None:
            continue
        if type(number) is not int or not 0 <= number < len(texts):
            raise _damaged(name, f"its {key} is {number!r:.20}, of {len(texts)} tokens")
        found[token] = texts[number]
    return found


def tokenizer_of(name: str, metadata: dict[str, Any], vocab_size: int) -> Tokenizer:
    """Make the tokenizer of a GGUF file; equal to that of transformers.

    Args:
        name: of the file, for errors.
        vocab_size: of the model.

    Raises:
        TargetError: ``unsupported_tokenizer`` for other kinds than byte-level BPE, and for patterns that are not known;
            ``damaged``.
    """
    kind, split = metadata.get(f"{_KEY}model"), metadata.get(f"{_KEY}pre")
    if not isinstance(kind, str) or kind != "gpt2" or not isinstance(split, str | None) or split not in _SPLITS:
        raise _unsupported(name, f"{kind!r:.40} ({split!r:.40})")
    texts, merges = _tokens(name, metadata), metadata.get(f"{_KEY}merges")
    kinds = metadata.get(f"{_KEY}token_type")
    vocab = {text: number for number, text in enumerate(texts)}
    counted = kinds is None or (isinstance(kinds, np.ndarray) and len(kinds) == len(texts))
    if not isinstance(merges, Texts) or not counted:
        raise _damaged(name, "its list of merges or of token types is not complete")
    if len(vocab) != len(texts) or len(texts) > vocab_size:
        raise _damaged(name, f"it has {len(texts)} tokens, {len(vocab)} of them different, for {vocab_size} embeddings")
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if not all(alphabet.issuperset(text) for text in texts):
        raise _unsupported(name, "that spells tokens in other characters than those of bytes")
    pairs = [tuple(merge.split(" ")) for merge in merges.read()]
    try:
        own = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, **own))
    except Exception as error:  # the library has no class of its own for a merge of what is no token
        raise _damaged(name, f"its merges do not fit its tokens: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern := _SPLITS[split]:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    for number, special in ((_CONTROL, True), (_OF_USERS, False)):
        added = [text for text, of in zip(texts, kinds if kinds is not None else (), strict=False) if of == number]
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in added])
    tokenizer.post_processor = _template(name, metadata)
    return tokenizer


def _template(name: str, metadata: dict[str, Any]) -> processors.TemplateProcessing:
    """Return the processor that adds the tokens for the beginning and end of a text, if the file says so."""
    texts = special_tokens(name, metadata)
    ends = [metadata.get(f"{_KEY}add_{end}_token") is True and texts.get(f"{end}_token") for end in ("bos", "eos")]
    first, last = (f"{text}:0" if text else "" for text in ends)
    single = " ".join(part for part in (first, "$A:0", last) if part)
    second = " ".join(part for part in (first, "$B:0", last) if part).replace(":0", ":1")
    ids = [(text, metadata[f"{_KEY}{end}_token_id"]) for text, end in zip(ends, ("bos", "eos"), strict=True) if text]
    return processors.TemplateProcessing(single=single, pair=f"{single} {second}", special_tokens=ids)


def _tokens(name: str, metadata: dict[str, Any]) -> list[str]:
    tokens = metadata.get(f"{_KEY}tokens")
    if not isinstance(tokens, Texts):
        raise _damaged(name, "it has no list of tokens")
    return tokens.read()


def _damaged(name: str, why: str) -> TargetError:
    return TargetError(f"the tokenizer in {name} is damaged ({why}): fetch the file again", code="damaged")


def _unsupported(name: str, what: str) -> TargetError:
    return TargetError(
        f"{name} has a tokenizer {what}, which cannot be made without transformers: install it with pip install "
        '"moa-edge[train]"',
        code="unsupported_tokenizer",
    )
