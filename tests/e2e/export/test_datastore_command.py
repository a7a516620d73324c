"""``moa-export datastore``: what it reads, writes and refuses."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from moa_export import cli
from moa_runtime.bundle import Bundle
from moa_runtime.datastore import Datastore
from moa_runtime.tokenizer import ChatTokenizer

CHAT = {
    "title": "Colours",
    "messages": [
        {"role": "user", "content": "Which colours are there?"},
        {"role": "assistant", "content": "There are red and blue."},
    ],
}


@pytest.fixture
def bundle(onnx_export: tuple[Path, str]) -> Bundle:
    return Bundle.open(onnx_export[0])


def made(bundle: Bundle, out: Path, *files: Path, options: tuple[str, ...] = ()) -> Datastore:
    words = ["datastore", *map(str, files), "--out", str(out), "--bundle", str(bundle.folder), "--quiet", *options]
    assert cli.main(words) == 0
    return Datastore.open(out, bundle.manifest.fingerprints.tokenizer)


def test_all_formats_become_documents(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encode = ChatTokenizer.from_bundle(bundle).encode
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    (tmp_path / "notes.md").write_text("The harbour lies in the north.")
    lines = [CHAT, {"text": "Ships come in the morning."}, {"tokens": [5, 6, 7]}, {"p": [1, 2, 3, 4], "r": [9, 8]}]
    lines.insert(0, {"target": "t", "max_new_tokens": 8})  # as of moa-bench accept --answers
    with gzip.open(tmp_path / "more.jsonl.gz", "wt") as file:
        file.write("\n\n".join(map(json.dumps, lines)))
    files = [tmp_path / name for name in ("chat.json", "notes.md", "more.jsonl.gz")]
    store = made(bundle, tmp_path / "out", *files, options=("--json",))
    said = json.loads(capsys.readouterr().out)
    assert said["documents"] == store.header.documents == 6 and said["left_out"] == 0
    assert said["bytes"] == (tmp_path / "out").stat().st_size
    answer = encode("There are red and blue.")
    assert store.count(answer[:3]) == 2 and store.count(answer[-3:]) == 2
    assert store.count(encode("Which colours are there?")[-4:]) == 0, "questions are not what is drafted"
    assert store.count(encode("The harbour lies")[-4:]) == store.count(encode("Ships come")[-4:]) == 1
    assert store.count([5, 6, 7]) == store.count([2, 3, 4, 9, 8]) == 1


def test_an_answer_is_found_from_its_beginning(bundle: Bundle, tmp_path: Path) -> None:
    """After the tokens that a question ends with, as they stand in a conversation."""
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    store = made(bundle, tmp_path / "out", tmp_path / "chat.json")
    tokenizer = ChatTokenizer.from_bundle(bundle)
    asked = tokenizer.encode_chat([{"role": "user", "content": "Something else?"}])
    answer = tokenizer.encode("There are red and blue.")
    assert store.continuations(asked[-3:], most=1, length=len(answer)) == [answer]


def test_a_limit_keeps_the_last_documents(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [4, 5, 6]}\n')
    store = made(bundle, tmp_path / "out", tmp_path / "tokens.jsonl", options=("--most-tokens", "6"))
    assert not store.count([1]) and store.count([4, 5, 6])
    assert "the first 1 documents were left out" in capsys.readouterr().out


def _damaged_archive() -> bytes:
    whole = bytearray(gzip.compress(b'{"text": "a"}\n' * 100, mtime=0))
    whole[10] = 0xFF  # no kind of block that there is
    return bytes(whole)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.pdf", "x", "has no known ending"),
        ("a.jsonl", '{"text": "a"}\n{"text"', "line 2 of"),
        ("a.jsonl", '{"question": "a"}', "is no document: expected"),
        ("a.jsonl", '{"text": 5}', "is no document: the text is no string; expected"),
        ("a.jsonl", '{"text": "a\\ud83d"}', "is no document: the text has half of a surrogate pair at character 2;"),
        ("a.jsonl", '{"messages": [{"content": "a"}]}', "is no document: message 1 has no role; expected"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}',
            "is no document: the content of message 1 is no string; expected",
        ),
        ("a.jsonl", '{"messages": {"role": "assistant"}}', "is no document: messages is no list of objects; expected"),
        ("a.jsonl", '{"tokens": [1, -1]}', "is no document: tokens is no list of whole numbers from 0 to"),
        ("a.jsonl", '{"tokens": [true]}', "is no document: tokens is no list of whole numbers from 0 to"),
        ("a.jsonl", '{"p": "a", "r": [1]}', "is no document: p is no list of whole numbers from 0 to"),
        ("a.json", "[]", "is no document: expected"),
        ("a.jsonl", "[" * 200_000, "line 1 of"),
        ("a.jsonl.gz", "no archive", "it is no whole gzip file"),
        ("a.jsonl.gz", _damaged_archive(), "it is no whole gzip file"),
        ("a.txt", b"\xff\xfe\xff", "no UTF-8 text"),
        ("a.jsonl", '{"tokens": [' + "9" * 5000 + "]}", "holds a number of thousands of digits"),
        ("a.txt", "", "nothing to make a datastore of"),
    ],
)
def test_what_is_no_document_is_named(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    words = ["datastore", str(tmp_path / name), "--out", str(tmp_path / "out"), "--bundle", str(bundle.folder)]
    assert cli.main(words) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("moa-export: error: ") and problem in said
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_is_named(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["datastore", str(tmp_path / "no.txt"), "--bundle", str(bundle.folder), "--quiet"]) == 2
    assert "no.txt: No such file" in capsys.readouterr().err
    assert cli.main(["datastore", str(tmp_path / "no.txt"), "--most-tokens", "1"]) == 2
    assert "--most-tokens must be at least 2" in capsys.readouterr().err


def test_a_file_that_is_read_is_not_written_over(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("The harbour lies in the north.")
    (tmp_path / "link.txt").symlink_to(notes)
    for out in (notes, tmp_path / "link.txt"):
        assert cli.main(["datastore", str(notes), "--out", str(out), "--bundle", str(bundle.folder)]) == 2
        assert "is one of the files to read" in capsys.readouterr().err
    assert notes.read_text() == "The harbour lies in the north."


def test_only_a_file_is_replaced(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("The harbour lies in the north.")
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", tmp_path, Path()):
        words = ["datastore", str(tmp_path / "notes.txt"), "--out", str(out), "--bundle", str(bundle.folder)]
        assert cli.main(words) == 2
        assert "it is no file; give the name of one" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_the_home_of_nobody_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("The harbour lies in the north.")
    assert cli.main(["datastore", str(tmp_path / "notes.txt"), "--bundle", "~nobody-of-this-name/bundle"]) == 2
    assert "~nobody-of-this-name/bundle is no bundle" in capsys.readouterr().err
