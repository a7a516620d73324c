"""The replicas benchmark: its arithmetic by hand, and what it says where something is missing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from moa_bench.cli import main
from moa_bench.replicas import measure, present, session
from moa_bench.replicas.figures import figures_of
from moa_bench.replicas.measure import Event, Phases, Results, compare
from moa_bench.replicas.session import Resume, Session, Written
from moa_runtime import extras
from moa_runtime.answer import (
    AnswerFinished,
    AnswerUpdate,
    ChatEvent,
    FinishReason,
    LinkChanged,
    LinkStatus,
    Origin,
    Statistics,
    TokenOrigin,
)
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling


def tokens(confirmed: int, tentative: int = 0) -> tuple[TokenOrigin, ...]:
    return tuple(TokenOrigin(at, Origin.DRAFTED, at < confirmed) for at in range(confirmed + tentative))


def update(confirmed: int, tentative: int = 0) -> AnswerUpdate:
    return AnswerUpdate("", "", tokens(confirmed, tentative), Statistics())


class ScriptedChat:
    """A chat whose answers are given, each event with the clock's reading at which it comes."""

    prompt_tokens = 2
    tokens = (7, 8, 0, 1, 2)

    def __init__(self, answers: list[list[tuple[float, ChatEvent]]]) -> None:
        self.answers, self.now = answers, 0.0
        self.asked: list[tuple[str, Sampling]] = []
        self.restored: list[list[Any]] = []

    def restore(self, messages: list[Any]) -> None:
        self.restored.append(messages)

    async def send(self, text: str, *, max_new_tokens: int, sampling: Sampling) -> AsyncIterator[ChatEvent]:
        self.asked.append((text, sampling))
        for at, event in self.answers[len(self.asked) - 1]:
            self.now = at
            yield event


def talked(number: int, monkeypatch: pytest.MonkeyPatch, *answers: list[tuple[float, ChatEvent]]) -> Any:
    """A session that had these answers, and its chat."""
    chat, enough = ScriptedChat(list(answers)), asyncio.Event()
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: chat.now))

    def answered(who: int) -> None:
        assert who == number
        if len(chat.asked) == len(answers):
            enough.set()

    talking = Session(number, chat, ["Why?", "And?"], 3, answered)  # type: ignore[arg-type]
    asyncio.run(talking.talk(enough))
    return talking, chat


def finished(confirmed: int) -> AnswerFinished:
    return AnswerFinished("", tokens(confirmed), FinishReason.LENGTH, Statistics())


def test_a_session_notes_how_long_a_reader_waited_for_its_next_token(monkeypatch):
    offline, online = LinkChanged(LinkStatus.OFFLINE), LinkChanged(LinkStatus.ONLINE)
    reconnecting = LinkChanged(LinkStatus.RECONNECTING)
    talking, chat = talked(
        1,
        monkeypatch,
        [(1.0, update(1)), (1.5, offline), (1.6, reconnecting), (2.0, online), (3.5, update(1, 1)), (4.0, finished(3))],
        [(5.0, update(1)), (6.0, finished(3))],
        [(6.5, offline), (7.0, online), (9.0, finished(3))],
    )
    assert talking.resumes == [Resume(1.5, 3.0), Resume(6.5, 3.0)]  # of the last one since the question
    assert [text for text, _ in chat.asked] == ["And?", "Why?", "And?"]
    assert chat.restored == [[], [], []]
    assert [sampling.seed for _, sampling in chat.asked] == [1000, 1001, 1002]
    assert talking.answers[0] == Written((7, 8), chat.asked[0][1], (0, 1, 2))


def test_every_second_session_is_greedy(monkeypatch):
    _, chat = talked(2, monkeypatch, [(1.0, finished(3))])
    assert chat.asked == [("Why?", Sampling())]


def test_a_phase_is_over_when_all_have_an_answer_that_they_began_in_it():
    async def run() -> None:
        seen: list[int] = []
        phases = Phases(2, lambda: seen.append(1))
        phases.begin()
        waiting = asyncio.create_task(phases.wait([]))
        for number in (0, 1, 0, 0):  # the first of each may be from before
            phases.answered(number)
        await asyncio.sleep(0)
        assert not waiting.done() and len(seen) == 1
        phases.answered(1)
        await waiting
        assert len(seen) == 2

    asyncio.run(run())


def test_a_session_that_fails_ends_its_phase():
    async def run() -> None:
        async def fail() -> None:
            raise MoaError("the verifier refused")

        phases = Phases(1, lambda: None)
        phases.begin()
        with pytest.raises(MoaError, match="the verifier refused"):
            await phases.wait([asyncio.create_task(fail())])

    asyncio.run(run())


def test_who_finishes_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(measure, "_LONGEST_PHASE_S", 0.01)

    async def run() -> None:
        phases = Phases(3, lambda: None)
        phases.begin()
        with pytest.raises(MoaError, match=r"3 sessions finished no answer within 0.01 s"):
            await phases.wait([])

    asyncio.run(run())


def test_a_text_that_is_not_the_targets_own_is_found_and_each_question_is_asked_once():
    asked = []

    def decode(prompt: Any, count: int, sampling: Sampling) -> list[int]:
        asked.append((prompt, count, sampling))
        return [len(prompt), sampling.seed]

    right, seeded = Written((1, 2), Sampling(), (2, 0)), Written((1, 2), Sampling(seed=5), (2, 5))
    wrong = Written((1,), Sampling(), (2, 0))
    results, counts = Results(), []
    verifier: Any = SimpleNamespace(decode=decode)
    compare(verifier, [right, right, seeded, wrong], 9, results, counts.append)
    assert counts == [2, 1, 1]
    assert results.different == [wrong] and results.compared == 4
    assert len(asked) == 3 and {count for _, count, _ in asked} == {9}


def results_of() -> dict[str, Any]:
    answers = [Written((1,), Sampling(), (1, 2, 3))] * 2
    sessions: list[Any] = [
        SimpleNamespace(answers=answers, resumes=[Resume(5.0, 9.0), Resume(10.0, 1.0)]),
        SimpleNamespace(answers=answers, resumes=[Resume(11.0, 3.0), Resume(20.5, 0.5)]),
    ]
    events = [Event("killed", 10.0, 4.0), Event("drained", 20.0, 2.5)]
    return figures_of(Results(sessions, events, answers[:1], 4))


def test_a_resume_belongs_to_what_happened_last():
    figures = results_of()
    assert figures["events"] == [
        {"event": "killed", "replica_s": 4.0, "resumes": 2, "s_to_go_on": {"median": 2.0, "p95": 2.9, "max": 3.0}},
        {"event": "drained", "replica_s": 2.5, "resumes": 1, "s_to_go_on": {"median": 0.5, "p95": 0.5, "max": 0.5}},
    ]
    assert figures["other_resumes"] == 1
    assert (figures["answers"], figures["tokens"], figures["compared"], figures["different"]) == (4, 12, 4, 1)


def test_nothing_that_happened_is_no_figure():
    events = figures_of(Results([], [Event("killed", 1.0)]))["events"]
    nothing = {"median": None, "p95": None, "max": None}
    assert events == [{"event": "killed", "replica_s": None, "resumes": 0, "s_to_go_on": nothing}]


def test_tables_and_plot_say_the_same():
    settings = {"sessions": 2, "replicas": 2, "behind": "haproxy", "max_new_tokens": 3}
    result = {**results_of(), "settings": settings}
    [table] = present.tables(result)
    assert table.rows == [["killed", 2, 2.0, 2.9, 3.0, 4.0], ["drained", 1, 0.5, 0.5, 0.5, 2.5]]
    assert "1 of 4 differ from plain decoding; 1 resumes before" in table.text()
    assert present.headlines(result)[0] == ("s to go on, a replica killed, p95", 2.9)
    figure = Figure()
    present.draw(result, figure)
    assert len(figure.axes[0].patches) == 6


# -- what is missing -----------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replicas", *words]) == 2
    return capsys.readouterr().err


def test_haproxy_is_not_installed(onnx_bundle, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    err = said(capsys, "--bundle", str(onnx_bundle))
    assert "moa-bench: error: haproxy is not installed: apt-get install haproxy, or the like" in err


def test_ray_is_not_installed(onnx_bundle, capsys, monkeypatch):
    monkeypatch.setitem(extras.MODULES, "ray", ("no_such_package",))
    err = said(capsys, "--behind", "ray", "--bundle", str(onnx_bundle))
    assert 'moa-bench: error: moa-bench replicas --behind ray needs no_such_package: pip install "moa-edge[ray]"' in err


def test_another_ray_is_one_sentence(onnx_bundle, capsys, monkeypatch):
    monkeypatch.setitem(extras.MODULES, "ray", ())
    monkeypatch.setattr("moa_server.replicas.ray_version.version", lambda name: "2.600.1")
    err = said(capsys, "--behind", "ray", "--bundle", str(onnx_bundle))
    assert "moa-bench replicas --behind ray is tested with Ray 2.60 and may fail with 2.600.1: pip install" in err


def test_numbers_out_of_range(onnx_bundle, capsys, monkeypatch):
    monkeypatch.setattr("moa_bench.replicas.command._fleet", None)  # nothing is started
    assert "--sessions must be at most 256, not 99999999" in said(capsys, "--sessions", "99999999")
    long = ("--max-new-tokens", "99999999", "--bundle", str(onnx_bundle))
    assert "--max-new-tokens must be at most 512, the target's context, not 99999999" in said(capsys, *long)
    assert "--sessions must be at least 1, not 0" in said(capsys, "--sessions", "0")
