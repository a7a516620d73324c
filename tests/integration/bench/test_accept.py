"""The acceptance benchmark against figures worked out by hand, and its answers against plain decoding."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from moa_bench import harness
from moa_bench.accept import AcceptSettings, Results, count_rounds, figures_of
from moa_bench.cli import main
from moa_bench.harness import Conversation, Device, LoopbackVerifier, Round, checkpoint_pair
from moa_bench.questions import Question
from moa_bench.target_answers import AnswerFile, ReplayEngine, write_answers
from moa_drafter.config import drafter_fingerprint
from moa_drafter.pretrained import shipped_checkpoint
from moa_drafter.target import load_target
from moa_runtime.bundle import Bundle
from moa_runtime.datastore import write_datastore
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramDrafter, NgramMixture
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.options import DRAFTERS
from moa_runtime.paths import bundle_of_drafter
from moa_runtime.session.events import Sampling
from moa_runtime.tokenizer import ChatTokenizer
from moa_server.engine.baseline import decode
from support.bench.commands import Run, refusal
from support.bench.toys import ToyDrafter
from support.said import is_progress
from support.tiny import make_tiny_bundle, make_tiny_drafter, make_tiny_rival
from support.toy_engine import PRINTS, STOP, ToyEngine, plain

PROMPT = [3, 1, 4, 1, 5]


def measure(*what: Any) -> None:
    """Count all rounds, see :func:`moa_bench.accept.count_rounds`."""
    for _ in count_rounds(*what):
        pass


# -- rounds of a toy target ----------------------------------------------------------------------------------


def rounds_of(engine: ToyEngine | ReplayEngine, right: int, most: int, known: ToyEngine) -> list[Round]:
    """One answer to :data:`PROMPT`, checked against plain decoding; ``known`` is the target that the drafter knows."""
    rounds: list[Round] = []
    shape = FixedShape(Budget.chain(6))
    conversation = Conversation(LoopbackVerifier(engine), ToyDrafter(known, right), PRINTS, [STOP], shape)
    answer = conversation.answer(PROMPT, Sampling(), max_new_tokens=most, on_round=rounds.append)
    assert answer.tokens == plain(known, PROMPT, most) and conversation.committed == PROMPT + answer.tokens
    return rounds


@pytest.mark.parametrize(
    ("right", "stops", "most", "tau", "histogram", "accuracy"),
    [
        (6, [], 22, 7.0, [0, 0, 0, 0, 0, 0, 3], [1.0] * 6),
        (6, [], 25, 6.0, [0, 0, 0, 1, 0, 0, 3], [1.0] * 6),  # the last round is as short as the rest
        (0, [], 11, 1.0, [10, 0, 0, 0, 0, 0, 0], [0.0, *[None] * 5]),
        (2, [], 13, 3.0, [0, 0, 4, 0, 0, 0, 0], [1.0, 1.0, 0.0, *[None] * 3]),
        # Positions 5 (with the prompt's verdict), 6, 7, 8, and the end of turn at 9.
        (6, [9], 100, 4.0, [0, 0, 0, 0, 1, 0, 0], [1.0, 1.0, 1.0, 1.0, None, None]),
        (3, [9], 100, 4.0, [0, 0, 0, 1, 0, 0, 0], [1.0, 1.0, 1.0, 0.0, None, None]),
        (6, [], 1, None, [0] * 7, [None] * 6),
    ],
    ids=["oracle", "oracle to the limit", "wrong", "two right", "end drafted", "end missed", "one token"],
)
def test_rounds_are_those_worked_out_by_hand_verified_and_replayed(right, stops, most, tau, histogram, accuracy):
    engine, known = ToyEngine(stops), ToyEngine(stops)
    rounds = rounds_of(engine, right, most, known)
    found = figures_of(rounds, 1, 6)
    assert (found["tau"], found["accepted_length_histogram"], found["accuracy_by_depth"]) == (tau, histogram, accuracy)
    assert engine.forwards == 1 + len(rounds)  # one verdict for the question and one for each round
    before = engine.forwards
    replay = ReplayEngine(engine, {tuple(PROMPT): plain(known, PROMPT, most)})
    assert figures_of(rounds_of(replay, right, most, known), 1, 6) == found
    # Over question and answer, for the memory rows.
    assert (replay.forwards, engine.forwards - before) == (1 + len(rounds), 1)


@pytest.mark.parametrize(
    ("rounds", "length", "expected"),
    [
        (  # the docstring's example
            [Round(3, 3, 2, 3), Round(3, 3, 0, 1)],
            3,
            {"tau": 2.0, "accepted_length_histogram": [1, 0, 1, 0], "accuracy_by_depth": [0.5, 1.0, 0.0]},
        ),
        (  # drafts of 2 with 3 copied tokens after them: all right, then two, then none and no copies
            [Round(5, 5, 5, 6), Round(5, 5, 2, 3), Round(2, 2, 0, 1)],
            2,
            {"accepted_length_histogram": [1, 0, 1, 0, 0, 1], "accuracy_by_depth": [0.6667, 1.0, 0.5, 1.0, 1.0]},
        ),
        (
            [Round(9, 3, 1, 2, steps=3), Round(3, 3, 0, 1, steps=3), Round(0, 0, 0, 1)],
            6,
            {"nodes": 4.0, "levels": 2.0, "steps": 2.0, "branched": 0.3333},
        ),
    ],
)
def test_figures_worked_out_by_hand(rounds, length, expected):
    found = figures_of(rounds, 1, length)
    assert found | expected == found and found["ms_per_token"] is None


def test_the_time_of_a_token_is_that_of_all_rounds_by_their_tokens():
    rounds = [Round(3, 3, 2, 3, seconds=0.2), Round(3, 3, 0, 1, seconds=0.1)]
    assert figures_of(rounds, 1, 3, timed=True)["ms_per_token"] == 75.0


def test_tau_is_the_mean_over_tasks_not_over_rounds():
    results = Results(2, rounds={"qa": [Round(2, 2, 2, 3)], "rag": [Round(2, 2, 0, 1)] * 3, "empty": []})
    assert results.tau == results.as_dict()["tau"] == 2.0


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
    found = results.as_dict()
    # Each answer: one token with the question's verdict, seven with one round.
    assert (found["rounds"], found["tokens"], found["questions"]) == (3, 21, 2)
    assert [(turn["question_id"], turn["turn"]) for turn in results.skipped] == [(2, 2)]
    assert str(engine.max_context) in results.skipped[0]["reason"] and engine.sequences_open == 0


# -- a tiny model, the real drafter, the command -------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """Have all commands share a target that is loaded."""
    load = functools.cache(load_target)
    with pytest.MonkeyPatch.context() as patch:
        for place in ("moa_drafter.target", "moa_server.engine.torch_engine"):
            patch.setattr(f"{place}.load_target", load)
        yield


@pytest.fixture
def command(tiny, questions, monkeypatch, capsys):
    """Runs ``moa-bench accept`` on the tiny model."""
    target_folder, drafter_folder, bundle, backend, _ = tiny
    monkeypatch.setattr(harness, "backend_for", lambda *_, **__: backend)

    def run(*more: str) -> Run:
        where = ["--questions", str(questions), "--bundle", str(bundle), "--model", str(target_folder)]
        status = main(["accept", *where, "--drafter", str(drafter_folder), "--max-new-tokens", "12", *more])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def found(command):
    """The result of a command that has to succeed."""

    def run(*more: str, of=command) -> dict[str, Any]:
        status, out, err = of(*more, "--json")
        assert status == 0 and is_progress(err), err
        return json.loads(out)

    return run


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, 3)])
def test_answers_written_at_once_are_those_of_plain_decoding(tiny, sampling):
    """Two turns, and a conversation whose second turn is too long."""
    *_, bundle, _, engine = tiny
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    questions = [Question(1, "qa", ("Why?", "And how?")), Question(2, "qa", ("Name three.", "word " * 300))]
    answers = write_answers(engine, questions, tokenizer, max_new_tokens=9, sampling=sampling, max_context=200)
    assert len(answers) == 3
    for prompt, answer in answers.items():
        assert answer == [step.token for step in decode(engine, prompt, sampling, 9)]


@pytest.fixture(scope="module")
def plainly(tiny):
    """The 24 tokens of plain decoding by prompt and sampling."""
    engine = tiny[-1]

    @functools.cache
    def decoded(prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
        return [step.token for step in decode(engine, list(prompt), sampling, 24)]

    return decoded


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 7), Sampling(1.0, 1.0, 1 << 63)])
@pytest.mark.parametrize("budget", [Budget.chain(6), Budget.tree(20, 4, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("drafting", ["alone", "mixed", "copies", "of another seed"])
def test_answers_of_a_real_drafter_equal_plain_decoding(tiny, plainly, sampling, budget, drafting):
    """The same text for the same seed, whichever drafter and shape, well or badly coupled."""
    *_, bundle, backend, engine = tiny
    tokenizer = ChatTokenizer.from_bundle(Bundle.open(bundle))
    question = tokenizer.encode_chat([{"role": "user", "content": "Name three primary colours."}])
    mixture = NgramMixture() if drafting == "mixed" else None
    drafter = NgramDrafter() if drafting == "copies" else MoaDrafter(backend, max_context=999, mixture=mixture)
    if drafting == "of another seed":
        propose = drafter.propose
        drafter.propose = lambda prefix, budget, sampling: propose(prefix, budget, replace(sampling, seed=4))
    verifier, shape = LoopbackVerifier(engine), FixedShape(budget)
    conversation = Conversation(verifier, drafter, engine.fingerprints, engine.stop_tokens, shape)
    rounds: list[Round] = []
    answer = conversation.answer(question, sampling, max_new_tokens=24, on_round=rounds.append)
    assert answer.tokens == plainly(tuple(question), sampling)
    assert len(answer.tokens) == 1 + sum(outcome.committed for outcome in rounds)
    assert any(outcome.drafted for outcome in rounds)


def test_the_result_and_its_timeline_agree(found, tmp_path):
    result = found("--timeline", str(tmp_path / "out.json"))
    assert list(result["tasks"]) == ["mt_bench", "qa"] and result["tasks"]["mt_bench"]["questions"] == 1
    assert result["tau"] == pytest.approx(sum(task["tau"] for task in result["tasks"].values()) / 2, abs=1e-4)
    assert sum(result["accepted_length_histogram"]) == result["rounds"] and len(result["accuracy_by_depth"]) == 6
    assert sum(task["rounds"] for task in result["tasks"].values()) == result["rounds"]
    assert result["settings"]["questions"] == "questions.jsonl" and (result["partial"], result["skipped"]) == (
        False,
        [],
    )
    assert result["settings"]["sampling"] == json.loads(json.dumps(asdict(Sampling())))
    spans = [e for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if e["ph"] == "X"]
    verified = [span["args"] for span in spans if span["name"] == "verify"]
    assert {span["name"] for span in spans} == {"draft", "verify", "receive"}
    # Each of the three turns has a prompt's verdict of its own.
    assert [bool(args["prefill"]) for args in verified].count(True) == 3 == len(verified) - result["rounds"]
    accepted = sum(n * rounds for n, rounds in enumerate(result["accepted_length_histogram"]))
    assert sum(args["accepted"] for args in verified) == accepted


def test_trees_commit_the_same_text_in_fewer_rounds(command, found):
    size = ("--draft-length", "3", "--nodes", "20")
    chain, tree = found("--draft-length", "3"), found("--draft", "tree", *size)
    assert tree["tokens"] == chain["tokens"] and tree["rounds"] <= chain["rounds"]
    assert (tree["settings"]["nodes"], chain["settings"]["nodes"], len(tree["accuracy_by_depth"])) == (20, None, 3)
    assert (tree["settings"]["width"], chain["settings"]["width"]) == (Budget.tree().width, None)
    narrow = command("--draft", "tree", *size, "--width", "2", "--limit", "1", "--temperature", "0.7")[1]
    assert "20" in narrow and "0.7" in narrow and "mt_bench" in narrow and "qa" not in narrow


def test_drafts_have_the_shape_that_pays_at_a_pace_given_by_hand(command, found):
    """Tokens that cost a target nothing, and tokens that cost it nearly a pass each."""
    gpu, cpu = (found("--replay", "--draft", "auto", "--pace", pace) for pace in ("1,0.05,30,0,200", "20,4,30,25,0"))
    assert gpu["settings"]["draft"] == "auto" and gpu["settings"]["pace_ms"]["round_trip"] == 200
    assert gpu["nodes"] > 3 * cpu["nodes"] and gpu["levels"] > cpu["levels"] and gpu["branched"] > 0.8
    assert gpu["settings"]["draft_length"] is None and 0 < gpu["steps"] <= gpu["levels"]
    # A round takes the draft, the round trip and a pass; what is drafted meanwhile may end a little later.
    round_ms = gpu["ms_per_token"] * gpu["tokens"] / gpu["rounds"]
    assert gpu["draft_ms"] > 0 and -0.1 < round_ms - (gpu["draft_ms"] + 230) < 2.1
    assert all(task["ms_per_token"] > 0 for task in gpu["tasks"].values())
    assert "200" in command("--replay", "--draft", "auto", "--pace", "1,0.05,30,0,200")[1].splitlines()[-1]
    assert found("--draft", "auto", "--limit", "1")["ms_per_token"] > 0  # at the pace of this machine


def test_lengths_are_drawn_by_thompson_sampling(found):
    how = ("--replay", "--no-ngrams", "--draft", "thompson-calibrated")
    result = found(*how)
    assert result["settings"]["draft_length"] is None
    assert result["branched"] == 0 and result["levels"] == result["nodes"] > 0  # chains, of several lengths
    assert result["levels"] != round(result["levels"]) and result["ms_per_token"] is None
    assert found(*how)["tau"] == result["tau"] and found(*how, "--pace", "1,0.05,30,0,200")["ms_per_token"] > 0


@pytest.mark.parametrize("shape", [(), ("--draft", "tree", "--nodes", "20")], ids=["chain", "tree"])
def test_copying_commits_the_same_text_in_fewer_rounds(found, shape):
    """The tiny target repeats itself, as small targets do."""
    long = ("--limit", "1", "--max-new-tokens", "24", *shape)
    mixed, alone = (found(*long, option) for option in ("--ngrams", "--no-ngrams"))
    assert mixed["tokens"] == alone["tokens"] and mixed["rounds"] < alone["rounds"]
    assert (mixed["settings"]["ngrams"], alone["settings"]["ngrams"]) == (True, False)


# -- answers that the target writes before -------------------------------------------------------------------

OF_ROUNDS = ("tau", "rounds", "tokens", "accuracy_by_depth", "accepted_length_histogram", "tasks")


@pytest.mark.parametrize(
    ("other", "shape"),
    [("eagle3", ("--temperature", "0.8", "--top-p", "0.9")), ("independent", ("--draft", "tree", "--nodes", "20"))],
    ids=["sampled", "tree"],
)
def test_a_replay_has_the_figures_of_the_real_thing(found, tiny, tmp_path, other, shape):
    """Also for drafters of other architectures, whose rows are others."""
    folder = make_tiny_rival(other, tiny[0], tmp_path / other)
    how = ("--against", str(folder), "--max-new-tokens", "8", *shape)
    verified, replayed = found(*how), found(*how, "--replay")
    assert (verified["settings"]["replay"], replayed["settings"]["replay"]) == (False, True)
    for one, other in zip([verified, *verified["rivals"]], [replayed, *replayed["rivals"]], strict=True):
        assert [one[key] for key in OF_ROUNDS] == [other[key] for key in OF_ROUNDS]
        # A long prompt takes the target two forwards, and a verdict is one.
        assert other["target_passes"] <= one["target_passes"]


def test_answers_are_kept_for_the_next_run(found, tmp_path, monkeypatch):
    """The second run takes them all, also those of later turns; a third writes the one that was cut short."""
    kept = tmp_path / "answers.jsonl"
    how = ("--replay", "--answers", str(kept))
    first = found(*how)
    lines = kept.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3
    written: list[int] = []
    add = AnswerFile.add
    monkeypatch.setattr(AnswerFile, "add", lambda file, answers: written.append(len(answers)) or add(file, answers))
    second = found(*how)
    assert not written and kept.read_text() == "".join(lines)
    kept.write_text("".join(lines)[:-4])
    third = found(*how)
    assert written == [1] and sorted(kept.read_text().splitlines()) == sorted("".join(lines).splitlines())
    for key in OF_ROUNDS:
        assert first[key] == second[key] == third[key]


def test_answers_of_something_else_are_refused(command, tmp_path):
    kept, warm = tmp_path / "answers.jsonl", tmp_path / "warm.jsonl"
    how, one = ("--replay", "--answers", str(kept)), ("--replay", "--answers", str(warm), "--limit", "1")
    assert command(*how, "--limit", "1")[0] == 0
    assert command(*one, "--temperature", "0.5", "--seed", "3")[0] == 0 and '"seed":3' in warm.read_text()
    refusal(command(*how, "--max-new-tokens", "13"), "other_settings")
    refusal(command(*how, "--temperature", "0.5"), "other_settings")
    refusal(command(*one, "--temperature", "0.5", "--seed", "4"), "other_settings")
    refusal(command(*one), "other_settings")
    header, *rest = kept.read_text().splitlines(keepends=True)
    others = "".join([json.dumps(json.loads(header) | {"target": "other"}) + "\n", *rest])
    no_token = json.dumps(json.loads(rest[0]) | {"r": [10**6]}) + "\n"
    damaged = [no_token, '{"p": [1], "r": []}\n', '{"p": [1], "r": [1e400]}\n', '{"p": [0.5], "r": [1]}\n']
    contents = [(others, "other_target"), (others[:-4], "other_target")]
    contents += [(header + line, "damaged") for line in (*damaged, "[" * 100_000 + "\n")]
    for held, code in [*contents, ('{"a": 1}\n', "damaged"), ("no line", "damaged")]:
        kept.write_text(held)
        refusal(command(*how), code)
        assert kept.read_text() == held
    refusal(command("--replay", "--answers", str(tmp_path / "no" / "folder")), "not_writable")


# -- drafters that run from their checkpoint -----------------------------------------------------------------


@pytest.fixture(scope="session")
def rivals(tiny_target, tmp_path_factory):
    """Random drafters by architecture, each in the folder of a run as moa-train leaves it."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("eagle3", "early-exit", "independent")
    return {name: make_tiny_rival(name, tiny_target, folder / name / "drafter") for name in names}


@pytest.fixture
def bare(tiny_target, questions, capsys):
    """Runs ``moa-bench accept`` on the tiny model without a bundle."""

    def run(*more: str) -> Run:
        where = ["--questions", str(questions), "--model", str(tiny_target), "--max-new-tokens", "12"]
        return main(["accept", *where, *more]), *capsys.readouterr()

    return run


def test_one_table_compares_all_architectures(bare, found, rivals, tiny):
    argv = ["--drafter", str(tiny[1]), "--against", *map(str, rivals.values()), "--draft", "tree", "--nodes", "12"]
    first = found(*argv, of=bare)
    drafters = [first, *first["rivals"]]
    assert first["weights"] == "float32 checkpoint"
    assert [one["name"] for one in first["rivals"]] == ["eagle3", "early-exit", "independent"]
    assert [one["architecture"] for one in drafters] == ["moa", "eagle3", "early-exit", "independent"]
    # Two halves of 2 heads: 16 numbers a head, in int8 with a scale each, or in float16.
    assert [one["row_bytes"] for one in drafters] == [72, 128, 0, 0]
    assert [one["frozen_parameters"] > 0 for one in drafters] == [False, False, True, False]
    for one in drafters:
        assert one["tokens"] == first["tokens"]  # the same text, whichever drafts
        assert one["target_passes"] == 3 + one["rounds"]  # three turns
        assert one["tau"] >= 1 and one["draft_ms"] > 0 and list(one["tasks"]) == ["mt_bench", "qa"]
    assert {"early-exit", "eagle3"} < set(bare(*argv, "--limit", "1", "--max-new-tokens", "2")[1].split())


def test_a_drafter_without_a_model_stands_beside_the_others(bare, found, tiny, tmp_path):
    """It commits the same text; in half the rounds if a datastore holds the answers."""
    argv = ["--drafter", str(tiny[1]), "--against", "sssd", "--draft", "tree"]
    first = found(*argv, of=bare)
    [sssd] = first["rivals"]
    assert [sssd[key] for key in ("name", "architecture", "weights")] == ["sssd", "sssd", "none"]
    assert sssd["parameters"] == sssd["frozen_parameters"] == sssd["row_bytes"] == 0
    assert sssd["tokens"] == first["tokens"] and sssd["target_passes"] == 3 + sssd["rounds"]
    target = tiny[-1].target
    asked = [Question(1, "qa", ("Name three primary colours.",)), Question(2, "qa", ("What is a harbour?",))]
    device, alone = checkpoint_pair("sssd", target)
    answers: list[list[int]] = []
    settings = AcceptSettings(draft_length=8, nodes=62, max_new_tokens=40)
    before, again = Results(8), Results(8)
    measure(asked, device, alone, settings, before, lambda turn, answer: answers.append(answer.tokens))
    write_datastore(tmp_path / "texts", answers, device.fingerprints.tokenizer)
    measure(asked, *checkpoint_pair("sssd", target, datastore=tmp_path / "texts"), settings, again)
    assert again.as_dict()["rounds"] < before.as_dict()["rounds"] / 2
    named = found("--drafter", "sssd", "--datastore", str(tmp_path / "texts"), "--limit", "1", of=bare)
    assert (named["name"], named["settings"]["datastore"]) == ("sssd", "texts")


def test_a_checkpoint_drafts_as_its_bundle(found, bare, tiny):
    """The graph of the tiny bundle runs in PyTorch here, so nothing may differ."""
    of_bundle = found("--against", str(tiny[1]))
    of_checkpoint = found("--drafter", str(tiny[1]), of=bare)
    assert (of_bundle["name"], of_bundle["weights"]) == ("bundle", "bundle")
    assert [one["weights"] for one in of_bundle["rivals"]] == ["float32 checkpoint"]
    for name in ("tau", "tasks", "accepted_length_histogram", "fingerprints", "row_bytes", "target_passes"):
        assert of_bundle[name] == of_checkpoint[name]


def test_an_interrupted_comparison_keeps_what_it_has(bare, rivals, tiny, monkeypatch):
    propose, calls = MoaDrafter.propose, []

    def interrupted(self, prefix, budget, sampling):
        calls.append(type(self._backend).__name__)
        if calls.count("Eagle3Backend") == 2:
            raise KeyboardInterrupt
        return propose(self, prefix, budget, sampling)

    monkeypatch.setattr(MoaDrafter, "propose", interrupted)
    argv = ("--drafter", str(tiny[1]), "--against", str(rivals["eagle3"]), str(tiny[1]))
    status, out, _ = bare(*argv, "--json")
    result = json.loads(out)
    assert (status, result["partial"], result["questions"]) == (130, True, 2)
    assert [one["questions"] for one in result["rivals"]] == [0, 0]
    assert [one["rounds"] > 0 for one in result["rivals"]] == [True, False]
    calls.clear()
    status, table, err = bare(*argv)
    assert status == 130 and "(2)" in table and result["problem"] in err
    rows = {line.split("  ")[0].strip(): line.split()[-3:] for line in table.splitlines()}
    assert rows["questions"] == ["2", "0", "0"] and rows["rounds"][1] == "1" and rows["rounds"][2] == "0"


# -- drafters that are called by name ------------------------------------------------------------------------


def test_one_command_compares_all_that_have_a_name(bare, found, tiny_shipped):
    names = [*DRAFTERS]
    first = found("--limit", "1", "--against", *names, of=bare)
    measured = [first, *first["rivals"]]
    assert [one["name"] for one in measured] == [one["architecture"] for one in measured] == names
    assert [one["weights"] != "none" for one in measured] == [kind.has_graph for kind in DRAFTERS.values()]
    assert [one["row_bytes"] > 0 for one in measured] == [kind.reads_rows for kind in DRAFTERS.values()]
    assert {(one["tokens"], one["questions"]) for one in measured} == {(first["tokens"], 1)}
    chosen = found("--limit", "1", "--drafter", "early-exit", "--against", "moa", of=bare)
    assert [chosen["name"], *(one["name"] for one in chosen["rivals"])] == ["early-exit", "moa"]


def test_a_name_that_is_not_shipped_ends_the_command(bare, tiny_shipped, monkeypatch, tmp_path):
    monkeypatch.setattr("moa_drafter.pretrained.WEIGHTS", tmp_path)
    (tmp_path / "moa").mkdir()
    (tmp_path / "moa" / "config.json").touch()
    assert "independent" in refusal(bare("--against", "sssd", "independent"))
    assert "larn" in refusal(bare("--against", "larn"))


def test_a_name_chooses_the_bundle_if_none_is_given(
    tiny_target, tiny_shipped, questions, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    where = ["--questions", str(questions), "--limit", "1", "--model", str(tiny_target), "--drafter", "early-exit"]
    command, path = ["offline", *where, "--after", "2", "--lengths", "4", "--json"], bundle_of_drafter("early-exit")
    assert f"{path}: `moa-export --target onnx --drafter early-exit" in refusal((main(command), *capsys.readouterr()))
    make_tiny_bundle(path, tiny_target, tiny_shipped / "early-exit", "none", questions=())
    assert main(command) == 0 and json.loads(capsys.readouterr().out)["settings"]["target"]


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--against", "no-such-folder"], "no-such-folder"),
        (["--drafter", "no-such-folder"], "no-such-folder"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--backend", "onnx"], "[contradiction]"),
        (["--dtype", "int4"], "[contradiction]"),
        (["--datastore", "no-such-file"], "no-such-file"),
        (["--against", str(shipped_checkpoint())], "target"),
    ],
)
def test_bad_checkpoints_are_refused(bare, tiny, argv, named):
    assert named in refusal(bare("--drafter", str(tiny[1]), *argv))


def test_a_drafter_other_than_the_bundles_is_refused(command, tiny, tmp_path):
    target_folder, drafter_folder, *_ = tiny
    other = make_tiny_drafter(target_folder, tmp_path / "other", seed=9)
    said = refusal(command("--drafter", str(other)))
    assert drafter_fingerprint(other) in said and drafter_fingerprint(drafter_folder) in said
