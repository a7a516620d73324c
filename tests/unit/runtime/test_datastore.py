"""The datastore: look-ups, and its file."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_runtime.datastore import LONGEST_RUN, Datastore, DatastoreError, sorted_suffixes, write_datastore
from support.refusals import refused

TOKENIZER = "a" * 32

documents_of = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "texts.moadata"


def opened(path: Path, documents: list[list[int]], **options) -> Datastore:
    write_datastore(path, documents, TOKENIZER, **options)
    return Datastore.open(path, TOKENIZER)


@given(st.lists(st.integers(-1, 3), max_size=80))
def test_suffixes_are_in_the_order_of_their_first_tokens(tokens: list[int]) -> None:
    plain = sorted(range(len(tokens)), key=lambda at: (tokens[at : at + LONGEST_RUN], at))
    assert sorted_suffixes(np.array(tokens, np.int32)).tolist() == plain


@given(documents_of, st.lists(st.integers(0, 3), max_size=24), st.integers(1, 6))
def test_what_is_found_equals_a_plain_search(tmp_path_factory, documents, text, length):
    store = opened(tmp_path_factory.mktemp("store") / "texts", documents)
    runs = [text[-many:] for many in range(1, min(LONGEST_RUN, len(text)) + 1)]
    assert store.longest(text) == max((len(run) for run in runs if followed(documents, run, length)), default=0)
    assert store.longest(text, 3) == (store.longest(text) if store.longest(text) >= 3 else 0)
    for run in runs:
        assert store.count(run) == len(followed(documents, run, length))
        found = store.continuations(run, most=10_000, length=length)
        assert sorted(found) == sorted(followed(documents, run, length))
        few = store.continuations(run, most=3, length=length)
        assert len(few) == min(3, len(found)) and all(one in found for one in few)


def followed(documents: list[list[int]], run: list[int], length: int) -> list[list[int]]:
    ends = [
        (document, at + len(run))
        for document in documents
        for at in range(len(document))
        if document[at : at + len(run)] == run
    ]
    return [document[end : end + length] for document, end in ends]


def test_only_the_last_tokens_of_a_long_run_count(path: Path) -> None:
    text = [*range(100, 140)]
    store = opened(path, [text])
    assert store.longest([1, 2, *text[:30]]) == LONGEST_RUN
    assert store.continuations([7, *text[:30]], most=1, length=2) == [[130, 131]]


def test_few_occurrences_are_drawn_from_all_of_their_order(path: Path) -> None:
    """Not the first ones in order, which all continue in the same way."""
    store = opened(path, [[5, follower] for follower in range(6, 56) for _ in range(4)])
    drawn = [follower for [follower] in store.continuations([5], most=50, length=1)]
    assert drawn == list(range(6, 56))


def test_the_newest_documents_are_kept_and_of_a_longer_one_the_end(path: Path) -> None:
    store = opened(path, [[1, 2, 3], [4, 5, 6], [7, 8]], most_tokens=7)
    assert store.header.documents == 2 and store.header.tokens == 7
    assert not store.count([1]) and store.count([4]) and store.count([8])
    store = opened(path, [[9], [1, 2, 3, 4, 5]], most_tokens=4)
    assert [store.count([token]) for token in (9, 2, 3, 4, 5)] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("documents", [[], [[]]])
def test_an_empty_datastore_knows_nothing(path: Path, documents: list[list[int]]) -> None:
    store = opened(path, documents)
    assert store.header.documents == 0 and store.longest([1, 2]) == 0
    assert store.continuations([1], most=5, length=5) == []


def test_token_ids_that_do_not_fit_are_refused(path: Path) -> None:
    for token in (-1, 1 << 31):
        with pytest.raises(ValueError, match="31"):
            write_datastore(path, [[1, token]], TOKENIZER)
    assert not path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
def test_only_its_user_can_read_the_file(path: Path) -> None:
    path.write_text("what anybody could read")
    path.chmod(0o644)
    opened(path, [[1, 2]])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_datastore_of_another_tokenizer_is_refused(path: Path) -> None:
    write_datastore(path, [[1, 2]], TOKENIZER)
    with refused("other_tokenizer", DatastoreError):
        Datastore.open(path, "b" * 32)


def test_every_damage_is_found(path: Path) -> None:
    """Each byte changed, and the file cut anywhere: an error, or the same content."""
    whole = opened(path, [[1, 2, 3, 1, 2, 4]]).continuations([1, 2], most=9, length=9)
    content = path.read_bytes()
    for at in range(len(content)):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :]):
            path.write_bytes(damaged)
            try:
                assert Datastore.open(path, TOKENIZER).continuations([1, 2], most=9, length=9) == whole
            except DatastoreError as error:
                assert str(path) in str(error)


@pytest.mark.parametrize("header", ['{"tokens": 9.0}', '{"documents": "many"}', "[" * 4000, "[]", "5"])
def test_a_header_of_other_kinds_is_damage(path: Path, header: str) -> None:
    opened(path, [[1, 2, 3], [4, 5, 6]])
    content = path.read_bytes()
    (length,) = struct.unpack("<I", content[8:12])
    if header.startswith("{"):
        header = json.dumps({**json.loads(content[12 : 12 + length]), **json.loads(header)})
    text = header.encode().ljust(length)
    path.write_bytes(content[:8] + struct.pack("<I", len(text)) + text + content[12 + length :])
    with refused("damaged", DatastoreError):
        Datastore.open(path, TOKENIZER)


def test_a_path_without_a_datastore_is_refused(path: Path) -> None:
    def refuses(code: str) -> None:
        with refused(code, DatastoreError) as caught:
            Datastore.open(path, TOKENIZER)
        assert str(path) in str(caught.value)

    refuses("file_missing")
    path.write_text("something else altogether")
    refuses("no_datastore")
    path.unlink()
    path.mkdir()
    refuses("unreadable")


def test_a_datastore_that_is_cut_afterwards_stays_as_it_was(path: Path) -> None:
    datastore = opened(path, [[1, 2, 3, 1, 2, 4]])
    os.truncate(path, 0)
    assert sorted(datastore.followers([1, 2], most=9)) == [3, 4]


def test_a_name_that_cannot_be_written_is_refused(path: Path) -> None:
    path.write_text("a text")
    for name in (path.with_name("x" * 300), path / "inside"):
        with refused("cannot_write", DatastoreError):
            opened(name, [[1]])
    assert path.read_text() == "a text"
    with refused("not_a_file", DatastoreError):
        opened(path.parent, [[1]])
