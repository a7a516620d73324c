"""A tokenizer.json of a stranger is refused, or fails with a sentence: it neither ends the process nor grows a text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from moa_runtime.errors import MoaError
from moa_runtime.tokenizer import ChatTokenizer
from support.refusals import refused

ORDINARY = json.loads((Path(__file__).parents[2] / "vectors/data/texts/tokenizer.json").read_bytes())
REPLACE = {"type": "Replace", "pattern": {"String": "a"}}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


def load(folder: Path, text: str) -> ChatTokenizer:
    file = folder / "tokenizer.json"
    file.write_text(text)
    return ChatTokenizer(file, None, {}, [2])


def table(*words: int) -> dict[str, str]:
    content = b"".join(word.to_bytes(4, "little") for word in words)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": table(0xFFFFFFFF, 0)},  # ended the process
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # its error is no Exception
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE | {"content": "a" * 1000}] * 4}},
        {"decoder": {"type": "Sequence", "decoders": [REPLACE | {"content": "a" * 9}] * 9}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
        {"model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}},
        {"model": {}},
    ],
)
def test_a_harmful_tokenizer_is_refused(tmp_path: Path, changes: dict[str, Any], escaped: bool) -> None:
    text = json.dumps({**ORDINARY, **changes})
    with refused("unreadable"):
        load(tmp_path, text.replace("precompiled_", "\\u0070recompiled_") if escaped else text)


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}},
        {"padding": PADDING | {"strategy": {"Fixed": 1 << 40}}},
    ],
)
def test_texts_are_neither_padded_nor_truncated(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = load(tmp_path, json.dumps(ORDINARY)).encode("Once upon a time")
    assert load(tmp_path, json.dumps({**ORDINARY, **changes})).encode("Once upon a time") == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "aa"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": table(4, 0x7FFFFFFF)},
        {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(a|a)*$b|(x+x+)+y"}}},
    ],
)
def test_a_panic_of_the_library_is_a_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(MoaError) as caught:
        load(tmp_path, json.dumps({**ORDINARY, **changes})).encode("a" * 50 + "x" * 50)
    assert caught.value.code in ("tokenizer_failed", "unreadable")
