"""The server benchmark: its arithmetic by hand, and real clients against a verifier of the tiny target."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise

import httpx
import psutil
import pytest
from matplotlib.figure import Figure

from moa_bench import server as server_module
from moa_bench import server_clients
from moa_bench.cli import main
from moa_bench.draft_bound import draft_bound
from moa_bench.questions import Question, prompts_of
from moa_bench.result import Burst, mean_ms, percentile_ms, token_latencies
from moa_bench.server import (
    MODES,
    Load,
    Server,
    WindowResult,
    figures_of,
    measure_window,
    resident_memory,
    schedule,
    write_tokens,
)
from moa_bench.server_clients import ClientRecord, open_fleet
from moa_bench.serving import Answer, AnswerSettings
from moa_bench.verifier import Verifier, VerifierGoneError, stream_decode
from moa_runtime.bundle import Bundle, write_manifest
from moa_runtime.manifest import read_manifest
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint
from moa_server import app
from moa_server.auth import Authenticator
from moa_server.edge.rate_limits import Kind
from moa_server.sessions import SessionWork
from moa_server.settings import Settings
from support.bench.commands import Run, refusal
from support.refusals import refused
from support.said import is_progress
from support.server.running import serving

# -- arithmetic ------------------------------------------------------------------------------------


def test_a_burst_shares_its_time_among_its_tokens():
    latencies = token_latencies([Burst(1.0, 1), Burst(1.6, 3), Burst(1.7, 1)])
    assert latencies == pytest.approx([0.2, 0.2, 0.2, 0.1])
    assert mean_ms(latencies) == pytest.approx(175)
    assert percentile_ms([0.1, 0.2, 0.3], 50) == pytest.approx(200)
    assert token_latencies([Burst(1.0, 1)]) == [] and mean_ms([]) is None and percentile_ms([], 95) is None


def test_modes_and_engines_take_turns_in_coming_first():
    order = [(load.clients, load.mode) for load in schedule([1, 4], 2, ["auto", "stream"])]
    assert order[:4] == [(1, "auto"), (1, "stream"), (4, "auto"), (4, "stream")]
    assert order[4:] == [(1, "stream"), (1, "auto"), (4, "stream"), (4, "auto")]
    order = [load.name for load in schedule([1], 2, ["auto", "stream"], ["transformers", "vllm"])]
    assert order[:4] == ["transformers auto", "vllm auto", "transformers stream", "vllm stream"]
    assert order[4:] == order[3::-1]


def test_tokens_after_the_window_do_not_count():
    answer = Answer(100.5, [1, 2, 3], bursts=[Burst(102.0, 3), Burst(102.1, 1)])
    assert answer.until(102.0) == Answer(100.5, bursts=[Burst(102.0, 3)])


def test_figures_worked_out_by_hand():
    first = Answer(0.5, bursts=[Burst(1.0, 1), Burst(1.6, 3), Burst(1.7, 1)])
    second = Answer(1.8, bursts=[Burst(2.1, 1)])
    unanswered = Answer(0.1)
    drafted = [
        WindowResult(0.0, [ClientRecord([first, second], 0.3), ClientRecord([unanswered], 0.1)], 5, 7_000_000, 2.5),
        WindowResult(0.0, [ClientRecord([], 0.0), ClientRecord([], 0.0)], 1, 9_000_000, 0.5),
    ]
    streamed = [WindowResult(0.0, [ClientRecord([Answer(0.0, bursts=[Burst(1.0, 1)] * 12)], 0.2)], 13, None)]
    found = figures_of({Load(2, "device"): drafted, Load(2, "stream"): streamed}, seconds=4.0, client_cpus=2)
    draft = found["sessions"]["2"]["device"]
    assert (draft["tokens"], draft["answers"]) == (6, 3)
    assert (draft["tokens_per_s"], draft["tokens_per_s_by_window"]) == (0.75, [1.5, 0.0])
    assert draft["ms_per_token"] == {"mean": 175.0, "p50": 200.0, "p95": 200.0}
    assert draft["ttft_ms"] == {"mean": 400.0, "p95": 490.0}
    assert (draft["passes_per_token"], draft["tokens_per_round"]) == (1.0, 2.0)
    assert (draft["peak_memory_mb"], draft["client_cpu_share"], draft["tokens_per_cpu_s"]) == (9.0, 0.025, 2.0)
    stream = found["sessions"]["2"]["stream"]
    assert (stream["tokens_per_s"], stream["tokens_per_round"], stream["peak_memory_mb"]) == (3.0, None, None)
    assert stream["tokens_per_cpu_s"] is None
    assert (draft["tokens_per_cpu_s_by_window"], draft["sessions_per_pass"]) == ([2.4, 0.0], 0.6667)
    assert draft["ms_per_token_by_window"] == [175.0, None] and draft["bound"] is None
    by_stream = {"tokens_per_s": 0.5, "tokens_per_cpu_s": None, "ms_per_token": None, "bound": None, "of_bound": None}
    assert found["by_stream"] == {"2": {"device": by_stream}}


def test_tokens_before_the_window_do_not_count_but_their_times_do():
    begun = Answer(0.5, bursts=[Burst(1.0, 1), Burst(1.4, 2), Burst(2.4, 2), Burst(2.6, 1)])
    answered = Answer(0.0, bursts=[Burst(1.5, 1)])
    following = Answer(2.0, bursts=[Burst(2.2, 1), Burst(2.5, 3)])
    window = WindowResult(1.5, [ClientRecord([begun], 0.0), ClientRecord([answered, following], 0.0)], 2, None, 2.0)
    found = figures_of({Load(2, "device"): [window]}, seconds=2.0, client_cpus=1)["sessions"]["2"]["device"]
    assert (found["tokens"], found["tokens_per_s"], found["tokens_per_cpu_s"]) == (7, 3.5, 3.5)
    assert found["ms_per_token"]["mean"] == pytest.approx(1000 * (1.0 + 0.2 + 0.3) / 6)
    assert (found["sessions_per_pass"], found["tokens_per_round"]) == (2.0, 2.0)
    assert found["ttft_ms"]["mean"] == pytest.approx((500 + 1500 + 200) / 3, abs=0.01)


def test_windows_are_compared_in_pairs_and_with_their_bound():
    def window(tokens: int, cpu_s: float, bound: float | None = None) -> WindowResult:
        bursts = [Burst(each / tokens, 1) for each in range(tokens)]
        return WindowResult(-1.0, [ClientRecord([Answer(0.0, bursts=bursts)], 0.1)], tokens, 1, cpu_s, bound)

    streamed = [window(10, 1.0), window(20, 1.0), window(40, 2.0)]
    drafted = [window(12, 1.0, 1.4), window(30, 1.0, 1.5), window(44, 2.0, 1.6)]
    found = figures_of({Load(1, "stream"): streamed, Load(1, "auto"): drafted}, seconds=1.0, client_cpus=1)
    against = found["by_stream"]["1"]["auto"]
    assert (against["tokens_per_s"], against["tokens_per_cpu_s"]) == (1.2, 1.2)  # of 1.2, 1.5 and 1.1
    assert (against["bound"], against["of_bound"]) == (1.5, 0.8)
    assert against["ms_per_token"] == pytest.approx(1 / 1.2, rel=1e-3)


def offers(*bins: tuple[int, int, int]) -> dict[str, list[int]]:
    return dict(zip(("offered", "verified", "accepted"), map(list, zip(*bins, strict=True)), strict=True))


def test_the_bound_takes_the_nodes_that_pay_at_the_costs_of_steps():
    # Each of 4 sessions offers a node of 0.6 and one of 0.1: rows 4, 8 and 12.
    counts = offers((100, 100, 10), (100, 50, 30))
    step_ms = {"4": 10.0, "8": 12.0, "12": 20.0}
    assert draft_bound(4, step_ms, 100, counts) == pytest.approx((4 + 2.4) / 12 / (4 / 10))
    assert draft_bound(4, {**step_ms, "12": 12.1}, 100, counts) == pytest.approx((4 + 2.8) / 12.1 / (4 / 10))
    assert draft_bound(4, {"4": 10.0, "8": 20.0, "12": 30.0}, 100, counts) == 1  # nothing pays
    # The second row of a session is dear, further ones are free.
    assert draft_bound(4, {"4": 10.0, "5": 18.0, "12": 18.0}, 100, counts) == 1
    assert draft_bound(4, {"4": 10.0, "5": 16.0, "12": 16.0}, 100, counts) == pytest.approx(6.8 / 16 / 0.4)
    assert draft_bound(4, {"4": 10.0}, 100, counts) == 1  # no more rows are known
    assert draft_bound(4, {}, 100, counts) is draft_bound(4, step_ms, 0, counts) is None


def test_each_window_has_a_bearer_and_the_verifier_drafts_for_none_that_stream(tmp_path):
    loads = [Load(1, "stream"), Load(1, "auto"), Load(1, "stream")]
    tokens = write_tokens(tmp_path / "tokens.json", loads)
    authenticator = Authenticator(file=tmp_path / "tokens.json")
    bearers = [authenticator.authenticate(f"Bearer {token}") for token in tokens]
    assert len({bearer.name for bearer in bearers}) == 3
    for load, bearer in zip(loads, bearers, strict=True):
        budgets = authenticator.budgets(bearer)
        budgets.wait_s(Kind.DRAFTED_TOKENS, 1)
        assert (budgets.wait_s(Kind.DRAFTED_TOKENS, 0) > 3600) == (load.mode == "stream")


def test_engines_are_compared_with_the_streaming_of_the_first_one():
    tokens = {("stream", "transformers"): 2, ("stream", "vllm"): 12, ("auto", "vllm"): 6, ("device", "vllm"): 0}
    windows = {
        Load(1, *name): [
            WindowResult(0.0, [ClientRecord([Answer(0.0, bursts=[Burst(1.0, n)] if n else [])], 0.1)], 1, None)
        ]
        for name, n in tokens.items()
    }
    found = figures_of(windows, seconds=1.0, client_cpus=1)
    assert list(found["sessions"]["1"]) == ["transformers stream", "vllm stream", "vllm auto", "vllm device"]
    by_stream = {mode: each["tokens_per_s"] for mode, each in found["by_stream"]["1"].items()}
    assert by_stream == {"vllm stream": 6.0, "vllm auto": 3.0}
    silent = found["sessions"]["1"]["vllm device"]
    assert (silent["tokens_per_s"], silent["passes_per_token"], silent["tokens_per_round"]) == (0.0, None, None)
    assert silent["ttft_ms"] == {"mean": None, "p95": None}


def test_tables_and_plots_show_every_load_and_partial_results():
    windows = {}
    for clients, tokens in ((1, 8), (4, 24)):
        for mode, share in (("device", 4), ("stream", 2)):
            answer = Answer(0.0, bursts=[Burst(0.1 * number, 1) for number in range(tokens // share)])
            windows[Load(clients, mode)] = [WindowResult(-1.0, [ClientRecord([answer], 0.5)], 12, 1_234_000_000)]
    settings = {"engines": [], "repeats": 1, "seconds": 2.0, "draft_length": 6, "max_new_tokens": 64}
    settings |= {"sampling": {"temperature": 0.7, "top_p": 1.0, "seed": 3}, "client_cpus": 1, "pinned": True}
    skipped = [{"question_id": 7, "reason": "long"}]
    result = {**figures_of(windows, 2.0, 1), "settings": settings, "skipped": skipped, "partial": False}
    loads, compared = Server().tables(result)
    rows = [("1", "device", 1.0), ("1", "stream", 2.0), ("4", "device", 3.0), ("4", "stream", 6.0)]
    assert [tuple(row[:3]) for row in loads.rows] == rows and "1234.0" in loads.text()
    assert all(len(row) == len(loads.header) for row in loads.rows)
    assert [row[:3] for row in compared.rows] == [["1", "device", 0.5], ["4", "device", 0.5]]
    assert all(len(row) == len(compared.header) for row in compared.rows)
    assert "0.7" in compared.note and "question 7" in compared.note
    figure = Figure()
    Server().plot(result, figure)
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert lines == {"device": [[1, 1], [4, 3]], "stream": [[1, 2], [4, 6]]}
    del result["sessions"]["4"], result["sessions"]["1"]["stream"]
    result["sessions"]["1"]["device"]["ms_per_token"]["p95"] = None
    assert len(Server().tables(result)[0].rows) == 1
    Server().plot(result, Figure())
    result |= {"sessions": {}, "by_stream": {}}
    assert [table.rows for table in Server().tables(result)] == [[], []]
    Server().plot(result, Figure())


# -- the verifier's process, and its stream ----------------------------------------------------------


def test_a_verifier_that_has_ended_is_noticed():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watched = psutil.Process(process.pid)
        assert resident_memory(watched) > 0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but is not reaped
        with refused("verifier_gone", VerifierGoneError):
            resident_memory(watched)


def streamed(handler) -> list[int]:
    """What :func:`stream_decode` gets from ``handler``; raises as it does."""

    async def collect() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            return [token async for token in stream_decode(client, "http://verifier", "secret", [1, 2], 8)]

    return asyncio.run(collect())


def test_a_stream_is_read_to_its_last_event():
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        asked = json.loads(request.content)
        assert (asked["tokens"], asked["max_new_tokens"], asked["stream"]) == ([1, 2], 8, True)
        return httpx.Response(200, text='data: {"token": 5}\n\ndata: {"token": 6}\n\ndata: {"done": true}\n\n')

    assert streamed(answer) == [5, 6]


def lose(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("connection reset")


@pytest.mark.parametrize(
    ("handler", "code"),
    [
        (lambda request: httpx.Response(200, text='data: {"token": 5}\n\n'), "verifier_gone"),  # no end
        (lose, "verifier_gone"),
        (lambda request: httpx.Response(400, json={"error": "the context holds 512"}), "refused"),
        (lambda request: httpx.Response(200, text='data: {"error": "512"}\n\n'), "refused"),
    ],
)
def test_a_stream_that_ends_early_says_why(handler, code):
    with refused(code) as caught:
        streamed(handler)
    assert (code == "refused") == ("512" in str(caught.value))


# -- real clients ------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(server_module, "_WARM_UP_S", 0.1)
    monkeypatch.setattr(app, "_SWEEP_SECONDS", 0.1)


@pytest.fixture
def served(tiny, quick):
    """A verifier of the tiny target, and what stops it."""
    *_, engine = tiny
    with ExitStack() as running:
        yield running.enter_context(serving(engine, Settings(token="secret", keep_seconds=0))), running.close


@pytest.fixture
def command(served, onnx_bundle, questions, monkeypatch, capsys):
    """Runs ``moa-bench server`` against the verifier."""
    verifier, _ = served
    monkeypatch.setenv("MOA_TOKEN", "secret")

    def run(*more: str) -> Run:
        where = ["--server", verifier.url, "--bundle", str(onnx_bundle), "--questions", str(questions)]
        status = main(["server", *where, "--max-new-tokens", "12", "--sessions", "1", "--seconds", "0.2", *more])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_one_object(command):
    status, out, err = command("--sessions", "2,1", "--repeats", "1", "--seconds", "1", "--json")
    assert status == 0 and is_progress(err)
    found = json.loads(out)
    assert list(found["sessions"]) == ["1", "2"]
    loads = {(count, mode): load for count, modes in found["sessions"].items() for mode, load in modes.items()}
    assert list(loads) == [(count, mode) for count in "12" for mode in MODES]
    assert sum(load["tokens"] for load in loads.values()) > 0
    for (count, mode), load in loads.items():
        assert load["answers"] >= int(count)
        assert (load["tokens_per_s"], load["tokens_per_s_by_window"]) == (load["tokens"], [load["tokens"]])
        assert (load["ttft_ms"]["mean"] is None) == (load["passes_per_token"] is None) == (load["tokens"] == 0)
        assert mode != "stream" or load["tokens_per_round"] is None
        assert load["client_cpu_share"] > 0 and load["peak_memory_mb"] is None
    assert list(found["by_stream"]) == ["1", "2"]
    assert (found["partial"], found["skipped"]) == (False, [])
    settings = found["settings"]
    assert (settings["sessions"], settings["questions"]) == ([1, 2], "questions.jsonl")
    assert (settings["own_verifier"], settings["pinned"]) == (False, False)
    assert multiprocessing.active_children() == []


def kill_clients(served) -> None:
    for client in multiprocessing.active_children():
        client.kill()
        client.join()


def stop_verifier(served) -> None:
    served[1]()


def interrupt(served) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("end", "status"), [(kill_clients, 1), (stop_verifier, 1), (interrupt, 130)])
def test_an_end_after_the_first_window_leaves_a_partial_result(command, served, monkeypatch, end, status):
    def measure(load, *more):
        if load.mode == "stream":
            end(served)
        return measure_window(load, *more)

    monkeypatch.setattr(server_module, "schedule", lambda *_: [Load(1, "device"), Load(1, "stream")])
    monkeypatch.setattr(server_module, "measure_window", measure)
    ended, out, err = command("--modes", "device", "--json")
    found = json.loads(out)
    assert ended == status and found["partial"] and found["problem"] in err
    assert [list(modes) for modes in found["sessions"].values()] == [["device"]]
    assert found["by_stream"] == {"1": {}}


def test_clients_of_another_drafter_are_refused(command, onnx_bundle, tmp_path):
    other = tmp_path / "bundle"
    shutil.copytree(onnx_bundle, other)
    manifest = read_manifest(other)
    prints = dataclasses.replace(manifest.fingerprints, drafter="another")
    write_manifest(other, dataclasses.replace(manifest, fingerprints=prints))
    assert "another" in refusal(command("--bundle", str(other)))


def test_windows_of_a_verifier_of_ours(served, onnx_bundle):
    running, _ = served
    # As if it were started by the benchmark: the process is this one.
    verifier = Verifier(Endpoint(running.url, "secret"), pid=os.getpid())
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(onnx_bundle))
    prompts, _ = prompts_of([Question(1, "qa", ("Why?",))], tokenizer, 512)
    length = len(verifier.decode(prompts[0].tokens, 5))
    loads = [Load(1, "device"), Load(2, "stream")]
    with open_fleet(2, onnx_bundle, prompts, AnswerSettings(6, 5)) as fleet:
        windows = [measure_window(load, 1.0, verifier, fleet) for load in loads]
        assert [process.is_alive() for process in fleet.processes] == [True, True]
    assert [len(window.clients) for window in windows] == [1, 2]
    assert all(window.peak_memory > 1_000_000 and window.cpu_s > 0 for window in windows)
    assert sum(window.passes for window in windows) > 0
    answers = 0
    for client in (client for window in windows for client in window.clients):
        # One question after the other: the next is asked once the answer is complete.
        for answer, following in pairwise(client.answers):  # also those before the window
            answers += 1
            assert sum(burst.tokens for burst in answer.bursts) == length
            assert answer.sent <= answer.bursts[0].at and answer.bursts[-1].at <= following.sent
    assert answers > 0


@pytest.fixture
def holding(monkeypatch):
    """Let verifiers hold all verdicts but those of the first conversation."""
    verdict, first = SessionWork._verdict, []

    async def held(work, conversation, asked):
        first.append(conversation)
        if conversation is not first[0]:
            await asyncio.Event().wait()
        return await verdict(work, conversation, asked)

    monkeypatch.setattr(SessionWork, "_verdict", held)
    monkeypatch.setattr(server_clients, "_ASK_EVERY_S", 0.2)


@pytest.mark.parametrize("code", ["timeout", "verifier_gone", "client_gone"])
def test_the_wait_for_first_tokens_ends_if_one_never_comes(holding, served, onnx_bundle, monkeypatch, code):
    running, stop = served
    verifier = Verifier(Endpoint(running.url, "secret"))
    prompts, _ = prompts_of([Question(1, "qa", ("Why?",))], ChatTokenizer.from_bundle(Bundle.open(onnx_bundle)), 512)

    if code == "timeout":
        monkeypatch.setattr(server_clients, "_PATIENCE_S", 0.5)

    with open_fleet(2, onnx_bundle, prompts, AnswerSettings(6, 400)) as fleet:
        received = fleet._received

        def one_then_end(seconds):
            messages = received(seconds)
            if messages and code == "verifier_gone":
                stop()
            elif messages and code == "client_gone":  # of which the other one does not tell
                (done,) = set(fleet._connections) - set(fleet._busy)
                fleet.processes[fleet._connections.index(done)].kill()
            return messages

        monkeypatch.setattr(fleet, "_received", one_then_end)
        with refused(code):
            measure_window(Load(2, "device"), 0.1, verifier, fleet)


def test_questions_that_are_all_too_long_are_refused(onnx_bundle, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["Why? " * 400]}))
    argv = ["server", "--bundle", str(onnx_bundle), "--questions", str(path)]
    refusal((main(argv), *capsys.readouterr()), "too_long")
