"""Files cut into pieces and joined."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moa_drafter.training.parcel import main


def test_pieces_join_to_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(range(256)) * 100)
    assert main(["split", str(file), "--out", str(tmp_path / "pieces"), "--size", "0.01"]) == 0
    pieces = sorted((tmp_path / "pieces").glob("weights.bin.0*"))
    assert [piece.stat().st_size for piece in pieces] == [10485, 10485, 4630]
    assert main(["join", str(tmp_path / "pieces/weights.bin.parcel.json"), "--out", str(tmp_path / "there")]) == 0
    assert (tmp_path / "there/weights.bin").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("harm", ["damaged", "missing", "no list", "whole"])
def test_a_bad_piece_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"x" * 3000)
    main(["split", str(file), "--out", str(tmp_path), "--size", "0.001"])
    piece, listed = tmp_path / "a.bin.001", tmp_path / "a.bin.parcel.json"
    if harm == "damaged":
        piece.write_bytes(b"y" * 1048)
    elif harm == "missing":
        piece.unlink()
    elif harm == "no list":
        listed.write_text("[]")
    else:
        listed.write_text(json.dumps({**json.loads(listed.read_text()), "sha256": "0"}))
    capsys.readouterr()
    assert main(["join", str(listed), "--out", str(tmp_path / "there")]) == 2
    named = {"damaged": "a.bin.001 is damaged", "missing": "a.bin.001", "no list": "expected the"}
    assert named.get(harm, "the file is not") in capsys.readouterr().err
    assert not list(tmp_path.glob("there/*")) and not list(tmp_path.glob("there/.*"))
