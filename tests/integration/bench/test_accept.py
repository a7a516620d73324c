"""The acceptance benchmark against figures worked out by hand, and its answers against plain decoding."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from moa_bench import harness
from moa_bench.accept import AcceptSettings, Results, Tally, count_rounds
from moa_bench.benchmark import format_cell
from moa_bench.cli import main
from moa_bench.harness import (
    Answer,
    Conversation,
    Device,
    LoopbackVerifier,
    RefusedError,
    Round,
    checkpoint_pair,
)
from moa_bench.questions import Question
from moa_bench.target_answers import AnswerFile, ReplayEngine, write_answers
from moa_runtime.bundle import Bundle, Fingerprints
from moa_runtime.datastore import write_datastore
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramDrafter, NgramMixture
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.engine.base import Outcome, StepRequest, new_sequence
from support.bench.toy import ToyDrafter
from support.said import is_progress
from support.tiny import make_tiny_drafter, make_tiny_rival
from support.toy_engine import PRINTS, STOP, ToyEngine, plain

PROMPT = [3, 1, 4, 1, 5]


def measure(*what: Any) -> None:
    """Count all rounds, see :func:`moa_bench.accept.count_rounds`."""
    for _ in count_rounds(*what):
        pass


def tallied(
    engine: ToyEngine | ReplayEngine,
    right: int,
    *,
    max_new_tokens: int,
    draft_length: int = 6,
    drafting: ToyEngine | None = None,
) -> Tally:
    """One answer to :data:`PROMPT`, checked against plain decoding. The drafter knows the target ``drafting``."""
    tally = Tally(draft_length)
    known = drafting or engine
    conversation = Conversation(
        LoopbackVerifier(engine), ToyDrafter(known, right), PRINTS, [STOP], FixedShape(Budget.chain(draft_length))
    )
    answer = conversation.answer(PROMPT, Sampling(), max_new_tokens=max_new_tokens, on_round=tally.add)
    assert answer.tokens == plain(known, PROMPT, max_new_tokens)
    assert conversation.committed == PROMPT + answer.tokens
    return tally


def test_an_oracle_commits_the_draft_and_one_more():
    tally = tallied(ToyEngine(), 6, max_new_tokens=1 + 3 * 7)
    assert (tally.tau, tally.rounds, tally.tokens) == (7.0, 3, 21)
    assert tally.histogram == [0, 0, 0, 0, 0, 0, 3]
    assert tally.accuracy_by_depth == [1.0] * 6


def test_the_last_round_of_an_oracle_is_as_short_as_what_is_left():
    tally = tallied(ToyEngine(), 6, max_new_tokens=1 + 3 * 7 + 3)
    assert (tally.tau, tally.rounds, tally.tokens) == (6.0, 4, 24)
    assert tally.histogram == [0, 0, 0, 1, 0, 0, 3]
    assert tally.accuracy_by_depth == [1.0] * 6


def test_a_drafter_that_is_always_wrong_commits_one():
    tally = tallied(ToyEngine(), 0, max_new_tokens=1 + 10)
    assert (tally.tau, tally.rounds) == (1.0, 10)
    assert tally.histogram == [10, 0, 0, 0, 0, 0, 0]
    assert tally.accuracy_by_depth == [0.0, None, None, None, None, None]


def test_a_drafter_right_for_two_tokens_commits_three():
    tally = tallied(ToyEngine(), 2, max_new_tokens=1 + 4 * 3)
    assert (tally.tau, tally.rounds) == (3.0, 4)
    assert tally.histogram == [0, 0, 4, 0, 0, 0, 0]
    assert tally.accuracy_by_depth == [1.0, 1.0, 0.0, None, None, None]


def test_an_end_of_turn_inside_a_draft_ends_the_round():
    # Positions 5 (with the prompt's verdict), 6, 7, 8, and the end of turn at 9, which the drafter knows.
    tally = tallied(ToyEngine(stops=[9]), 6, max_new_tokens=100)
    assert (tally.tau, tally.rounds) == (4.0, 1)
    assert tally.histogram == [0, 0, 0, 0, 1, 0, 0]
    assert tally.accuracy_by_depth == [1.0, 1.0, 1.0, 1.0, None, None]


def test_an_end_of_turn_the_drafter_missed_is_its_mistake():
    tally = tallied(ToyEngine(stops=[9]), 3, max_new_tokens=100)
    assert (tally.tau, tally.rounds) == (4.0, 1)
    assert tally.histogram == [0, 0, 0, 1, 0, 0, 0]
    assert tally.accuracy_by_depth == [1.0, 1.0, 1.0, 0.0, None, None]


def test_an_answer_of_one_token_has_no_round():
    tally = tallied(ToyEngine(), 6, max_new_tokens=1)
    assert (tally.tau, tally.rounds, tally.tokens) == (None, 0, 0)
    assert tally.accuracy_by_depth == [None] * 6


def test_one_verdict_for_the_question_and_one_for_each_round():
    engine = ToyEngine()
    tally = tallied(engine, 2, max_new_tokens=31)
    assert engine.forwards == 1 + tally.rounds


def test_the_tally_of_the_docstring():
    tally = Tally(3)
    tally.add(Round(3, 3, 2, 3))
    tally.add(Round(3, 3, 0, 1))
    assert tally.tau == 2.0
    assert tally.histogram == [1, 0, 1, 0]
    assert tally.accuracy_by_depth == [0.5, 1.0, 0.0]


def test_the_shape_of_drafts_is_counted():
    tally = Tally(6)
    for outcome in (Round(9, 3, 1, 2, steps=3), Round(3, 3, 0, 1, steps=3), Round(0, 0, 0, 1)):
        tally.add(outcome)
    found = tally.as_dict()
    assert (found["nodes"], found["levels"], found["steps"], found["branched"]) == (4.0, 2.0, 2.0, 0.3333)


def test_the_time_of_a_token_is_that_of_all_rounds_by_their_tokens():
    timed, untimed = Tally(6), Tally(6)
    for outcome in (Round(3, 3, 2, 3, seconds=0.2), Round(3, 3, 0, 1, seconds=0.1)):
        timed.add(outcome, timed=True)
        untimed.add(outcome)
    assert (timed.as_dict()["ms_per_token"], untimed.as_dict()["ms_per_token"]) == (75.0, None)


def test_what_was_sent_besides_the_draft_is_counted():
    """A draft of 2 with 3 copied tokens behind it: all right once, then two, then none and only the draft was sent."""
    tally = Tally(2)
    for outcome in (Round(5, 5, 5, 6), Round(5, 5, 2, 3), Round(2, 2, 0, 1)):
        tally.add(outcome)
    assert tally.histogram == [1, 0, 1, 0, 0, 1]
    assert tally.accuracy_by_depth == [2 / 3, 1.0, 0.5, 1.0, 1.0]


def test_tau_is_the_mean_over_tasks_not_over_rounds():
    results = Results(2)
    for task, rounds in (("qa", [Round(2, 2, 2, 3)]), ("rag", [Round(2, 2, 0, 1)] * 3)):
        for outcome in rounds:
            for tally in results.tallies(task):
                tally.add(outcome)
    results.tallies("empty")
    assert results.tau == 2.0
    assert results.total.tau == 1.5


def test_other_fingerprints_are_refused_and_named():
    other = Fingerprints("another", "tokenizer", "drafter")
    with pytest.raises(RefusedError, match=r"target another.*target target"):
        Conversation(LoopbackVerifier(ToyEngine()), ToyDrafter(ToyEngine(), 0), other, [STOP], FixedShape())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"draft_length": 0}, "draft length"),
        ({"draft_length": 100_000}, "draft length"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
    ],
)
def test_settings_out_of_range(changed, said):
    with pytest.raises(MoaError, match=said):
        AcceptSettings(**changed)


# -- drafts compared with answers that are known ----------------------------------------------------


@pytest.mark.parametrize("right", [0, 2, 6])
@pytest.mark.parametrize("stops", [[], [9]], ids=["to the limit", "to the end of turn"])
def test_a_replay_has_the_rounds_of_the_real_thing(right, stops):
    engine = ToyEngine(stops)
    known = plain(engine, PROMPT, 23)
    replay = ReplayEngine(engine, {tuple(PROMPT): known})
    before = engine.forwards
    verified, replayed = (tallied(one, right, max_new_tokens=23, drafting=engine) for one in (engine, replay))
    assert replayed.as_dict() == verified.as_dict()
    assert replay.forwards == 1 + replayed.rounds
    # The target itself ran once more than for the real thing: over question and answer, for the rows.
    assert engine.forwards - before == replay.forwards + 1


def outcome_of(engine: ReplayEngine, draft: list[int], parents: list[int]) -> Outcome:
    """The outcome of one draft behind the prompt."""
    request = StepRequest(new_sequence(), PROMPT, draft, parents, Sampling(), rows_from=0)
    return asyncio.run(engine.step([request]))[0]


def test_a_replay_asks_nothing_of_the_target_for_a_drafter_without_rows():
    engine = ToyEngine()
    known = plain(engine, PROMPT, 4)
    outcome = outcome_of(ReplayEngine(engine, {tuple(PROMPT): known}, has_rows=False), known[:2], [0, 1])
    assert (outcome.path, outcome.token, outcome.rows) == ((0, 1), known[2], None)
    assert engine.forwards == 0


def test_a_replay_judges_trees():
    """Behind a wrong token nothing is right, also where it is the token that the text has there."""
    engine = ToyEngine()
    known = plain(engine, PROMPT, 4)
    wrong = known[0] % (engine.vocab_size - 1) + 1
    tree, parents = [wrong, known[0], known[1], known[1], known[2]], [0, 0, 1, 2, 4]
    outcome = outcome_of(ReplayEngine(engine, {tuple(PROMPT): known}), tree, parents)
    assert (outcome.path, outcome.token) == ((1, 3, 4), known[3])
    assert outcome.rows.keys[:, 0, 0].tolist() == [1.0 + position for position in range(len(PROMPT) + 3)]


# -- a tiny model, the real drafter, the command ---------------------------------------------------


@pytest.fixture
def command(tiny, questions, monkeypatch, capsys):
    """Runs ``moa-bench accept`` on the tiny model: more arguments -> exit status, stdout, stderr."""
    target_folder, drafter_folder, bundle, backend, _ = tiny
    monkeypatch.setattr(harness, "load_backend", lambda bundle, name: backend)

    def run(*more: str) -> tuple[int, str, str]:
        where = ["--questions", str(questions), "--bundle", str(bundle), "--model", str(target_folder)]
        status = main(["accept", *where, "--drafter", str(drafter_folder), "--max-new-tokens", "12", *more])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 7), Sampling(1.0, 1.0, 1 << 63)])
@pytest.mark.parametrize("budget", [Budget.chain(6), Budget.tree(20, 4, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("drafting", ["alone", "mixed", "copies", "of another seed"])
def test_answers_of_a_real_drafter_equal_plain_decoding(tiny, sampling, budget, drafting):
    """The same text for the same seed, whoever drafts and in whatever shape, well or badly coupled."""
    from moa_server.engine.baseline import decode

    *_, bundle, backend, engine = tiny
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    question = tokenizer.encode_chat([{"role": "user", "content": "Name three primary colours."}])
    mixture = NgramMixture() if drafting == "mixed" else None
    drafter = NgramDrafter() if drafting == "copies" else MoaDrafter(backend, max_context=999, mixture=mixture)
    if drafting == "of another seed":
        propose = drafter.propose
        drafter.propose = lambda prefix, budget, sampling: propose(prefix, budget, replace(sampling, seed=4))
    conversation = Conversation(
        LoopbackVerifier(engine), drafter, engine.fingerprints, engine.stop_tokens, FixedShape(budget)
    )
    rounds: list[Round] = []
    answer = conversation.answer(question, sampling, max_new_tokens=40, on_round=rounds.append)
    assert answer.tokens == [step.token for step in decode(engine, question, sampling, 40)]
    assert len(answer.tokens) == 1 + sum(outcome.committed for outcome in rounds)
    assert any(outcome.drafted for outcome in rounds)


def test_trees_commit_the_same_text_in_fewer_rounds(command):
    chain = json.loads(command("--json", "--draft-length", "3")[1])
    status, out, err = command("--json", "--draft", "tree", "--draft-length", "3", "--nodes", "20")
    tree = json.loads(out)
    assert status == 0 and is_progress(err)
    assert tree["tokens"] == chain["tokens"] and tree["rounds"] <= chain["rounds"]
    assert (tree["settings"]["nodes"], chain["settings"]["nodes"]) == (20, None)
    assert len(tree["accuracy_by_depth"]) == 3
    assert (tree["settings"]["width"], chain["settings"]["width"]) == (Budget.tree().width, None)
    narrow = command("--draft", "tree", "--draft-length", "3", "--nodes", "20", "--width", "2")[1]
    assert "tree of 20 nodes in 3 levels, 2 continued on each" in narrow


def test_drafts_have_the_shape_that_pays_at_a_pace_given_by_hand(command):
    """Tokens that cost a target nothing, and tokens that cost it nearly a pass each."""
    shapes = {}
    for name, pace in (("gpu", "1,0.05,30,0,200"), ("cpu", "20,4,30,25,0")):
        status, out, err = command("--json", "--replay", "--draft", "auto", "--pace", pace)
        assert status == 0, err
        shapes[name] = json.loads(out)
    gpu, cpu = shapes["gpu"], shapes["cpu"]
    assert gpu["settings"]["draft"] == "auto" and gpu["settings"]["pace_ms"]["round_trip"] == 200
    assert gpu["nodes"] > 3 * cpu["nodes"] and gpu["levels"] > cpu["levels"] and gpu["branched"] > 0.8
    assert gpu["settings"]["draft_length"] is None and 0 < gpu["steps"] <= gpu["levels"]
    # A round takes the draft, the round trip and a pass; what is drafted meanwhile may end a little later.
    round_ms = gpu["ms_per_token"] * gpu["tokens"] / gpu["rounds"]
    assert gpu["draft_ms"] > 0 and -0.1 < round_ms - (gpu["draft_ms"] + 230) < 2.1
    assert all(task["ms_per_token"] > 0 for task in gpu["tasks"].values())
    out = command("--replay", "--draft", "auto", "--pace", "1,0.05,30,0,200")[1]
    assert "as large as pays" in out and "shape of the drafts" in out and "round trip 200" in out
    assert "ms a token" in out and format_cell(gpu["ms_per_token"]) in out


def test_drafts_have_the_shape_that_pays_on_this_machine(command):
    status, out, _ = command("--draft", "auto")
    assert status == 0 and "ms a token" in out and "at the pace of this machine" in out


@pytest.mark.parametrize("draft", ["thompson", "thompson-calibrated"])
def test_lengths_by_thompson_sampling(command, draft):
    status, out, err = command("--json", "--replay", "--no-ngrams", "--draft", draft)
    assert status == 0, err
    result = json.loads(out)
    assert result["settings"]["draft"] == draft and result["settings"]["draft_length"] is None
    assert result["branched"] == 0 and result["levels"] == result["nodes"] > 0  # chains, of several lengths
    assert result["levels"] != round(result["levels"]) and result["ms_per_token"] is None
    assert json.loads(command("--json", "--replay", "--no-ngrams", "--draft", draft)[1])["tau"] == result["tau"]
    out = command("--replay", "--draft", draft, "--pace", "1,0.05,30,0,200")[1]
    assert "Thompson sampling" in out and "ms a token" in out and "round trip 200" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--draft", "auto", "--pace", "1,2"], "a pace is five times in milliseconds"),
        (["--draft", "auto", "--pace", "1,2,3,4,-5"], "none of them negative"),
        (["--draft", "auto", "--pace", "1,2,3,4,soon"], "not '1,2,3,4,soon'"),
        (["--pace", "1,2,3,4,5"], "--pace is for chosen shapes: add --draft auto"),
        (["--draft", "auto", "--draft-length", "4"], "chooses the length by itself"),
        (["--draft", "thompson", "--draft-length", "4"], "leave out --draft-length or --draft"),
        (["--draft", "auto", "--nodes", "4"], "--nodes is the size of a tree"),
        (["--draft", "auto", "--replay"], "a replay takes none: add --pace"),
        (["--temperature", "-1"], "--temperature must be 0 (greedy) or above"),
        (["--temperature", "nan"], "--temperature must be 0 (greedy) or above"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--seed", "-1"], "--seed must be a whole number of 64 bits"),
    ],
)
def test_options_that_contradict_each_other_are_refused(command, argv, said):
    assert said in refusal(command, *argv)


@pytest.mark.parametrize("shape", [(), ("--draft", "tree", "--nodes", "20")], ids=["chain", "tree"])
def test_copying_commits_the_same_text_in_fewer_rounds(command, shape):
    """The tiny target repeats itself, as small targets do."""
    long = ("--json", "--limit", "1", "--max-new-tokens", "60", *shape)
    mixed, alone = (json.loads(command(*long, option)[1]) for option in ("--ngrams", "--no-ngrams"))
    assert mixed["tokens"] == alone["tokens"] and mixed["rounds"] < alone["rounds"]
    assert (mixed["settings"]["ngrams"], alone["settings"]["ngrams"]) == (True, False)
    assert "mixed with an n-gram index" in command("--limit", "1", *shape)[1]
    assert "n-gram" not in command("--limit", "1", "--no-ngrams", *shape)[1]


@pytest.mark.parametrize("shape", [(), ("--draft", "tree", "--nodes", "20")], ids=["chain", "tree"])
@pytest.mark.parametrize("warmth", [(), ("--temperature", "0.8", "--top-p", "0.9")], ids=["greedy", "sampled"])
def test_a_replay_has_the_figures_of_the_real_thing(command, tiny, tmp_path, shape, warmth):
    """Also of drafters of other architectures, whose rows are others."""
    target_folder, *_ = tiny
    rivals = [make_tiny_rival(arch, target_folder, tmp_path / arch) for arch in ("eagle", "independent")]
    how = ("--json", "--max-new-tokens", "40", "--against", *map(str, rivals), *shape, *warmth)
    verified, replayed = (json.loads(command(*how, *more)[1]) for more in ((), ("--replay",)))
    assert (verified["settings"]["replay"], replayed["settings"]["replay"]) == (False, True)
    for one, other in zip([verified, *verified["rivals"]], [replayed, *replayed["rivals"]], strict=True):
        assert [one[key] for key in _OF_ROUNDS] == [other[key] for key in _OF_ROUNDS]
        # A long prompt takes the target two forwards, and a verdict is one.
        assert other["target_passes"] <= one["target_passes"]


_OF_ROUNDS = ("tau", "rounds", "tokens", "accuracy_by_depth", "accepted_length_histogram", "tasks")


def test_a_replay_says_so(command):
    assert "tokens, written before and replayed" in command("--limit", "1", "--replay")[1]


def test_answers_are_kept_for_the_next_run(command, tmp_path, monkeypatch):
    """The second run takes them all, also those of later turns; a third writes the one that was cut short."""
    kept = tmp_path / "answers.jsonl"
    how = ("--json", "--replay", "--answers", str(kept))
    first = json.loads(command(*how)[1])
    lines = kept.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3
    written: list[int] = []
    add = AnswerFile.add
    monkeypatch.setattr(AnswerFile, "add", lambda file, answers: written.append(len(answers)) or add(file, answers))
    second = json.loads(command(*how)[1])
    assert not written and kept.read_text() == "".join(lines)
    kept.write_text("".join(lines)[:-4])
    third = json.loads(command(*how)[1])
    assert written == [1] and sorted(kept.read_text().splitlines()) == sorted("".join(lines).splitlines())
    for key in _OF_ROUNDS:
        assert first[key] == second[key] == third[key]


def test_answers_of_something_else_are_refused(command, tmp_path):
    kept = tmp_path / "answers.jsonl"
    assert "add --replay" in refusal(command, "--answers", str(kept))
    assert not kept.exists()
    command("--limit", "1", "--replay", "--answers", str(kept))
    how = ("--replay", "--answers", str(kept))
    assert "have at most 12 tokens, not 13" in refusal(command, *how, "--max-new-tokens", "13")
    assert "were sampled otherwise" in refusal(command, *how, "--temperature", "0.5")
    warm = tmp_path / "warm.jsonl"
    one = ("--replay", "--answers", str(warm), "--limit", "1")
    assert command(*one, "--temperature", "0.5", "--seed", "3")[0] == 0 and '"seed":3' in warm.read_text()
    assert "were sampled otherwise" in refusal(command, *one, "--temperature", "0.5", "--seed", "4")
    assert "were sampled otherwise" in refusal(command, *one)
    header, *rest = kept.read_text().splitlines(keepends=True)
    others = [json.dumps(json.loads(header) | {"target": "other"}) + "\n", *rest]
    no_token = json.dumps(json.loads(rest[0]) | {"r": [10**6]}) + "\n"
    for held, said in (
        ("".join(others), "are another target's"),
        ("".join(others)[:-4], "are another target's"),
        (header + no_token, "holds no answers of moa-bench"),
        (header + '{"p": [1], "r": []}\n', "holds no answers of moa-bench"),
        (header + '{"p": [1], "r": [1e400]}\n', "holds no answers of moa-bench"),
        (header + '{"p": [0.5], "r": [1]}\n', "holds no answers of moa-bench"),
        (header + "[" * 100_000 + "\n", "holds no answers of moa-bench"),
        ('{"a": 1}\n', "holds no answers of moa-bench"),
        ("no line", "holds no answers of moa-bench"),
    ):
        kept.write_text(held)
        assert said in refusal(command, *how)
        assert kept.read_text() == held
    assert "cannot keep answers in" in refusal(command, "--replay", "--answers", str(tmp_path / "no" / "folder"))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, 3)])
def test_answers_written_at_once_are_those_written_alone(tiny, sampling):
    """Two turns, and a conversation that its second turn is too long for."""
    from moa_server.engine.baseline import decode

    *_, bundle, _, engine = tiny
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    questions = [Question(1, "qa", ("Why?", "And how?")), Question(2, "qa", ("Name three.", "word " * 300))]
    done: list[list[object]] = []
    answers = write_answers(
        engine, questions, tokenizer, max_new_tokens=9, sampling=sampling, max_context=200, on_answers=done.append
    )
    assert len(answers) == sum(map(len, done)) == 3
    for prompt, answer in answers.items():
        assert answer == [step.token for step in decode(engine, prompt, sampling, 9)]
    later = [p for p in answers if any(p[: len(q) + len(a)] == (*q, *a) for q, a in answers.items())]
    assert len(later) == 1 and answers[later[0]]


def test_a_size_without_a_tree_and_one_that_cannot_be(command):
    assert "--nodes is the size of a tree" in command("--nodes", "9")[2]
    assert "--width is the size of a tree" in command("--width", "9")[2]
    assert "continues 1 to 62, not 63" in command("--draft", "tree", "--width", "63")[2]
    assert f"has {Budget.tree().levels} to 1024 nodes, not 5" in command("--draft", "tree", "--nodes", "5")[2]


def test_a_second_turn_follows_the_first_and_one_that_does_not_fit_is_listed(tiny):
    *_, bundle, _, _ = tiny
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    first = tokenizer.encode_chat([{"role": "user", "content": "Why?"}])
    engine = ToyEngine(max_context=len(first) + 40)
    engine.vocab_size, engine.stop_tokens = 512, (tokenizer.encode("<|im_end|>")[0],)
    device = Device(PRINTS, tokenizer, lambda: ToyDrafter(engine, 6), engine.stop_tokens)
    results = Results(6)
    questions = [Question(1, "qa", ("Why?", "Why?")), Question(2, "qa", ("Why?", "Why? " * 30))]
    measure(questions, device, engine, AcceptSettings(max_new_tokens=8), results)
    # Each answer: one token with the question's verdict, seven with one round.
    assert (results.total.rounds, results.total.tokens, results.total.questions) == (3, 21, 2)
    assert [(turn.question_id, turn.turn) for turn in results.skipped] == [(2, 2)]
    assert "the target's context holds" in results.skipped[0].reason
    assert engine.sequences_open == 0


def test_the_command_prints_one_object(command):
    status, out, err = command("--json")
    assert status == 0 and is_progress(err)
    found = json.loads(out)
    assert list(found["tasks"]) == ["mt_bench", "qa"]
    taus = [task["tau"] for task in found["tasks"].values()]
    assert found["tau"] == pytest.approx(sum(taus) / 2, abs=1e-4)
    assert found["tasks"]["mt_bench"]["questions"] == 1
    assert len(found["accuracy_by_depth"]) == 6
    assert sum(found["accepted_length_histogram"]) == found["rounds"]
    assert sum(task["rounds"] for task in found["tasks"].values()) == found["rounds"]
    assert found["settings"]["questions"] == "questions.jsonl"
    assert found["settings"]["sampling"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "top_k": 0,
        "min_p": 0.0,
    }
    assert (found["partial"], found["skipped"]) == (False, [])


def test_the_command_draws_what_both_ends_did(command, tmp_path):
    found = json.loads(command("--json", "--timeline", str(tmp_path / "out.json"))[1])
    spans = [e for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if e["ph"] == "X"]
    verified = [span["args"] for span in spans if span["name"] == "verify"]
    assert {span["name"] for span in spans} == {"draft", "verify", "receive"}
    # Each of the three turns has a prompt's verdict of its own.
    assert [bool(args["prefill"]) for args in verified].count(True) == 3
    assert len(verified) == 3 + found["rounds"]
    assert sum(args["accepted"] for args in verified) == sum(
        accepted * rounds for accepted, rounds in enumerate(found["accepted_length_histogram"])
    )


def test_the_command_prints_a_table(command):
    status, out, _ = command("--limit", "1", "--temperature", "0.7", "--draft-length", "2")
    assert status == 0
    assert "mt_bench" in out and "mean over tasks" in out and "qa" not in out
    assert "chain of 2, temperature 0.7" in out


def test_the_same_seed_gives_the_same_figures(command):
    runs = [json.loads(command("--json", "--temperature", "1.5", "--seed", "3")[1]) for _ in range(2)]
    for found in runs:
        del found["seconds"], found["measured_at"], found["draft_ms"]
    assert runs[0] == runs[1]
    assert runs[0]["settings"]["sampling"] == asdict(Sampling(1.5, 1.0, 3))


def test_an_interrupted_run_keeps_what_it_has(command, monkeypatch):
    propose, calls = MoaDrafter.propose, []

    def interrupted(self, prefix, budget, sampling):
        calls.append(budget)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return propose(self, prefix, budget, sampling)

    monkeypatch.setattr(MoaDrafter, "propose", interrupted)
    status, out, _ = command("--json")
    found = json.loads(out)
    assert (status, found["partial"]) == (130, True)
    assert found["rounds"] > 0
    assert found["tasks"]["mt_bench"]["questions"] == 0
    calls.clear()
    status, _, err = command()
    assert status == 130 and "partial result: interrupted" in err


def refusal(command, *more: str) -> str:
    """What a refused command says; it must be one line, perhaps behind how far it was."""
    status, out, err = command(*more)
    assert (status, out) == (2, "")
    *before, said = err.splitlines()
    assert said.startswith("moa-bench: error: ") and all(is_progress(line) for line in before)
    return said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--questions", "no-such-file"], "no-such-file: No such file"),
        (["--limit", "0"], "--limit"),
        (["--draft-length", "0"], "draft length"),
        (["--timeline", "no-such-folder/out.json"], "cannot be written: there is no such file or folder"),
        (["--plot", "no-such-folder/out.svg"], "--plot no-such-folder/out.svg cannot be written: there is no such"),
        (["--no-ngrams", "--datastore", "a.moadata"], "leave out --datastore or --no-ngrams"),
        (["--draft", "thompson", "--draft-length", "3"], "chooses the length by itself: leave out --draft-length"),
        (["--bundle", "no-such-bundle"], "no-such-bundle is no bundle"),
        (["--model", "no-such-model"], "unknown target"),
        (["--drafter", "no-such-drafter"], "no-such-drafter"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(command, argv, said):
    assert said in refusal(command, *argv)


def test_a_drafter_other_than_the_bundles_is_refused(command, tiny, tmp_path):
    from moa_drafter.config import drafter_fingerprint

    target_folder, drafter_folder, *_ = tiny
    other = make_tiny_drafter(target_folder, tmp_path / "other", seed=9)
    said = refusal(command, "--drafter", str(other))
    assert drafter_fingerprint(other) in said and drafter_fingerprint(drafter_folder) in said


# -- drafters that run from their checkpoint ---------------------------------------------------------


@pytest.fixture(scope="session")
def rivals(tiny_target, tmp_path_factory):
    """Random drafters by architecture, each in the folder of a run as moa-train leaves it."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: make_tiny_rival(name, tiny_target, folder / name / "drafter")
        for name in ("eagle", "early-exit", "independent")
    }


@pytest.fixture
def bare(tiny, questions, capsys):
    """Runs ``moa-bench accept`` on the tiny model without a bundle."""
    target_folder, *_ = tiny

    def run(*more: str) -> tuple[int, str, str]:
        where = ["--questions", str(questions), "--model", str(target_folder), "--max-new-tokens", "12"]
        return main(["accept", *where, *more]), *capsys.readouterr()

    return run


@pytest.mark.parametrize("architecture", ["eagle", "early-exit", "independent"])
def test_answers_of_a_rival_equal_plain_decoding(rivals, tiny, architecture):
    from moa_server.engine.baseline import decode

    target = tiny[-1].target
    device, engine = checkpoint_pair(rivals[architecture], target)
    question = device.tokenizer.encode_chat([{"role": "user", "content": "Name three primary colours."}])
    for nodes in (None, 20):
        answers: list[Answer] = []
        settings = AcceptSettings(draft_length=4, nodes=nodes, max_new_tokens=30)
        asked = [Question(1, "qa", ("Name three primary colours.",))]
        measure(asked, device, engine, settings, Results(4), lambda turn, answer, to=answers: to.append(answer))
        assert answers[0].tokens == [step.token for step in decode(engine, question, Sampling(), 30)]


def test_one_table_compares_all_architectures(bare, rivals, tiny):
    argv = ["--drafter", str(tiny[1]), "--against", *map(str, rivals.values()), "--draft", "tree", "--nodes", "12"]
    status, out, err = bare(*argv, "--json")
    found = json.loads(out)
    assert (status, found["weights"]) == (0, "float32 checkpoint") and is_progress(err)
    assert [one["name"] for one in found["rivals"]] == ["eagle", "early-exit", "independent"]
    drafters = [found, *found["rivals"]]
    assert [one["architecture"] for one in drafters] == ["moa", "eagle", "early-exit", "independent"]
    # Two halves of 2 heads with a scale each: 16 numbers a head.
    assert [one["row_bytes"] for one in drafters] == [72, 72, 0, 0]
    assert [one["frozen_parameters"] > 0 for one in drafters] == [False, False, True, False]
    for one in drafters:
        assert one["tokens"] == found["tokens"]  # the same text, whoever drafts
        assert one["target_passes"] == 3 + one["rounds"]  # three turns
        assert one["tau"] >= 1 and one["draft_ms"] > 0 and list(one["tasks"]) == ["mt_bench", "qa"]
    table = bare(*argv)[1]
    assert "tau, mean over tasks" in table and "early-exit" in table


def test_a_drafter_without_a_model_stands_beside_the_others(bare, tiny, tmp_path):
    """It commits the same text; in half the rounds where a datastore holds what is asked for again."""
    argv = ["--drafter", str(tiny[1]), "--against", "sssd", "--draft", "tree", "--max-new-tokens", "40", "--json"]
    found = json.loads(bare(*argv)[1])
    [sssd] = found["rivals"]
    assert [sssd[key] for key in ("name", "architecture", "weights")] == ["sssd", "sssd", "none"]
    assert sssd["parameters"] == sssd["frozen_parameters"] == sssd["row_bytes"] == 0
    assert sssd["tokens"] == found["tokens"] and sssd["target_passes"] == 3 + sssd["rounds"]
    engine = tiny[-1]
    asked = [Question(1, "qa", ("Name three primary colours.",)), Question(2, "qa", ("What is a harbour?",))]
    device, alone = checkpoint_pair("sssd", engine.target)
    answers: list[list[int]] = []
    settings = AcceptSettings(draft_length=8, nodes=62, max_new_tokens=40)
    before, again = Results(8), Results(8)
    measure(asked, device, alone, settings, before, lambda turn, answer: answers.append(answer.tokens))
    write_datastore(tmp_path / "texts", answers, device.fingerprints.tokenizer)
    device, alone = checkpoint_pair("sssd", engine.target, datastore=tmp_path / "texts")
    measure(asked, device, alone, settings, again, lambda turn, answer: None)
    assert again.total.rounds < before.total.rounds / 2
    named = json.loads(bare("--drafter", "sssd", "--datastore", str(tmp_path / "texts"), "--limit", "1", "--json")[1])
    assert (named["name"], named["settings"]["datastore"]) == ("sssd", "texts")


def test_a_bundle_is_compared_with_checkpoints(command, rivals):
    found = json.loads(command("--against", str(rivals["eagle"]), "--json")[1])
    assert (found["name"], found["weights"]) == ("bundle", "bundle")
    assert [one["weights"] for one in found["rivals"]] == ["float32 checkpoint"]


def test_a_checkpoint_drafts_as_its_bundle(command, bare, tiny):
    """The graph of the tiny bundle runs in PyTorch here, so nothing may differ."""
    figures = ("tau", "tasks", "accepted_length_histogram", "fingerprints", "row_bytes", "target_passes")
    of_bundle, of_checkpoint = (
        json.loads(run[1]) for run in (command("--json"), bare("--drafter", str(tiny[1]), "--json"))
    )
    assert [of_bundle[name] for name in figures] == [of_checkpoint[name] for name in figures]


def test_an_interrupted_comparison_keeps_what_it_has(bare, rivals, tiny, monkeypatch):
    propose, calls = MoaDrafter.propose, []

    def interrupted(self, prefix, budget, sampling):
        calls.append(type(self._backend).__name__)
        if calls.count("EagleBackend") == 2:
            raise KeyboardInterrupt
        return propose(self, prefix, budget, sampling)

    monkeypatch.setattr(MoaDrafter, "propose", interrupted)
    status, out, _ = bare("--drafter", str(tiny[1]), "--against", str(rivals["eagle"]), str(tiny[1]), "--json")
    found = json.loads(out)
    assert (status, found["partial"], found["questions"]) == (130, True, 2)
    assert [one["questions"] for one in found["rivals"]] == [0, 0]
    assert [one["rounds"] > 0 for one in found["rivals"]] == [True, False]
    calls.clear()
    status, table, err = bare("--drafter", str(tiny[1]), "--against", str(rivals["eagle"]), str(tiny[1]))
    assert status == 130 and "(2)" in table and "partial result: interrupted" in err
    assert "Partial, so not of the same questions" in table and "Same questions" not in table
    rows = {line.split("  ")[0].strip(): line.split()[-3:] for line in table.splitlines()}
    assert rows["questions"] == ["2", "0", "0"] and rows["rounds"][1] == "1" and rows["rounds"][2] == "0"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--against", "no-such-folder"], "no-such-folder"),
        (["--drafter", "no-such-folder"], "no-such-folder"),
        (["--backend", "onnx"], "add --bundle"),
        (["--datastore", "no-such-file"], "there is no datastore no-such-file"),
    ],
)
def test_bad_checkpoints_are_refused_in_one_sentence(bare, tiny, argv, said):
    assert said in refusal(bare, "--drafter", str(tiny[1]), *argv)


def test_a_drafter_of_another_target_is_refused(bare):
    from moa_drafter.pretrained import shipped_checkpoint

    assert "does not fit the target" in refusal(bare, "--against", str(shipped_checkpoint()))
