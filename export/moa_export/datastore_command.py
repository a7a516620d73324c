"""``moa-export datastore``: earlier texts, to be copied from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moa_export.datastore_documents import FORMATS, DocumentReader
from moa_runtime.bundle import Bundle
from moa_runtime.datastore import MOST_TOKENS, write_datastore
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.paths import default_bundle
from moa_runtime.tokenizer import ChatTokenizer

DEFAULT_FILE = Path("texts.moadata")
_LEAST_TOKENS = 2  # one, and the end of its document
_DESCRIPTION = f"""\
Make a datastore of texts that answers may repeat, for moa-chat --datastore FILE (SSSD, arXiv 2411.05894).

FILES are {", ".join(FORMATS)}. A line of JSON is {{"messages": [...]}}, of which the
assistant's messages count, {{"text": "..."}}, {{"tokens": [...]}}, or what moa-train --write-only and moa-bench
accept --answers write. Answers of the target itself are worth most.
"""


def datastore(words: Sequence[str]) -> int:
    """Make a datastore; prints what it holds."""
    parser = argparse.ArgumentParser(
        prog="moa-export datastore",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILES")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_FILE, metavar="FILE", help="where it is written (default: %(default)s)"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="whose tokenizer it is for (default: the default bundle)"
    )
    parser.add_argument(
        "--most-tokens",
        type=int,
        default=MOST_TOKENS,
        metavar="N",
        help="the last documents that fit are kept, 8 bytes a token (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(words)
    if args.most_tokens < _LEAST_TOKENS:
        raise MoaError(f"--most-tokens must be at least {_LEAST_TOKENS}, not {args.most_tokens}")
    if taken := next((path for path in args.files if _same_file(path, args.out)), None):
        raise MoaError(f"--out {args.out} is one of the files to read, {taken}: give the datastore another name")
    require_extra("export", "moa-export datastore")
    from moa_export.progress import Progress

    bundle = Bundle.open(args.bundle or default_bundle())
    reader, progress = DocumentReader(ChatTokenizer.from_bundle(bundle)), Progress(sys.stderr, quiet=args.quiet)
    documents: list[list[int]] = []
    with progress.stage("reading", len(args.files)) as advance:
        for path in args.files:
            documents += reader.read(path)
            advance()
    documents = [document for document in documents if document]
    if not documents:
        raise MoaError("there is nothing to make a datastore of: the files hold neither a text nor an answer")
    with progress.stage("sorting"):
        tokenizer = bundle.manifest.fingerprints.tokenizer
        header = write_datastore(args.out, documents, tokenizer, most_tokens=args.most_tokens)
    left_out = len(documents) - header.documents
    made = {
        "file": str(args.out),
        "bytes": args.out.stat().st_size,
        "left_out": left_out,
        **dataclasses.asdict(header),
    }
    if args.json:
        print(json.dumps(made))
        return 0
    print(f"{args.out}: {header.documents} documents, {header.tokens} tokens, {made['bytes'] / 1e3:,.1f} kB")
    if left_out:
        print(f"the first {left_out} documents were left out: --most-tokens makes room for more")
    return 0


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False
