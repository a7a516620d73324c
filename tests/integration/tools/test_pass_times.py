"""``tools/pass_times.py``: passes of a tiny target in turns, their parts, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pass_times import main
from support.drafter.gguf_files import write_gguf


@pytest.fixture
def command(tiny_target: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    [file] = write_gguf(tiny_target, tmp_path / "tiny.gguf")

    def run(*options: str) -> tuple[int, str, str]:
        return main(
            ["--target", str(file), "--contexts", "64", "--several-contexts", "8", *options]
        ), *capsys.readouterr()

    return run


def test_engines_take_turns_and_ours_has_parts(command):
    status, out, _ = command("--engines", "float32,torch,products", "--json")
    found = json.loads(out)
    assert status == 0
    names = [each["name"] for each in found["passes"]]
    assert names[0] == "1 x 1 after 64" and names[-3:] == ["8 x 2 after 8", "prompt of 64", "prompt of 512"]
    for each in found["passes"]:
        assert list(each["least_ms"]) == ["float32", "torch", "products"]
        assert all(0 < least <= median for least, median in zip(*map(dict.values, _times(each)), strict=True))
    assert [each["name"] for each in found["parts"]] == names
    for each in found["parts"]:
        assert min(each["layers"], each["attention"], each["head"]) > 0 and each["layers"] < each["total"]
    assert list(found["memory"]) == ["float32", "torch"]


def _times(each: dict) -> tuple[dict, dict]:
    return each["least_ms"], each["median_ms"]


def test_the_command_prints_tables_and_refuses_fewer_bits_than_the_file_has(command):
    status, out, _ = command("--engines", "torch")
    assert status == 0 and "1 x 16 after 64" in out and "parts" not in out
    for options, code in ((["--engines", "int4"], "no_engine"), (["--threads", "0"], "out_of_range")):
        status, out, err = command(*options)
        assert (status, out) == (2, "") and f"[{code}]" in err
