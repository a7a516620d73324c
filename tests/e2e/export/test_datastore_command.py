"""``moa-export datastore``: what it reads, writes and refuses."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from moa_runtime.bundle import Bundle
from moa_runtime.datastore import Datastore
from moa_runtime.tokenizer import ChatTokenizer
from support.export.commands import refuse, run_json

CHAT = {
    "title": "Colours",
    "messages": [
        {"role": "user", "content": "Which colours are there?"},
        {"role": "assistant", "content": "There are red and blue."},
    ],
}


def made(
    capsys: pytest.CaptureFixture[str], bundle: Bundle, out: Path, *words: object
) -> tuple[Datastore, dict[str, object]]:
    """Make a datastore; return it with what the command said."""
    said = run_json(capsys, "datastore", *words, "--out", out, "--bundle", bundle.folder, "--quiet")
    return Datastore.open(out, bundle.manifest.fingerprints.tokenizer), said


def test_all_formats_become_documents(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encode = ChatTokenizer.from_bundle(bundle).encode
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    (tmp_path / "notes.md").write_text("The harbour lies in the north.")
    lines = [CHAT, {"text": "Ships come in the morning."}, {"tokens": [5, 6, 7]}, {"p": [1, 2, 3, 4], "r": [9, 8]}]
    lines.insert(0, {"target": "t", "max_new_tokens": 8})  # as of moa-bench accept --answers
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write("\n\n".join(map(json.dumps, lines)))
    files = [tmp_path / name for name in ("chat.json", "notes.md", "more.jsonl.gz")]
    store, said = made(capsys, bundle, tmp_path / "out", *files)
    assert said["documents"] == store.header.documents == 6 and said["left_out"] == 0
    assert said["bytes"] == (tmp_path / "out").stat().st_size
    answer = encode("There are red and blue.")
    assert store.count(answer[:3]) == 2 and store.count(answer[-3:]) == 2
    assert store.count(encode("Which colours are there?")[-4:]) == 0, "questions are not what is drafted"
    assert store.count(encode("The harbour lies")[-4:]) == store.count(encode("Ships come")[-4:]) == 1
    assert store.count([5, 6, 7]) == store.count([2, 3, 4, 9, 8]) == 1


def test_an_answer_is_found_from_its_beginning(bundle, tmp_path, capsys):
    """After the tokens that a question ends with, as they stand in a conversation."""
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    store, _ = made(capsys, bundle, tmp_path / "out", tmp_path / "chat.json")
    tokenizer = ChatTokenizer.from_bundle(bundle)
    asked = tokenizer.encode_chat([{"role": "user", "content": "Something else?"}])
    answer = tokenizer.encode("There are red and blue.")
    assert store.continuations(asked[-3:], most=1, length=len(answer)) == [answer]


def test_a_limit_keeps_the_last_documents(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [4, 5, 6]}\n')
    store, said = made(capsys, bundle, tmp_path / "out", tmp_path / "tokens.jsonl", "--most-tokens", 6)
    assert not store.count([1]) and store.count([4, 5, 6]) and said["left_out"] == 1


def _damaged_archive() -> bytes:
    whole = bytearray(gzip.compress(b'{"text": "a"}\n' * 100, mtime=0))
    whole[10] = 0xFF  # no kind of block that there is
    return bytes(whole)


@pytest.mark.parametrize(
    ("name", "content", "code", "names"),
    [
        ("a.pdf", "x", "unknown_format", ".jsonl.gz"),
        ("a.jsonl", '{"text": "a"}\n{"text"', "not_json", "line 2 of"),
        ("a.jsonl", '{"question": "a"}', "no_document", "line 1 of"),
        ("a.jsonl", '{"text": 5}', "no_document", "text"),
        ("a.jsonl", '{"text": "a\\ud83d"}', "no_document", "character 2;"),
        ("a.jsonl", '{"messages": [{"content": "a"}]}', "no_document", "message 1"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": [{}]}]}', "no_document", "content of message 1"),
        ("a.jsonl", '{"messages": {"role": "assistant"}}', "no_document", "messages"),
        ("a.jsonl", '{"tokens": [1, -1]}', "no_document", "tokens"),
        ("a.jsonl", '{"tokens": [true]}', "no_document", "tokens"),
        ("a.jsonl", '{"p": "a", "r": [1]}', "no_document", " p "),
        ("a.json", "[]", "no_document", "a.json"),
        ("a.jsonl", "[" * 200_000, "not_json", "line 1 of"),
        ("a.jsonl.gz", "no archive", "damaged", "a.jsonl.gz"),
        ("a.jsonl.gz", _damaged_archive(), "damaged", "a.jsonl.gz"),
        ("a.txt", b"\xff\xfe\xff", "not_utf8", "a.txt"),
        ("a.jsonl", '{"tokens": [' + "9" * 5000 + "]}", "not_json", "line 1 of"),
        ("a.txt", "", "no_documents", ""),
        ("no.txt", None, "file_missing", "no.txt"),
    ],
)
def test_what_is_no_document_is_named(bundle, tmp_path, capsys, name, content, code, names):
    file, out = tmp_path / name, tmp_path / "out"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert names in refuse(capsys, code, "datastore", file, "--out", out, "--bundle", bundle.folder)
    assert not out.exists()


def test_only_another_file_is_replaced(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes, link, pipe = (tmp_path / name for name in ("notes.txt", "link.txt", "pipe"))
    notes.write_text("The harbour lies in the north.")
    link.symlink_to(notes)
    os.mkfifo(pipe)
    for out, code in ((notes, "own_input"), (link, "own_input"), (pipe, None), (tmp_path, None), (Path(), None)):
        refuse(capsys, code, "datastore", notes, "--out", out, "--bundle", bundle.folder)
    assert notes.read_text() == "The harbour lies in the north." and pipe.is_fifo()


def test_bad_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("The harbour lies in the north.")
    refuse(capsys, "out_of_range", "datastore", notes, "--most-tokens", 1)
    home = "~nobody-of-this-name/bundle"  # a home that is no folder
    assert home in refuse(capsys, None, "datastore", notes, "--bundle", home)
