"""The texts and tokens of the vectors are those of Python."""

from __future__ import annotations

from vectors import trace_files
from vectors.texts import texts


def test_python_writes_what_the_vectors_say() -> None:
    for name, cases in texts().items():
        said = list(trace_files.read(f"texts/{name}"))
        assert len(said) == len(cases)
        for number, (case, expected) in enumerate(zip(cases, said, strict=True)):
            assert case == expected, f"{name}, case {number}"


def test_everything_that_may_be_refused_is() -> None:
    raised = {
        case.get("raises") for name in ("templates", "chats", "turns") for case in trace_files.read(f"texts/{name}")
    }
    assert raised == {None, "ChatTemplateError", "HistoryRewrittenError"}
