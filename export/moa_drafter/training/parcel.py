"""Cut files into small pieces and join them again, for machines that take and give only small files.

    python -m moa_drafter.training.parcel split weights.safetensors --out pieces
    python -m moa_drafter.training.parcel join pieces/weights.safetensors.parcel.json --out weights

Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moa_runtime.errors import MoaError
from moa_runtime.program import run_program

SUFFIX = ".parcel.json"
_MIB = 2**20


def split(file: Path, out: Path, size: int) -> Path:
    """Cut ``file`` into pieces of at most ``size`` bytes in ``out``.

    Returns:
        the list of pieces, ``NAME.parcel.json``: name, bytes and SHA-256 of the whole, name and SHA-256 of each piece.

    Raises:
        MoaError: the file cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    whole, total, pieces = hashlib.sha256(), 0, []
    try:
        with file.open("rb") as source:
            while piece := source.read(size):
                name = f"{file.name}.{len(pieces):03d}"
                (out / name).write_bytes(piece)
                whole.update(piece)
                total += len(piece)
                pieces.append({"name": name, "sha256": hashlib.sha256(piece).hexdigest()})
    except OSError as error:
        raise MoaError(f"cannot cut {file}: {error.strerror}") from error
    listed = out / (file.name + SUFFIX)
    content = {"name": file.name, "bytes": total, "sha256": whole.hexdigest(), "pieces": pieces}
    listed.write_text(json.dumps(content, indent=1) + "\n")
    return listed


def join(listed: Path, out: Path) -> Path:
    """Put the pieces that lie beside ``listed`` together in the folder ``out``; nothing is written where one is wrong.

    Returns:
        the joined file.

    Raises:
        MoaError: the list or a piece is missing or damaged; named.
    """
    try:
        content = json.loads(listed.read_text())
        names = [(Path(piece["name"]).name, piece["sha256"]) for piece in content["pieces"]]
        target, expected = out / Path(content["name"]).name, content["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MoaError(f"cannot read {listed}: expected the *{SUFFIX} file that split wrote ({error})") from error
    out.mkdir(parents=True, exist_ok=True)
    whole = hashlib.sha256()
    scratch = target.with_name(f".{target.name}.tmp")
    try:
        with scratch.open("wb") as joined:
            for name, digest in names:
                piece = (listed.parent / name).read_bytes()
                if hashlib.sha256(piece).hexdigest() != digest:
                    raise MoaError(f"{listed.parent / name} is damaged: its SHA-256 is not the list's")
                whole.update(piece)
                joined.write(piece)
        if whole.hexdigest() != expected:
            raise MoaError(f"{listed} is damaged: the pieces are whole, and the file is not")
        scratch.replace(target)
    except OSError as error:
        raise MoaError(f"cannot join {target.name}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moa_drafter.training.parcel", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    cutting = commands.add_parser("split", help="cut a file")
    cutting.add_argument("file", type=Path)
    cutting.add_argument("--size", type=float, default=15, metavar="MIB", help="of a piece (default %(default)s)")
    joining = commands.add_parser("join", help="join a file's pieces")
    joining.add_argument("file", type=Path, help=f"the *{SUFFIX} file beside the pieces")
    for command in (cutting, joining):
        command.add_argument("--out", type=Path, required=True, help="folder")
    args = parser.parse_args(argv)
    return run_program("parcel", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.command == "split":
        if not args.size > 0:
            raise MoaError(f"--size must be positive, not {args.size}")
        print(split(args.file, args.out, max(1, int(args.size * _MIB))))
    else:
        print(join(args.file, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
