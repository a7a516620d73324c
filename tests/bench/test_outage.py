"""The outage benchmark: its figures by hand, and answers that a link was taken from over real sockets."""

from __future__ import annotations

import asyncio
import json

import pytest
from matplotlib.figure import Figure

from moa_bench.cli import main
from moa_bench.link.profiles import get_profile
from moa_bench.outage import command as outage_command
from moa_bench.outage import present
from moa_bench.outage.measure import Outage, OutageSettings, Results, _Onlooker, measure
from moa_bench.prompts import prompts_of
from moa_bench.questions import read_questions
from moa_bench.verifier import Verifier
from moa_runtime.bundle import Bundle
from moa_runtime.events import TokenOrigin
from moa_runtime.session.events import Origin
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.transport import Endpoint, Timing
from moa_server.settings import Settings
from server.running import serving

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


def seen(*, greeted: bool, offline: tuple[int, ...] = (12, 99)) -> tuple[FakeLink, Outage | None]:
    """An answer of :data:`OWN` whose link goes at its second token."""
    link = FakeLink()
    onlooker = _Onlooker(link, OutageSettings(after=2, outage_s=0.01))

    async def live() -> Outage | None:
        onlooker.see(screen(OWN[:1]))
        onlooker.see(screen(OWN[:2]))
        await asyncio.sleep(0)
        onlooker.see(screen(OWN[:2], offline))
        while link.done != ["cut", "restore"]:
            await asyncio.sleep(0.005)
        back = 1e6 * onlooker._returned_at
        onlooker.see(screen(OWN[:4]))
        onlooker.see(screen(OWN))
        onlooker._token_at, onlooker._last_at = onlooker._returned_at + 0.75, onlooker._returned_at + 2.0
        sent = [{"name": "process_name"}, *({"name": "send", "ts": back + 1e6 * at} for at in (-1.0, 0.25, 0.5))]
        return onlooker.outage(OWN, [*sent, *([{"name": "online", "ts": back + 3e5}] if greeted else [])])

    outage = asyncio.run(live())
    onlooker.close()
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
    async def live() -> Outage | None:
        onlooker = _Onlooker(FakeLink(), OutageSettings(after=2, outage_s=60))
        onlooker.see(screen(OWN))
        onlooker.close()
        return onlooker.outage(OWN, [])

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


def test_answers_lose_their_link_and_are_whole(tiny, verifier, questions):
    bundle = Bundle.open(tiny[2])
    prompts, _ = prompts_of(read_questions(questions), ChatTokenizer.from_bundle(bundle), 512)
    results, counted = Results(), []
    settings = OutageSettings(after=3, outage_s=1.5, max_new_tokens=80)
    measure(bundle, verifier, prompts, get_profile("3g"), settings, results, lambda: counted.append(1), QUICK)
    assert len(counted) == 2 == len(results.outages) + len(results.skipped)
    assert results.outages and results.seconds > 1.5
    for outage in results.outages:
        assert outage.identical and 3 <= outage.confirmed < outage.tokens
        assert 0 <= outage.kept <= outage.tentative
        assert outage.hello_s is not None and outage.hello_s > 0 and 0 < outage.token_s <= outage.whole_s


def test_a_short_answer_is_skipped(tiny, verifier, questions):
    bundle = Bundle.open(tiny[2])
    prompts, _ = prompts_of(read_questions(questions), ChatTokenizer.from_bundle(bundle), 512)
    results = Results()
    measure(bundle, verifier, prompts[:1], get_profile("lan"), OutageSettings(9, 1, 9), results)
    assert results.skipped == [prompts[0].text] and not results.outages


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def command(tiny, questions, capsys):
    """Runs ``moa-bench outage`` on the tiny bundle: more arguments -> exit status, stdout, stderr."""
    target, drafter, bundle, *_ = tiny

    def run(*more: str) -> tuple[int, str, str]:
        where = ["--questions", str(questions), "--bundle", str(bundle), "--limit", "1"]
        status = main(["outage", *where, "--model", str(target), "--drafter", str(drafter), *more])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_one_object(command, tmp_path):
    more = ["--after", "2", "--outage", "1", "--max-new-tokens", "120", "--json", "--plot", str(tmp_path / "plot.png")]
    status, out, err = command("--profile", "lte", *more)
    assert status == 0 and "outage: 0 of 1 answers" in err
    found = json.loads(out)
    assert (found["benchmark"], found["partial"], found["identical"]) == ("outage", False, True)
    assert found["settings"]["outage_s"] == 1 and found["settings"]["profile"] == "lte"
    assert found["answers"] == len(found["every"]) == 1 - len(found["skipped"])
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_the_table_has_means():
    outage = Outage(41, 12, 7, 0.07, 0.05, 0.5, 256, True)
    figures = outage_command._figures([outage, Outage(43, 10, 8, None, 0.15, 1.5, 256, False)])
    assert (figures["confirmed"], figures["hello_ms"], figures["whole_ms"]) == (42, 70, 1000)
    none = outage_command._figures([])
    assert none["answers"] == 0 and none["whole_ms"] is None
    settings = {"outage_s": 20.0, "profile": "lte", "after": 40, "max_new_tokens": 256}
    result = {**figures, "skipped": [{}], "settings": settings}
    (table,) = present.tables(result)
    assert table.rows == [[2, 42.0, 11.0, 7.5, 70.0, 100.0, 1000.0, "NO"]]
    assert "20 s without lte" in table.text() and "skipped: 1" in table.text()
    figure = Figure()
    present.draw(result, figure)
    assert [round(bar.get_width()) for bar in figure.axes[0].patches] == [70, 0, 500, 1500]
    assert "means over answers" in present.tables({**none, "skipped": [], "settings": settings})[0].text()
    assert present.headlines(result) == [("ms from the Hello to the whole answer", 1000.0)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--after", "0"], "--after must be at least 1, not 0"),
        (["--after", "40", "--max-new-tokens", "40"], "--max-new-tokens must be at least 41, not 40"),
        (["--outage", "0.5"], "--outage must be at least 1, not 0.5"),
        (["--outage", "nan"], "--outage must be at least 1, not nan"),
        (["--profile", "hyperspace"], "hyperspace"),
        (["--server", "ws://127.0.0.1:9"], "--model, --drafter and --dtype belong to a verifier that is started here"),
    ],
)
def test_what_cannot_be_measured_is_said(command, more, said):
    status, out, err = command(*more)
    assert status == 2 and not out and said in err and "Traceback" not in err
