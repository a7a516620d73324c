"""The offline benchmark against figures worked out by hand, and its texts against plain decoding."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from moa_bench import harness
from moa_bench.cli import main
from moa_bench.harness import Conversation, Device, LoopbackVerifier
from moa_bench.offline import (
    WRITERS,
    OfflineSettings,
    Outage,
    Results,
    Text,
    Written,
    distinct_of,
    figures_of,
    try_question,
)
from moa_bench.questions import Question
from moa_runtime import optional_deps as extras
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.errors import MoaError
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.engine.baseline import log_probabilities
from support.bench.commands import Run, refusal
from support.bench.toys import ToyDrafter
from support.said import is_progress
from support.toy_engine import PRINTS, STOP, ToyEngine, plain

PROMPT = [3, 1, 4, 1, 5]


# -- a cut, on the toy target ----------------------------------------------------------------------


def toy_outage(engine: ToyEngine, right: int, answer_tokens: int) -> tuple[Outage, ToyDrafter]:
    """A conversation cut after this number of tokens of its answer to :data:`PROMPT`."""
    drafter, verifier = ToyDrafter(engine, right), LoopbackVerifier(engine)
    # Without drafts each round brings one token.
    conversation = Conversation(verifier, drafter, PRINTS, [STOP], FixedShape(Budget.chain(0, nodes=0)))
    answer = conversation.ask(PROMPT, Sampling())
    while len(answer.tokens) < answer_tokens:
        conversation.next_round()
    return Outage(conversation.cut(), verifier), drafter


def test_texts_are_tried_from_the_same_point_in_any_order():
    engine = ToyEngine(stops=[20])
    outage, drafter = toy_outage(engine, 3, 4)
    own = plain(engine, outage.committed, 100)
    assert own[-1] == STOP  # a verdict that ends the answer must not stand in the way of the next text
    text = outage.write(drafter, 10)
    assert len(text) == 10 and (text[:3], text[3] == own[3]) == (own[:3], False)
    for _ in range(2):
        assert outage.reconnect(own) == len(own) == 12
        assert outage.reconnect(text) == 3
        assert outage.reconnect([]) == 0
        assert outage.write(drafter, 10) == text
    assert outage.committed == PROMPT + plain(engine, PROMPT, 4)
    outage, drafter = toy_outage(engine, 100, 4)
    assert outage.write(drafter, 50) == own  # a writer that ends its turn writes no more


def test_of_a_part_the_target_keeps_what_it_keeps_of_the_whole():
    """What :meth:`Results.add` relies on, by reconnecting with every part of texts right for a random while."""
    rng = random.Random(8)
    for right in (0, 1, 7, 19, 20):
        engine = ToyEngine(stops=[rng.randrange(12, 60)])
        outage, _ = toy_outage(engine, 0, 6)
        own = plain(engine, outage.committed, 20)
        text = own[:right] + [1 + token % 49 for token in own[right:]]
        whole = outage.reconnect(text)
        assert whole == min(right, len(own))
        for length in rng.sample(range(21), 21):
            assert outage.reconnect(text[:length]) == min(whole, length), (right, length)


# -- figures ---------------------------------------------------------------------------------------


def text(tokens: list[int], *log_probabilities: float) -> Text:
    return Text(tokens, np.array(log_probabilities or [-1.0] * len(tokens), np.float32))


def test_the_figures_of_the_docstring():
    outages = [
        (Written(text([1, 2, 3], -1.0, -2.0, -6.0), 2), text([1, 2, 4], -1.0, -2.0, -0.5)),
        (Written(text([5], -3.0), 0), text([6, 7], -0.5, -9.0)),
    ]
    found = figures_of(outages, 3)
    assert (found["written"], found["agreement"], found["kept"], found["share_kept"]) == (2.0, 1.0, 1.0, 0.5)
    # Of the target's second text only as many tokens count as were written.
    assert found["perplexity"] == pytest.approx(math.exp(12 / 4), abs=1e-3)
    assert found["target_perplexity"] == pytest.approx(math.exp(4 / 4), abs=1e-3)
    assert found["perplexity_ratio"] == pytest.approx(math.exp(2), abs=1e-3)
    assert (found["distinct"], found["target_distinct"]) == (None, None)
    none = figures_of([(Written(text([]), 0), text([1, 2]))], 3)
    assert (none["written"], none["agreement"], none["kept"]) == (0.0, 0.0, 0.0)
    assert {none[name] for name in ("share_kept", "perplexity", "target_perplexity", "perplexity_ratio")} == {None}


def test_repetition_is_counted_within_each_text():
    # Five 4-grams, two of them new; one, new in this text; too short for any.
    texts = [text(tokens) for tokens in ([1, 2] * 4, [1, 2, 1, 2], [1, 2, 1])]
    assert distinct_of(texts) == 3 / 6


# -- whole questions -------------------------------------------------------------------------------


def toy_measurement(tiny, engine: ToyEngine, right: int, settings: OfflineSettings, *texts: str, drafter=ToyDrafter):
    """Results and trials of questions to a toy target with the tiny tokenizer."""
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(tiny[2]))
    engine.vocab_size, engine.stop_tokens = 512, (STOP,)
    device = Device(PRINTS, tokenizer, lambda: drafter(engine, right), (STOP,))

    def score(prefix, tokens):
        """Minus 1 for what the target would write, minus 3 for anything else."""
        chosen = [engine.choice([*prefix, *tokens[:i]]) == token for i, token in enumerate(tokens)]
        return np.where(chosen, -1.0, -3.0).astype(np.float32)

    results = Results(settings.lengths, WRITERS[1:])
    for number, text in enumerate(texts, 1):
        outcome = try_question(Question(number, "qa", (text, "not asked")), device, engine, score, settings)
        (results.skipped if isinstance(outcome, str) else results.trials).append(outcome)
    assert engine.sequences_open == 0
    return results, results.trials


def test_a_drafter_with_a_stopping_rule_writes_the_beginning_of_what_it_writes_without(tiny):
    class Stopping(ToyDrafter):
        stopping_rule = StoppingRule(0.0, 1000, 4)

    _, trials = toy_measurement(tiny, ToyEngine(), 5, OfflineSettings(10, (8,)), "Why?", drafter=Stopping)
    (trial,) = trials
    bounded, unbounded = (trial.written[name] for name in ("moa", "moa-unbounded"))
    assert (len(bounded.text.tokens), bounded.kept) == (4, 4)
    assert (len(unbounded.text.tokens), unbounded.kept) == (8, 5)
    assert unbounded.text.tokens[:4] == bounded.text.tokens


def test_questions_that_cannot_be_cut_are_listed(tiny):
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(tiny[2]))
    short, long = (
        len(tokenizer.encode_chat([{"role": "user", "content": content}])) for content in ("Why?", "Why? Why?")
    )
    # The longer question is answered with ten tokens; after ten to the shorter one there is room for seven.
    engine = ToyEngine(stops=[long + 9], max_context=short + 10 + 7)
    results, _ = toy_measurement(tiny, engine, 5, OfflineSettings(10, (8,)), "Why? Why?", "Why?", "Why? " * 30)
    numbers = ("10", "8", str(engine.max_context))
    assert all(number in reason for number, reason in zip(numbers, results.skipped, strict=True))
    assert not results.trials and results.as_dict()["writers"]["moa"]["8"]["agreement"] is None


def test_a_trial_of_a_real_model_against_plain_decoding(tiny):
    """The text up to the cut, the target's own and what is kept do not depend on how they came about."""
    from moa_server.engine.baseline import decode

    *_, bundle, backend, engine = tiny
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    device = Device(
        engine.fingerprints,
        tokenizer,
        lambda: MoaDrafter(backend, max_context=engine.max_context),
        tuple(engine.stop_tokens),
    )
    settings = OfflineSettings(9, (4, 24))

    def score(prefix, tokens):
        return log_probabilities(engine, prefix, tokens)

    trial = try_question(Question(1, "qa", ("Why?",)), device, engine, score, settings)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Why?"}])
    own = [step.token for step in decode(engine, prompt, Sampling(), 9 + 24)]
    assert trial.answer.tokens == own[:9]
    assert trial.target.tokens == own[9:]
    moa = trial.written["moa"]
    assert len(moa.text.tokens) == 24
    np.testing.assert_allclose(moa.text.log_probabilities, score([*prompt, *own[:9]], moa.text.tokens))
    agreed = [a == b for a, b in zip(moa.text.tokens, trial.target.tokens, strict=True)]
    assert moa.kept == [*agreed, False].index(False)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def command(tiny, questions, monkeypatch, capsys):
    """Runs ``moa-bench offline`` on the tiny model."""
    target_folder, drafter_folder, bundle, backend, _ = tiny
    monkeypatch.setattr(harness, "backend_for", lambda *_, **__: backend)

    def run(*more: str) -> Run:
        where = ["--questions", str(questions), "--bundle", str(bundle), "--model", str(target_folder)]
        few = ["--after", "6", "--lengths", "16,4"]
        status = main(["offline", *where, "--drafter", str(drafter_folder), *few, *more])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_one_object_and_plots_it(command, tmp_path):
    status, out, err = command("--json", "--plot", str(tmp_path / "offline.svg"))
    assert status == 0 and is_progress(err)
    found = json.loads(out)
    assert (found["benchmark"], found["questions"], found["skipped"]) == ("offline", 2, [])
    where = {"questions": "questions.jsonl", "limit": None, "target": "target"}
    assert found["settings"] == where | {"ngrams": True, "after": 6, "lengths": [4, 16]}
    assert list(found["writers"]) == ["moa", "moa-unbounded", "ngram", "nothing"]
    assert [list(figures) for figures in found["writers"].values()] == [["4", "16"]] * 4
    moa = found["writers"]["moa"]["16"]
    assert moa["kept"] == moa["agreement"] <= moa["written"]
    assert moa["perplexity_ratio"] == pytest.approx(moa["perplexity"] / moa["target_perplexity"], abs=1e-3)
    assert moa["perplexity_ratio"] > 1  # a random drafter against the target's own most likely tokens
    assert "<svg" in (tmp_path / "offline.svg").read_text()
    assert json.loads(command("--json")[1])["writers"] == found["writers"]  # the same figures


def test_the_command_prints_tables_and_texts(command):
    status, out, err = command("--limit", "1", "--show")
    assert status == 0 and "questions: 1" in out and err.splitlines()[1] == "> Name three primary colours."
    assert "16" in err and "⟨r:" in err and ":\n⟨t:" in err


def test_an_interrupted_run_keeps_whole_questions(command, monkeypatch, tmp_path):
    reconnect, calls = Outage.reconnect, []

    def interrupted(self, text):
        calls.append(text)
        if len(calls) == 5:  # each question reconnects four times
            raise KeyboardInterrupt
        return reconnect(self, text)

    monkeypatch.setattr(Outage, "reconnect", interrupted)
    status, out, err = command("--json")
    found = json.loads(out)
    assert (status, found["partial"], found["questions"]) == (130, True, 1)
    assert found["writers"]["moa"]["4"]["written"] == 4.0 and found["problem"] in err
    calls[:] = [""] * 4  # interrupted at once
    assert command("--plot", str(tmp_path / "empty.png"))[:2] == (130, "") and not (tmp_path / "empty.png").exists()


def test_progress_shows_before_all_is_loaded_and_packages_are_checked(command, monkeypatch):
    def broken(*_, **__):
        raise MoaError("no luck", code="no_luck")

    monkeypatch.setattr(harness, "backend_for", broken)
    run = command("--limit", "1")
    refusal(run, "no_luck")
    assert run[2].startswith("offline: 0 of 1 questions")
    monkeypatch.setitem(extras.MODULES, "bench", ("no_such_package",))
    assert "no_such_package" in refusal(command())
