"""``moa-bench network --cut-after``: its figures by hand, and answers over real sockets whose link is cut."""

from __future__ import annotations

import asyncio
import json

import pytest
from matplotlib.figure import Figure

from moa_bench.cli import main
from moa_bench.link.profiles import get_profile
from moa_bench.network import Network
from moa_bench.questions import prompts_of, read_questions
from moa_bench.serving import AnswerSettings, CutAnswer, CutObserver, CutSettings, Turn, ask_and_cut, figures_of
from moa_bench.verifier import Verifier
from moa_runtime.bundle import Bundle
from moa_runtime.events import TokenOrigin
from moa_runtime.session.events import Origin
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint, Timing
from moa_server.settings import Settings
from support.server.running import serving

QUICK = Timing(ping_interval=0.2, ping_timeout=0.2, first_backoff=0.05, longest_backoff=0.2)
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


def seen(*, greeted: bool, offline: tuple[int, ...] = (12, 99)) -> tuple[FakeLink, CutAnswer | None]:
    """An answer of :data:`OWN` whose link goes at its second token."""
    link = FakeLink()
    observer = CutObserver(link, CutSettings(after=2, seconds=0.01))

    async def live() -> CutAnswer | None:
        observer.see(screen(OWN[:1]))
        observer.see(screen(OWN[:2]))
        await asyncio.sleep(0)
        observer.see(screen(OWN[:2], offline))
        while link.done != ["cut", "restore"]:
            await asyncio.sleep(0.005)
        back = 1e6 * observer._returned_at
        observer.see(screen(OWN[:4]))
        observer.see(screen(OWN))
        observer._token_at, observer._last_at = observer._returned_at + 0.75, observer._returned_at + 2.0
        sent = [{"name": "process_name"}, *({"name": "send", "ts": back + 1e6 * at} for at in (-1.0, 0.25, 0.5))]
        return observer.answer(OWN, [*sent, *([{"name": "online", "ts": back + 3e5}] if greeted else [])])

    outage = asyncio.run(live())
    observer.close()
    return link, outage


def test_figures_worked_out_by_hand():
    link, outage = seen(greeted=True)
    assert link.done == ["cut", "restore"] and outage is not None
    assert (outage.confirmed, outage.tentative, outage.kept) == (2, 2, 1)
    assert (outage.hello_s, outage.token_s, outage.whole_s) == pytest.approx((0.25, 0.5, 1.75), abs=1e-3)
    assert (outage.tokens, outage.identical) == (6, True)


def test_a_connection_that_lives_on_needs_no_hello():
    _, outage = seen(greeted=False, offline=())
    assert outage is not None and outage.hello_s is None and outage.kept == 0
    assert (outage.token_s, outage.whole_s) == pytest.approx((0.75, 2.0), abs=1e-3)


def test_an_answer_that_is_whole_before_is_none():
    async def live() -> CutAnswer | None:
        observer = CutObserver(FakeLink(), CutSettings(after=2, seconds=60))
        observer.see(screen(OWN))
        observer.close()
        return observer.answer(OWN, [])

    assert asyncio.run(live()) is None


# -- a tiny target over real sockets ---------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier(tiny):
    """Slow enough for a link to be lost in the middle of an answer."""
    *_, engine = tiny
    step = engine.step

    async def slow(requests):
        await asyncio.sleep(0.03)
        return await step(requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", slow)
        with serving(engine, Settings(token="secret")) as running:
            yield Verifier(Endpoint(running.url, running.token))


def turns(tiny, verifier, questions, length: int) -> list[Turn]:
    bundle = Bundle.open(tiny[2])
    prompts, _ = prompts_of(read_questions(questions), ChatTokenizer.from_bundle(bundle), 512)
    return [Turn(prompt.text, prompt.tokens, verifier.decode(prompt.tokens, length)) for prompt in prompts]


def cut(tiny, verifier, turn: Turn, after: int, seconds: float, length: int) -> CutAnswer | None:
    settings = AnswerSettings(max_new_tokens=length)
    bundle, link = Bundle.open(tiny[2]), get_profile("3g")
    return ask_and_cut(bundle, verifier, link, "auto", turn, CutSettings(after, seconds), settings, QUICK)


def test_answers_lose_their_link_and_are_whole(tiny, verifier, questions):
    found = [cut(tiny, verifier, turn, 3, 1.5, 80) for turn in turns(tiny, verifier, questions, 80)]
    answers = [answer for answer in found if answer is not None]
    assert answers and len(found) == 2
    for answer in answers:
        assert answer.identical and 3 <= answer.confirmed < answer.tokens
        assert 0 <= answer.kept <= answer.tentative
        assert answer.hello_s is not None and answer.hello_s > 0 and 0 < answer.token_s <= answer.whole_s


def test_an_answer_that_ends_before_the_cut_is_none(tiny, verifier, questions):
    turn = turns(tiny, verifier, questions, 9)[0]
    assert cut(tiny, verifier, turn, 9, 1, 9) is None


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def command(tiny, questions, capsys):
    """Runs ``moa-bench network`` on the tiny bundle: more arguments -> exit status, stdout, stderr."""
    target, drafter, bundle, *_ = tiny

    def run(*more: str) -> tuple[int, str, str]:
        where = ["--questions", str(questions), "--bundle", str(bundle), "--limit", "1"]
        status = main(["network", *where, "--model", str(target), "--drafter", str(drafter), *more])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_one_object(command, tmp_path):
    more = ["--cut-after", "2", "--cut-seconds", "1", "--max-new-tokens", "120", "--json"]
    status, out, err = command("--profiles", "lte", *more, "--plot", str(tmp_path / "plot.png"))
    assert status == 0 and "network: 0 of 1 answers" in err
    found = json.loads(out)
    assert (found["benchmark"], found["partial"]) == ("network", False)
    assert found["settings"]["cut"] == {"after": 2, "seconds": 1.0}
    assert (found["profiles"], found["auto"]) == ({}, {})
    figures = found["cuts"]["lte"]["auto"]
    assert figures["answers"] == len(figures["every"]) == 1 - found["too_short"]
    assert figures["identical"] in (True, None)
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_the_table_has_means():
    every = [CutAnswer(41, 12, 7, 0.07, 0.05, 0.5, 256, True), CutAnswer(43, 10, 8, None, 0.15, 1.5, 256, False)]
    figures = figures_of(every)
    assert (figures["confirmed"], figures["hello_ms"], figures["whole_ms"]) == (42, 70, 1000)
    none = figures_of([])
    assert (none["answers"], none["whole_ms"], none["identical"]) == (0, None, None)
    sampling = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    settings = {"cut": {"after": 40, "seconds": 20.0}, "max_new_tokens": 256, "draft_length": "auto"}
    result = {
        "cuts": {"lte": {"auto": figures}},
        "too_short": 1,
        "skipped": [],
        "seconds": 60.0,
        "settings": {**settings, "sampling": sampling},
    }
    (table,) = Network().tables(result)
    assert table.rows == [["lte", 2, 42.0, 11.0, 7.5, 70.0, 100.0, 1000.0, False]]
    assert "20 s without the link" in table.text() and "ended before the cut or during it: 1" in table.text()
    figure = Figure()
    Network().plot(result, figure)
    assert [round(bar.get_width()) for bar in figure.axes[0].patches] == [70, 0, 500, 1500]
    result["cuts"]["lte"]["device"] = none
    (table,) = Network().tables(result)
    assert [row[0] for row in table.rows] == ["lte, auto", "lte, device"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--cut-after", "0"], "--cut-after must be at least 1, not 0"),
        (["--cut-after", "40", "--max-new-tokens", "40"], "--max-new-tokens must be at least 41, not 40"),
        (["--cut-after", "2", "--cut-seconds", "0.5"], "--cut-seconds must be at least 1, not 0.5"),
        (["--cut-after", "2", "--cut-seconds", "nan"], "--cut-seconds must be at least 1, not nan"),
        (["--cut-after", "2", "--profiles", "hyperspace"], "hyperspace"),
        (["--cut-after", "2", "--profiles", "direct"], "leave direct out of --profiles"),
        (["--cut-after", "2", "--modes", "stream"], "unknown mode 'stream' in --modes; choose from auto"),
        (["--cut-after", "2", "--show"], "--show and --timeline are for answers without a cut"),
        (["--cut-after", "2", "--server", "ws://127.0.0.1:9"], "belong to a verifier that is started here"),
    ],
)
def test_what_cannot_be_measured_is_refused(command, more, said):
    status, out, err = command(*more)
    assert status == 2 and not out and said in err and "Traceback" not in err
