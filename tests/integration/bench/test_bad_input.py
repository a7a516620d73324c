"""Options of ``moa-bench`` that are refused in one line, before anything is measured."""

from __future__ import annotations

import pytest

from moa_bench.cli import main
from support.bench.commands import refusal

#: Command lines by the error's code. SELF is a file that exists and BUNDLE a bundle; questions are added.
REFUSED = {
    "out_of_range": """
        accept --limit 0
        accept --draft-length 0
        accept --draft-length 100000
        accept --max-new-tokens 0
        accept --draft auto --pace 1,2
        accept --draft auto --pace 1,2,3,4,-5
        accept --draft auto --pace 1,2,3,4,soon
        accept --draft tree --width 63
        accept --draft tree --nodes 5
        accept --temperature -1
        accept --temperature nan
        accept --top-p 0
        accept --seed -1
        network --draft-length 0
        network --answer-timeout 0
        network --cut-after 0
        network --cut-after 40 --max-new-tokens 40
        network --cut-after 2 --cut-seconds 0.5
        network --cut-after 2 --cut-seconds nan
        offline --after 0
        offline --lengths 16,0
        offline --lengths 2000
        device --threads 0
        device --repeats 0
        device --bundle BUNDLE --contexts 16,505
        device --bundle BUNDLE --contexts -1
        server --sessions 0
        server --sessions 8,65
        server --seconds 0
        server --seconds nan
        server --repeats 0
        server --draft-length 0
        simulate shapes --recording SELF --scenarios 0
        simulate shapes --recording SELF --max-new-tokens 1
    """,
    "contradiction": """
        accept --pace 1,2,3,4,5
        accept --draft auto --draft-length 4
        accept --draft thompson --draft-length 4
        accept --draft auto --nodes 4
        accept --draft auto --replay
        accept --nodes 9
        accept --width 9
        accept --answers nowhere
        accept --no-ngrams --datastore a.moadata
        network --server ws://127.0.0.1:9 --dtype bfloat16
        network --cut-after 2 --profiles direct
        network --cut-after 2 --show
        server --server ws://127.0.0.1:1 --model tiny
        server --server ws://127.0.0.1:1 --engine vllm
        simulate shapes --recording SELF --limit 1
    """,
    "not_a_number": """
        offline --lengths 16;32
        offline --lengths=
        device --bundle BUNDLE --contexts 16,many
        server --sessions four
        server --sessions 1,,4
    """,
    "not_readable": "accept --questions no-such-file",
    "not_writable": """
        accept --timeline no-such-folder/out.json
        accept --plot no-such-folder/out.svg
    """,
    "unknown_format": "offline --plot figure.txt",
    "unknown_profile": "network --profiles 5g,hyperspace",
    "unknown_mode": """
        network --modes stream,telepathy
        network --modes=
        network --cut-after 2 --modes stream
        server --modes stream,fast
    """,
    "unknown_engine": "server --engine vllm,abacus",
    "tls": "network --server wss://verifier.example --profiles direct,lte",
    "verifier_gone": """
        network --server ws://127.0.0.1:9 --profiles lte --bundle BUNDLE
        device --server ws://127.0.0.1:9 --bundle BUNDLE
        server --server ws://127.0.0.1:9 --bundle BUNDLE
    """,
    "folder_missing": "simulate shapes --recording no-such-folder/recording",
    "damaged": "simulate shapes --recording SELF",
    None: """
        server --bundle no-such
        device --server ftp://nowhere
    """,
}
LINES = [(line.split(), code) for code, lines in REFUSED.items() for line in lines.strip().splitlines()]


@pytest.mark.parametrize(("words", "code"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_bad_input_is_refused_in_one_line(questions, onnx_bundle, capsys, words, code):
    made = {"SELF": __file__, "BUNDLE": str(onnx_bundle)}
    argv = [made.get(word, word) for word in words]
    if "--questions" not in argv and words[0] != "simulate":
        argv += ["--questions", str(questions)]
    refusal((main(argv), *capsys.readouterr()), code)
