"""The network benchmark: its figures by hand, every mode against plain decoding, and a verifier that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

import pytest
from matplotlib.figure import Figure

from moa_bench import network as network_module
from moa_bench import serving as serving_module
from moa_bench.cli import main
from moa_bench.link import LinkProfile, with_round_trip
from moa_bench.network import Network, Results, Tally, auto_ratios, measure_answers
from moa_bench.questions import prompts_of, read_questions
from moa_bench.serving import (
    MODES,
    Answer,
    AnswerSettings,
    OracleDrafter,
    Outcome,
    Turn,
    ask,
    make_modes,
    watched,
)
from moa_bench.verifier import Verifier, VerifierGoneError
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Origin, Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint
from moa_server.settings import Settings
from support.drafted import draft_of
from support.said import is_progress
from support.server.running import serving

DRAFT, TOKENS = 4, 14
DEAD = Verifier(Endpoint("ws://127.0.0.1:9"))  # the port of the discard protocol: nothing listens there

# -- figures ---------------------------------------------------------------------------------------


def outcome(sent: float, *bursts: tuple[float, int], in_rounds: bool = True, identical: bool = True) -> Outcome:
    answer = Answer(sent)
    for at, count in bursts:
        answer.add(at, [5] * count, [Origin.DRAFTED] * count)
    return Outcome(answer, identical, passes=3, bytes_up=100, bytes_down=50, in_rounds=in_rounds)


def test_figures_worked_out_by_hand():
    tally = Tally()
    tally.add(outcome(1.0, (1.5, 1), (2.1, 3), (2.2, 1)))
    tally.add(outcome(3.0, (3.1, 1), (3.5, 1)))
    tally.add(outcome(5.0, (5.3, 1)))
    assert tally.as_dict() == {
        "answers": 3,
        "tokens": 8,
        "ttft_ms": 300.0,
        "ms_per_token": {"mean": 220.0, "p50": 200.0, "p95": 360.0},
        "longest_gap_ms": 500.0,
        "tokens_per_round": 1.6667,
        "passes_per_token": 1.125,
        "bytes_up_per_token": 37.5,
        "bytes_down_per_token": 18.8,
        "identical": True,
    }


def test_one_other_answer_is_not_identical():
    tally = Tally()
    for identical in (True, False, True):
        tally.add(outcome(0.0, (1.0, 1), identical=identical))
    assert tally.as_dict()["identical"] is False


def test_a_stream_has_no_rounds():
    tally = Tally()
    tally.add(outcome(0.0, (1.0, 1), (2.0, 1), in_rounds=False))
    assert tally.as_dict()["tokens_per_round"] is None


def test_the_oracle_knows_what_follows():
    oracle = OracleDrafter(3, [7, 8, 9])
    assert [drafted.token for drafted in draft_of(oracle, [1, 2, 3, 7], 2)] == [8, 9]
    assert [drafted.token for drafted in draft_of(oracle, [1, 2, 3, 7, 8], 2)] == [9]


def test_auto_against_the_best_question_by_question():
    answers = {"stream": [0.2, 0.4, None], "auto": [0.1, 0.2, 0.1], "server": [0.11, 0.19, 0.1], "oracle": [0.0] * 3}
    found = auto_ratios(answers)
    assert found == {
        "stream": {"ratio": 0.5, "low": 0.5, "high": 0.5},
        "best": {"mode": "server", "ratio": 1.0, "low": 0.9091, "high": 1.0526},
    }


@pytest.mark.parametrize(
    "answers", [{"stream": [0.1, 0.1]}, {"auto": [0.1, 0.1], "oracle": [0.1, 0.1]}, {"auto": [0.1], "stream": [0.1]}]
)
def test_nothing_to_pair(answers):
    assert auto_ratios(answers) is None


# -- a tiny target over real sockets ---------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier(tiny):
    *_, engine = tiny
    with serving(engine, Settings(token="secret")) as running:
        yield Verifier(Endpoint(running.url, running.token))


@pytest.fixture(scope="module")
def make(tiny):
    """Makes modes with the tiny drafter: names and sampling -> modes."""
    _, _, folder, backend, _ = tiny

    def made(names, sampling=Sampling()):  # noqa: B008 (frozen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving_module, "load_backend", lambda bundle, threads: backend)
            return make_modes(names, Bundle.open(folder), AnswerSettings(DRAFT, TOKENS, sampling))

    return made


@pytest.fixture
def prompts(tiny, questions):
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(tiny[2]))
    found, skipped = prompts_of(read_questions(questions), tokenizer, 512)
    assert not skipped
    return found


@pytest.fixture
def turn(prompts, verifier) -> Turn:
    prompt = prompts[0]
    return Turn(prompt.text, prompt.tokens, verifier.decode(prompt.tokens, TOKENS))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 7)])
def test_every_mode_gives_the_targets_own_answers(verifier, make, prompts, sampling):
    links = {"near": with_round_trip(4), "direct": None}
    modes = make(MODES, sampling)
    results, order = Results(links, list(modes)), []
    settings = AnswerSettings(DRAFT, TOKENS, sampling)
    interval = sys.getswitchinterval()

    for link, mode, turn, asked in measure_answers(prompts, verifier, links, modes, settings, results):
        order.append((turn.text[:4], link, mode))
        answer = asked.answer
        assert answer.tokens == list(turn.reference)
        assert len(answer.origins) == len(answer.tokens) == sum(burst.tokens for burst in answer.bursts)
    assert sys.getswitchinterval() == interval
    first, second = MODES, (*MODES[1:], MODES[0])
    assert order == [
        (text, link, mode)
        for text, turns in (("Name", first), ("What", second))
        for link in ("near", "direct")
        for mode in turns
    ]
    figures = results.as_dict()["profiles"]
    for found in figures.values():
        assert all(mode["identical"] and mode["answers"] == 2 for mode in found.values())
        assert len({mode["tokens"] for mode in found.values()}) == 1
        assert found["stream"]["tokens_per_round"] is None and found["per-call"]["tokens_per_round"] == 1.0
        assert found["stream"]["passes_per_token"] == found["per-call"]["passes_per_token"] == 1.0
        assert found["oracle"]["passes_per_token"] < found["device"]["passes_per_token"] <= 1.0
        # Without a drafter no memory rows are sent.
        assert found["per-call"]["bytes_down_per_token"] < found["oracle"]["bytes_down_per_token"] / 5
    for mode in ("stream", "per-call"):
        # The same messages, with and without what frames them; memory rows come as far as the answer's end lets them.
        for way in ("bytes_up_per_token", "bytes_down_per_token"):
            assert figures["near"][mode][way] > figures["direct"][mode][way] > 0


def test_the_oracle_is_right_to_the_end_of_each_draft(verifier, make, turn):
    (mode,) = make(["oracle"]).values()
    asked = ask(verifier, None, mode, turn, 60)
    sizes = [burst.tokens for burst in asked.answer.bursts]
    rest = len(turn.reference) - 1
    assert sizes[0] == 1
    assert sizes[1:] == [DRAFT + 1] * (rest // (DRAFT + 1)) + ([rest % (DRAFT + 1)] if rest % (DRAFT + 1) else [])
    assert asked.passes == len(sizes)


def test_an_outage_is_survived_in_every_mode(verifier, make, turn):
    profile = LinkProfile("gap", None, None, 10, outages=((0.04, 0.2),))
    for mode in make(MODES).values():
        assert ask(verifier, profile, mode, turn, 60).identical


def test_prompts_that_do_not_fit_are_listed(tiny, questions):
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(tiny[2]))
    lengths = [len(prompt.tokens) for prompt in prompts_of(read_questions(questions), tokenizer, 512)[0]]
    found, skipped = prompts_of(read_questions(questions), tokenizer, max(lengths))
    assert [len(prompt.tokens) for prompt in found] == [min(lengths)]
    assert len(skipped) == 1 and str(max(lengths)) in skipped[0].reason


# -- failures --------------------------------------------------------------------------------------


async def never() -> None:
    await asyncio.Event().wait()


async def broken() -> None:
    raise MoaError("it broke")


def test_an_answer_that_takes_too_long_is_given_up(verifier):
    with pytest.raises(MoaError, match=r"not complete after 0\.05 s.*--answer-timeout"):
        asyncio.run(watched(never(), verifier, 0.05))


def test_a_verifier_that_is_gone_ends_the_waiting():
    with pytest.raises(VerifierGoneError, match="does not answer any more"):
        asyncio.run(watched(never(), DEAD, 60))


def test_a_failing_answer_is_blamed_on_a_verifier_that_is_gone(verifier):
    with pytest.raises(VerifierGoneError):
        asyncio.run(watched(broken(), DEAD, 60))
    with pytest.raises(MoaError, match="it broke"):
        asyncio.run(watched(broken(), verifier, 60))


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def command(tiny, questions, monkeypatch, capsys):
    """Runs ``moa-bench network`` on the tiny bundle: more arguments -> exit status, stdout, stderr."""
    _, _, bundle, backend, _ = tiny
    monkeypatch.setattr(serving_module, "load_backend", lambda bundle, threads: backend)
    monkeypatch.setenv("MOA_TOKEN", "secret")

    def run(*more: str) -> tuple[int, str, str]:
        where = ["--questions", str(questions), "--bundle", str(bundle), "--max-new-tokens", str(TOKENS)]
        status = main(["network", *where, *more])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_one_object(command, verifier):
    status, out, err = command("--server", verifier.endpoint.url, "--profiles", "lan,direct", "--json")
    assert status == 0 and is_progress(err)
    found = json.loads(out)
    assert [list(modes) for modes in found["profiles"].values()] == [list(MODES)] * 2
    assert list(found["profiles"]) == ["lan", "direct"]
    assert all(mode["identical"] for modes in found["profiles"].values() for mode in modes.values())
    assert (found["benchmark"], found["partial"], found["skipped"]) == ("network", False, [])
    assert found["settings"]["own_verifier"] is False
    assert list(found["auto"]) == ["lan", "direct"]
    for ratios in found["auto"].values():
        assert ratios["best"]["ratio"] >= ratios["stream"]["ratio"] > 0
    *_, ratios = Network().tables(found)
    assert [row[0] for row in ratios.rows] == ["lan", "direct"]
    figure = Figure()
    Network().plot(found, figure)
    latency, first = figure.axes
    assert len(latency.patches) == len(first.patches) == 2 * len(MODES)
    assert [text.get_text() for text in latency.get_legend().get_texts()] == list(MODES)


def test_the_command_prints_tables_and_answers(command, verifier):
    options = ["--profiles", "direct", "--modes", "oracle,stream", "--limit", "1", "--show"]
    status, out, err = command("--server", verifier.endpoint.url, *options)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "direct" and [line.split()[0] for line in lines[1:4]] == ["mode", "oracle", "stream"]
    assert "answers of at most 14 tokens" in lines[-1]
    assert "auto, ms/token" not in out
    assert "> [direct, oracle] Name three primary colours." in err and "⟨d:" in err


def test_the_command_draws_what_the_device_did(command, verifier, tmp_path):
    options = ["--profiles", "direct", "--modes", "device,stream", "--limit", "1", "--timeline", str(tmp_path / "out")]
    assert command("--server", verifier.endpoint.url, *options)[0] == 0
    events = json.loads((tmp_path / "out").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"draft", "send", "wait", "receive"}
    answered = [event["name"] for event in events if event["name"].startswith("answered")]
    assert answered == ["answered over direct, device", "answered over direct, stream"]


def test_a_verifier_that_dies_leaves_what_was_measured(command, tiny, monkeypatch):
    target, drafter, *_ = tiny
    opened, add = [], Answer.add
    open_verifier = network_module.open_verifier

    @contextlib.contextmanager
    def remembered(*args, **options):
        with open_verifier(*args, **options) as verifier:
            opened.append(verifier)
            yield verifier

    answers: list[Answer] = []

    def kill_in_the_fourth(self, *burst) -> None:
        add(self, *burst)
        if len(self.bursts) == 2:
            answers.append(self)
            if len(answers) == 4:  # two of them warm up
                os.kill(opened[0].pid, signal.SIGKILL)

    monkeypatch.setattr(network_module, "open_verifier", remembered)
    monkeypatch.setattr(Answer, "add", kill_in_the_fourth)
    options = ["--modes", "per-call,stream", "--profiles", "lan", "--model", str(target), "--drafter", str(drafter)]
    status, out, err = command("--json", *options)
    found = json.loads(out)
    assert (status, found["partial"]) == (1, True)
    assert "does not answer any more" in found["problem"] and found["problem"] in err
    assert [found["profiles"]["lan"][mode]["answers"] for mode in ("per-call", "stream")] == [1, 0]
    assert found["profiles"]["lan"]["stream"]["ms_per_token"]["mean"] is None
    assert "stream" in Network().tables(found)[0].text()
    Network().plot(found, Figure())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--profiles", "5g,hyperspace"], "hyperspace"),
        (["--profiles", "5g,hyperspace"], "tunnel"),
        (
            ["--modes", "stream,telepathy"],
            "'telepathy' in --modes; choose from stream, per-call, device, server, auto, oracle",
        ),
        (["--modes", ""], "unknown mode ''"),
        (["--questions", "no-such-file"], "no-such-file: No such file"),
        (["--draft-length", "0"], "--draft-length"),
        (["--answer-timeout", "0"], "--answer-timeout"),
        (["--server", "wss://verifier.example", "--profiles", "direct,lte"], "--profiles direct"),
        (["--server", "ws://127.0.0.1:9", "--profiles", "lte"], "127.0.0.1:9"),
        (["--server", "ws://127.0.0.1:9", "--dtype", "bfloat16"], "--dtype belong to a verifier that is started here"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(command, argv, said):
    status, out, err = command(*argv)
    assert (status, out) == (2, "")
    assert said in err and err.startswith("moa-bench: error: ") and err.count("\n") == 1


def test_a_broken_line_of_the_questions_is_named(command, questions):
    with questions.open("a") as file:
        file.write("{\n")
    status, _, err = command()
    assert status == 2 and "line 3 of" in err


def test_another_drafter_than_the_bundles_is_refused_before_measuring(command, tiny, tmp_path):
    from moa_server.engine.transformers import TransformersEngine
    from support.tiny import make_tiny_drafter

    other = TransformersEngine.load(str(tiny[0]), make_tiny_drafter(tiny[0], tmp_path / "other", seed=9))
    with serving(other, Settings(token="secret")) as running:
        status, out, err = command("--server", running.url, "--profiles", "lan", "--modes", "stream,device")
    assert (status, out) == (2, "")
    assert other.fingerprints.drafter in err
