"""The network benchmark: figures by hand, modes against plain decoding, links that are cut, a verifier that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from functools import partial

import numpy as np
import pytest
from matplotlib.figure import Figure

from moa_bench import network as network_module
from moa_bench import peer as peer_module
from moa_bench import serving as serving_module
from moa_bench.cli import main
from moa_bench.link import LinkProfile, get_profile, with_round_trip
from moa_bench.network import Network, Results, compare, figures_of, measure_answers
from moa_bench.questions import prompts_of, read_questions
from moa_bench.serving import MODES, Answer, AnswerSettings, CutAnswer, CutObserver, CutSettings, Outcome, Turn, ask
from moa_bench.verifier import Verifier, VerifierGoneError
from moa_runtime import optional_deps
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.events import TokenOrigin
from moa_runtime.session.events import Origin, Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint, Timing
from moa_server.engine.torch_engine import load_torch_engine
from moa_server.settings import Settings
from support.bench import fake_peer
from support.bench.commands import Run, refusal
from support.refusals import refused
from support.said import is_progress
from support.server.running import after_steps, serving
from support.tiny import make_tiny_drafter

DRAFT, TOKENS = 4, 14
# A cut of two seconds is noticed within it; a round trip of the link beside other work is not taken for a cut.
QUICK = Timing(ping_interval=0.2, ping_timeout=1.0, first_backoff=0.05, longest_backoff=0.2)
DEAD = Verifier(Endpoint("ws://127.0.0.1:9"))  # the port of the discard protocol: nothing listens there

# -- figures ---------------------------------------------------------------------------------------


def outcome(sent: float, *bursts: tuple[float, int], in_rounds: bool = True, identical: bool = True) -> Outcome:
    answer = Answer(sent)
    for at, count in bursts:
        answer.add(at, [5] * count, [Origin.DRAFTED] * count)
    reference = answer.tokens if identical else [5, 6]
    return Outcome(answer, reference, passes=3, bytes_up=100, bytes_down=50, in_rounds=in_rounds)


def test_figures_worked_out_by_hand():
    answers = [outcome(1.0, (1.5, 1), (2.1, 3), (2.2, 1)), outcome(3.0, (3.1, 1), (3.5, 1)), outcome(5.0, (5.3, 1))]
    assert figures_of(answers) == {
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
        "agreed": 1.0,
    }
    other = figures_of([*answers, outcome(0.0, (1.0, 1), (2.0, 1), in_rounds=False, identical=False)])
    assert (other["identical"], other["agreed"], other["tokens_per_round"]) == (False, 0.9, 1.6667)


def test_modes_are_compared_with_the_best_of_their_rivals_question_by_question():
    seconds = {"stream": [0.2, 0.4, None], "auto": [0.1, 0.2, 0.1], "server": [0.11, 0.19, 0.1], "oracle": [0.0] * 3}
    answers = {mode: [(each, 0.5) for each in found] for mode, found in seconds.items()}
    answers |= {"llamacpp-same": [(0.1, 1.0)] * 2, "llamacpp-q4_0": [(0.05, 0.25)] * 2}
    peers = ["llamacpp-same", "llamacpp-q4_0"]
    assert compare(answers) == [
        expected("auto", ["stream"], "stream", (0.5, 0.5, 0.5), 1.0),
        expected("auto", ["stream", "server"], "server", (1.0, 0.9091, 1.0526), 1.0),
        expected("stream", peers[:1], peers[0], (3.0, 2.0, 4.0), 0.5),
        expected("auto", peers, peers[1], (3.0, 2.0, 4.0), 2.0),
    ]
    two = [(0.1, 0.1)] * 2
    for fewer in ({"stream": two}, {"auto": two, "oracle": two}, {"auto": two[:1], "stream": two}):
        assert compare(fewer) == []


def expected(mode: str, rivals: list[str], best: str, ratios: tuple[float, float, float], first: float) -> dict:
    figures = dict(zip(("ratio", "low", "high"), ratios, strict=True))
    return {"mode": mode, "rivals": rivals, "best": best, **figures, "first_token": first}


# -- a link that is cut, seen by hand --------------------------------------------------------------

OWN = [10, 11, 12, 13, 14, 15]


class FakeLink:
    def __init__(self) -> None:
        self.done: list[str] = []

    def cut(self) -> None:
        self.done.append("cut")

    def restore(self) -> None:
        self.done.append("restore")


def screen(confirmed: list[int], offline: tuple[int, ...] = ()) -> list[TokenOrigin]:
    return [
        *(TokenOrigin(token, Origin.CORRECTED, True) for token in confirmed),
        *(TokenOrigin(token, Origin.OFFLINE, False) for token in offline),
    ]


@pytest.mark.parametrize(
    ("greeted", "offline", "kept", "times"),
    [(True, (12, 99), 1, (0.25, 0.5, 1.75)), (False, (), 0, (None, 0.75, 2.0))],  # or the connection survived
)
def test_an_answer_whose_link_goes_at_its_second_token(greeted, offline, kept, times):
    link = FakeLink()
    observer = CutObserver(link, CutSettings(after=2, seconds=0.01))

    async def live() -> CutAnswer | None:
        for tokens in (screen(OWN[:1]), screen(OWN[:2])):
            observer.see(tokens)
        await asyncio.sleep(0)
        observer.see(screen(OWN[:2], offline))
        while link.done != ["cut", "restore"]:
            await asyncio.sleep(0.005)
        back = 1e6 * observer._returned_at
        for tokens in (screen(OWN[:4]), screen(OWN)):
            observer.see(tokens)
        observer._token_at, observer._last_at = observer._returned_at + 0.75, observer._returned_at + 2.0
        sent = [{"name": "process_name"}, *({"name": "send", "ts": back + 1e6 * at} for at in (-1.0, 0.25, 0.5))]
        return observer.answer(OWN, [*sent, *([{"name": "online", "ts": back + 3e5}] if greeted else [])])

    seen = asyncio.run(live())
    observer.close()
    assert seen is not None and (seen.confirmed, seen.tentative, seen.kept) == (2, len(offline), kept)
    assert (seen.hello_s, seen.token_s, seen.whole_s) == pytest.approx(times, abs=1e-3)
    assert (seen.tokens, seen.identical) == (6, True)


def test_an_answer_that_is_whole_before_the_link_returns_is_none():
    async def live() -> CutAnswer | None:
        observer = CutObserver(FakeLink(), CutSettings(after=2, seconds=60))
        observer.see(screen(OWN))
        observer.close()
        return observer.answer(OWN, [])

    assert asyncio.run(live()) is None


def test_the_table_of_cuts_has_means():
    every = [CutAnswer(41, 12, 7, 0.07, 0.05, 0.5, 256, True), CutAnswer(43, 10, 8, None, 0.15, 1.5, 256, False)]
    figures, none = serving_module.cut_figures(every), serving_module.cut_figures([])
    assert (figures["confirmed"], figures["hello_ms"], figures["whole_ms"]) == (42, 70, 1000)
    assert (none["answers"], none["whole_ms"], none["identical"]) == (0, None, None)
    settings = {"cut": {"after": 40, "seconds": 20.0}, "max_new_tokens": 256, "draft_length": "auto"}
    settings["sampling"] = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    result = {"too_short": 17, "skipped": [], "seconds": 60.0, "settings": settings}
    (table,) = Network().tables({**result, "cuts": {"lte": {"auto": figures}}})
    assert table.rows == [["lte", 2, 42.0, 11.0, 7.5, 70.0, 100.0, 1000.0, False]]
    assert "20 s" in table.title and "17" in table.note
    figure = Figure()
    Network().plot({**result, "cuts": {"lte": {"auto": figures}}}, figure)
    assert [round(bar.get_width()) for bar in figure.axes[0].patches] == [70, 0, 500, 1500]
    (table,) = Network().tables({**result, "cuts": {"lte": {"auto": figures, "device": none}}})
    assert [row[0] for row in table.rows] == ["lte, auto", "lte, device"]


# -- a tiny target over real sockets ---------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier(tiny):
    *_, engine = tiny
    with serving(engine, Settings(token="secret")) as running:
        # Drafted tokens cost nothing, whatever this machine takes, so drafts are verified whole.
        running.parts.worker.cost.curve = lambda tokens, *_: np.ones(np.shape(tokens))
        yield Verifier(Endpoint(running.url, running.token))


@pytest.fixture
def slow(tiny, monkeypatch):
    """Slow enough for a link to be lost in the middle of an answer."""
    engine = tiny[-1]
    step = engine.step

    async def later(requests):
        await asyncio.sleep(0.03)
        return await step(requests)

    monkeypatch.setattr(engine, "step", later)


@pytest.fixture(scope="module")
def make(tiny):
    """Makes modes with the tiny drafter: names and sampling -> modes."""
    _, _, folder, backend, _ = tiny

    def made(names, sampling=Sampling()):  # noqa: B008 (frozen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving_module, "backend_for", lambda *_, **__: backend)
            return serving_module.make_modes(names, Bundle.open(folder), AnswerSettings(DRAFT, TOKENS, sampling))

    return made


@pytest.fixture
def prompts(tiny, questions):
    found, skipped = prompts_of(read_questions(questions), ChatTokenizer.from_bundle(Bundle.open(tiny[2])), 512)
    assert not skipped
    return found


@pytest.fixture
def turn(prompts, verifier) -> Turn:
    return turn_of(prompts[0], verifier, TOKENS)


def turn_of(prompt, verifier: Verifier, length: int) -> Turn:
    return Turn(prompt.text, prompt.tokens, verifier.decode(prompt.tokens, length))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 7)])
def test_every_mode_gives_the_targets_own_answers(verifier, make, prompts, sampling):
    links, modes = {"near": with_round_trip(4), "direct": None}, make(MODES, sampling)
    results, order = Results(links, list(modes)), []
    settings = AnswerSettings(DRAFT, TOKENS, sampling)
    interval = sys.getswitchinterval()
    ask_one = partial(ask, dict.fromkeys(modes, verifier), modes, settings)
    for link, mode, turn, asked in measure_answers(prompts, verifier, links, ask_one, settings, results):
        order.append((turn.text[:4], link, mode))
        answer = asked.answer
        assert answer.tokens == list(turn.reference)
        assert len(answer.origins) == len(answer.tokens) == sum(burst.tokens for burst in answer.bursts)
    assert sys.getswitchinterval() == interval
    turns = (("Name", MODES), ("What", (*MODES[1:], MODES[0])))
    assert order == [(text, link, mode) for text, own in turns for link in ("near", "direct") for mode in own]
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
        # The same messages, with and without their framing; memory rows come as far as the answer's end lets them.
        for way in ("bytes_up_per_token", "bytes_down_per_token"):
            assert figures["near"][mode][way] > figures["direct"][mode][way] > 0


def test_the_oracle_is_right_to_the_end_of_each_draft(verifier, make, turn):
    asked = ask({"oracle": verifier}, make(["oracle"]), AnswerSettings(), None, "oracle", turn)
    sizes, (drafts, rest) = [burst.tokens for burst in asked.answer.bursts], divmod(len(turn.reference) - 1, DRAFT + 1)
    assert sizes == [1, *[DRAFT + 1] * drafts, *([rest] if rest else [])] and asked.passes == len(sizes)


def test_an_outage_is_survived_in_every_mode(verifier, make, turn):
    profile = LinkProfile("gap", None, None, 10, outages=((0.04, 0.2),))
    for mode in MODES:
        assert ask({mode: verifier}, make([mode]), AnswerSettings(), profile, mode, turn).identical


def test_answers_lose_their_link_and_are_whole(tiny, slow, verifier, prompts):
    bundle, link, settings = Bundle.open(tiny[2]), get_profile("lte"), AnswerSettings(max_new_tokens=80)
    cut = partial(serving_module.ask_and_cut, verifier, bundle, settings)
    turns = [turn_of(prompt, verifier, 80) for prompt in prompts]
    answer = next(filter(None, (cut(CutSettings(3, 2.0), link, "auto", turn, QUICK) for turn in turns)))
    assert answer.identical and 3 <= answer.confirmed < answer.tokens
    assert 0 <= answer.kept <= answer.tentative
    assert answer.hello_s is not None and answer.hello_s > 0 and 0 < answer.token_s <= answer.whole_s
    assert cut(CutSettings(9, 1), link, "auto", turn_of(prompts[0], verifier, 9), QUICK) is None


# -- failures --------------------------------------------------------------------------------------


async def never() -> None:
    await asyncio.Event().wait()


async def broken() -> None:
    raise MoaError("it broke", code="broken")


def test_an_answer_that_takes_too_long_is_given_up(verifier):
    with refused("timeout"):
        asyncio.run(serving_module.watched(never(), verifier, 0.05))


@pytest.mark.parametrize("work", [never, broken])
def test_a_verifier_that_is_gone_ends_the_waiting_and_is_the_better_explanation(verifier, work):
    with refused("verifier_gone", VerifierGoneError):
        asyncio.run(serving_module.watched(work(), DEAD, 60))
    with refused("broken"):
        asyncio.run(serving_module.watched(broken(), verifier, 60))


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def command(tiny, questions, monkeypatch, capsys):
    """Runs ``moa-bench network`` on the tiny bundle."""
    _, _, bundle, backend, _ = tiny
    monkeypatch.setattr(serving_module, "backend_for", lambda *_, **__: backend)
    monkeypatch.setenv("MOA_TOKEN", "secret")

    def run(*more: str) -> Run:
        where = ["--questions", str(questions), "--bundle", str(bundle), "--max-new-tokens", str(TOKENS)]
        return main(["network", *where, *more]), *capsys.readouterr()

    return run


def test_the_command_prints_one_object(command, verifier):
    status, out, err = command("--server", verifier.endpoint.url, "--profiles", "lan,direct", "--json")
    assert status == 0 and is_progress(err)
    found = json.loads(out)
    assert [list(modes) for modes in found["profiles"].values()] == [list(MODES)] * 2
    assert list(found["profiles"]) == list(found["compared"]) == ["lan", "direct"]
    assert all(mode["identical"] for modes in found["profiles"].values() for mode in modes.values())
    assert (found["benchmark"], found["partial"], found["skipped"]) == ("network", False, [])
    assert found["settings"]["own_verifier"] is False
    for by_stream, by_best in found["compared"].values():
        assert by_best["ratio"] >= by_stream["ratio"] > 0
    *_, ratios = Network().tables(found)
    assert [row[:3] for row in ratios.rows[::2]] == [[profile, "auto", "stream"] for profile in ("lan", "direct")]
    figure = Figure()
    Network().plot(found, figure)
    latency, first = figure.axes
    assert len(latency.patches) == len(first.patches) == 2 * len(MODES)
    assert [text.get_text() for text in latency.get_legend().get_texts()] == list(MODES)


def test_the_command_prints_tables_and_answers_and_draws_the_devices_work(command, verifier, tmp_path):
    where = ["--server", verifier.endpoint.url, "--profiles", "direct", "--limit", "1", "--show"]
    status, out, err = command(*where, "--modes", "device,stream", "--timeline", str(tmp_path / "out"))
    lines = out.splitlines()
    assert status == 0 and lines[0] == "direct" and [line.split()[0] for line in lines[1:4]] == ["mode", *MODES[2::-2]]
    assert "14" in lines[-1] and "> [direct, device] Name three primary colours." in err and "⟨t:" in err
    events = json.loads((tmp_path / "out").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"draft", "send", "wait", "receive"}
    answered = [event["name"] for event in events if event["name"].startswith("answered")]
    assert answered == ["answered over direct, device", "answered over direct, stream"]


def test_the_command_cuts_links(command, tiny, tmp_path):
    target, drafter, *_ = tiny
    more = ["--cut-after", "2", "--cut-seconds", "1", "--max-new-tokens", "120", "--limit", "1", "--json"]
    where = ["--profiles", "lte", "--model", str(target), "--drafter", str(drafter)]
    status, out, err = command(*where, *more, "--plot", str(tmp_path / "plot.png"))
    assert status == 0 and is_progress(after_steps(err)), err
    found = json.loads(out)
    assert (found["benchmark"], found["partial"], found["profiles"], found["compared"]) == ("network", False, {}, {})
    assert found["settings"]["cut"] == {"after": 2, "seconds": 1.0}
    figures = found["cuts"]["lte"]["auto"]
    assert figures["answers"] == len(figures["every"]) == 1 - found["too_short"]
    assert figures["identical"] in (True, None) and (tmp_path / "plot.png").stat().st_size > 1000


def test_a_peer_is_asked_through_the_same_links(command, verifier, monkeypatch):
    monkeypatch.setitem(optional_deps.MODULES, "llamacpp", ())
    monkeypatch.setattr(network_module, "open_verifier", lambda *args, **options: contextlib.nullcontext(verifier))
    monkeypatch.setattr(peer_module, "load_llamacpp", fake_peer.load)
    names = ["stream", "llamacpp-same", "llamacpp-q4_0-all"]
    more = ["--profiles", "lan,direct", "--modes", ",".join(names), "--model", "model.gguf"]
    status, out, _ = command(*more, "--json")
    found = json.loads(out)
    assert status == 0 and all(list(modes) == names for modes in found["profiles"].values())
    for modes in found["profiles"].values():
        for figures in modes.values():
            assert (figures["answers"], figures["tokens"], figures["tokens_per_round"]) == (2, 2 * TOKENS, None)
        for name in names[1:]:  # two tokens with a pass
            assert (modes[name]["identical"], modes[name]["passes_per_token"]) == (False, 0.5)
        same, stream = (modes[name]["bytes_down_per_token"] for name in names[1::-1])
        assert same == pytest.approx(stream, rel=0.2)  # the same messages, fewer frames
    assert [(row[1], row[3]) for row in Network().tables(found)[-1].rows] == [("stream", "llamacpp-same")] * 2
    assert "q4_0" in Network().tables(found)[-1].title


@pytest.mark.parametrize(("load", "code"), [(fake_peer.refuse, "not_readable"), (fake_peer.die, "client_gone")])
def test_why_a_peer_does_not_start_is_known(load, code):
    with refused(code), peer_module.running_peer(load, None):
        pass


def test_a_peer_that_cannot_run_is_refused_before_measuring(command, tiny, monkeypatch):
    assert "--server" in refusal(command("--server", DEAD.endpoint.url, "--modes", "stream,llamacpp"), "contradiction")
    more = ["--modes", "llamacpp", "--model", str(tiny[0])]
    monkeypatch.setitem(optional_deps.MODULES, "llamacpp", ("no_such_package",))
    assert "moa-edge[llamacpp]" in refusal(command(*more), "missing_package")
    monkeypatch.setitem(optional_deps.MODULES, "llamacpp", ())
    assert str(tiny[0]) in refusal(command(*more), "no_gguf")


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
    assert (status, found["partial"]) == (1, True) and found["problem"] in err
    assert [found["profiles"]["lan"][mode]["answers"] for mode in ("per-call", "stream")] == [1, 0]
    assert found["profiles"]["lan"]["stream"]["ms_per_token"]["mean"] is None
    assert "stream" in Network().tables(found)[0].text()
    Network().plot(found, Figure())


def test_another_drafter_than_the_bundles_is_refused_before_measuring(command, tiny, tmp_path):
    other = load_torch_engine(str(tiny[0]), make_tiny_drafter(tiny[0], tmp_path / "other", seed=9))
    with serving(other, Settings(token="secret")) as running:
        said = refusal(command("--server", running.url, "--profiles", "lan", "--modes", "stream,device"))
    assert other.fingerprints.drafter in said
