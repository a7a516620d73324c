"""A tokenizer for tests of grammars: bytes and a few words, so that most texts have several tokenisations."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = ['{"', '":', "name", '"}', "true", "false", " a", "ab", "12", '", "']
STOP, VOCAB = 256 + len(WORDS), 300
#: A thousand kinds of arrays that begin alike, after a beginning that is none of them: the time of a "[" grows with
#: the cube of their number, of which the first token shows nothing.
ARRAYS = {
    "x-guidance": {"item_separator": ",", "whitespace_flexible": False},
    "$defs": {
        "one": {
            "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/one"}, "minItems": n % 2} for n in range(1000)]
            + [{"type": "integer"}]
        }
    },
    "type": "array",
    "prefixItems": [{"const": "x"}],
    "items": {"$ref": "#/$defs/one"},
}


def saved_tokenizer(path: Path) -> Tokenizer:
    """Make the tokenizer and write its file."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for word in WORDS:
        vocabulary["".join(piece for piece, _ in level.pre_tokenize_str(word))] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    assert made.token_to_id("<end>") == STOP
    made.save(str(path))
    return made
