"""Cases of pure functions: each has the input of a part and its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from moa_runtime.drafters.gumbel import GumbelCoupling, gumbel
from moa_runtime.drafters.ngram import NgramDrafter, NgramIndex, NgramMixture
from moa_runtime.drafters.tree_growth import GrowingTree
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.drafter_selection import DrafterSelection
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.drafting.unsolicited import Pace, UnsolicitedDrafts
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.session.client_table import CALLS, Event, State, transition
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree, depths
from vectors import trace_json
from vectors.drafts import moa_drafts
from vectors.fixtures_draws import Draws, copying, said, some_budget, some_candidates, tree_of

Case = dict[str, Any]


def noise(draws: Draws) -> Iterator[Case]:
    for seed in (0, 1, 42, 2**32 + 1, 2**53 + 1, 2**64 - 1):
        for position in (0, 5, 2**32 + 7, 2**40):
            tokens = [0, 1, 2, 3, 7, 49151, 128255, *draws.several(3, 3, lambda: draws.whole(0, 2**34 - 1))]
            given = {"seed": str(seed), "position": position, "tokens": tokens}
            yield given | {"noise": [float(value) for value in gumbel(seed, position, tokens)]}


def luck(draws: Draws) -> Iterator[Case]:
    for _ in range(60):
        heat = draws.one_of([0.0, 0.3, 0.7, 1.0, 1.5])
        sampling = Sampling(heat, draws.one_of([0.4, 0.9, 1.0]), draws.whole(0, 2**31))
        alternatives = draws.several(1, 3, lambda: some_candidates(draws))
        position = draws.whole(0, 5000)
        ranked = GumbelCoupling(sampling).ranked(alternatives, position)
        best = GumbelCoupling(sampling).best(alternatives[0], position)
        given = {"sampling": sampling.to_json(), "position": position, "alternatives": said(alternatives)}
        yield given | {"ranked": said(ranked), "best": [best.token, best.logprob]}


def ngrams(draws: Draws) -> Iterator[Case]:
    """An index that is updated with several texts, and its matches."""
    for _ in range(40):
        stops = draws.one_of([[], [0]])
        index, text = NgramIndex(stops), list[int]()
        told = []
        for _ in range(6):
            text = copying(draws, text[: draws.whole(0, len(text))], draws.whole(0, 40))
            index.update(text)
            for asked in (text, text[: draws.whole(0, len(text))], draws.several(0, 3, lambda: draws.whole(0, 6))):
                match = index.match(asked)
                found = None if match is None else [match.length, [list(each) for each in match.probabilities.items()]]
                told.append({"text": list(text), "asked": list(asked), "match": found})
        yield {"stop_tokens": stops, "told": told}


def mixtures(draws: Draws) -> Iterator[Case]:
    for _ in range(60):
        text = copying(draws, [], draws.whole(1, 80))
        sampling = Sampling(draws.one_of([0.0, 0.8]), 1.0, draws.whole(0, 1000))
        mixture = NgramMixture([0])
        mixture.confirm(text)
        path = [*text, *copying(draws, text, draws.whole(0, 20))[len(text) :]]
        candidates, luck = some_candidates(draws), GumbelCoupling(sampling)
        copy = mixture.copy(path, luck)
        given = {"text": text, "path": path, "sampling": sampling.to_json(), "candidates": said([candidates])[0]}
        yield given | {
            "mixed": said([mixture.mix(candidates, path)])[0],
            "copy": None if copy is None else [copy.token, copy.logprob],
            "copies": said([list(islice(mixture.copies(path, luck), 12))])[0],
        }


def trees(draws: Draws) -> Iterator[Case]:
    """Trees that grow until no step pays, by the same candidates for whoever has the same last token."""
    for _ in range(80):
        budget = some_budget(draws)
        table = [some_candidates(draws) for _ in range(7)]
        tree, grown = GrowingTree(budget, [0]), list[Any]()
        tree.add_level([table[0]])
        while tree.depth < budget.levels:
            paths, mask = tree.expand()
            grown.append({"paths": paths, "mask": mask.astype(int).tolist()})
            if not paths:
                break
            tree.add_level([table[path[-1] % 7] for path in paths])
        chain = some_candidates(draws)
        room = draws.whole(0, 4)
        tree.lengthen(lambda path, chain=chain: chain, room)  # type: ignore[misc]
        best = tree.best()
        given = {"budget": asdict(budget), "table": said(table), "chain": said([chain])[0], "room": room}
        yield given | {"grown": grown, "best": tree_of(best), "path": best.likeliest_path()}


def ngram_drafts(draws: Draws) -> Iterator[Case]:
    for _ in range(60):
        text, budget = copying(draws, [], draws.whole(1, 80)), some_budget(draws)
        sampling = Sampling(draws.one_of([0.0, 0.8]), 1.0, draws.whole(0, 1000))
        tree = NgramDrafter([0]).propose(text, budget, sampling)
        yield {"prefix": text, "budget": asdict(budget), "sampling": sampling.to_json(), "tree": tree_of(tree)}


def prices(draws: Draws) -> Iterator[Case]:
    """A controller that sees one round after the other, on machines of all kinds."""
    for _ in range(60):
        controller = CostModel()
        pass_s, token_s = 0.002 * 2 ** draws.whole(0, 6), 1e-5 * 2 ** draws.whole(0, 9)
        step_s, trip_s, right = 0.0005 * 2 ** draws.whole(0, 8), 0.001 * 2 ** draws.whole(0, 8), draws.share()
        told = []
        for number in range(60):
            budget, jitter = controller.budget(), 0.7 + 0.6 * draws.share() + 20 * (draws.share() < 0.02)
            drafted = 0 if number == 0 else draws.whole(0, min(12, budget.nodes))
            supplied = draws.whole(1, 400) if number == 0 or draws.share() < 0.03 else 0
            levels = min(drafted, budget.levels, 4)
            steps = tuple(draws.whole(1, 6) for _ in range(levels))
            accepted = sum(draws.share() < right for _ in range(levels)) if levels else 0
            compute_s = (pass_s + token_s * (drafted + supplied)) * jitter
            outcome: RoundEnded | Pushed
            if draws.share() < 0.1:
                outcome = Pushed(drafted, accepted, compute_s + 0.001, draws.one_of([compute_s, 0.0]))
            else:
                said_s = draws.one_of([compute_s, compute_s, 0.0, None])
                draft_s = sum(step_s * (1 + 0.1 * nodes) for nodes in steps) * jitter
                waited_s = trip_s + compute_s
                taken = draft_s, waited_s, said_s
                outcome = RoundEnded(supplied, drafted, levels, accepted, steps, *taken)
            controller.observe(outcome)
            budget = controller.budget()
            ahead = [controller.ahead(count, 0.9) for count in (0, 7, 8)]
            told.append({"outcome": trace_json.event(outcome), "budget": trace_json.plain(budget), "ahead": ahead})
        yield {"told": told}


def placements(draws: Draws) -> Iterator[Case]:
    """The selected drafter over thousands of tokens, while link, device and server change."""
    for _ in range(40):
        drafting, able = draws.one_of(["auto"] * 8 + ["device", "server"]), draws.share() < 0.9
        placement = DrafterSelection(drafting, able=able)
        placement.takes_drafts = draws.share() < 0.7
        told: list[Any] = []
        fast = [0.05 * draws.share() for _ in range(3)]  # of link, server and device
        skill, busy = draws.whole(1, 4), 1.0
        for _ in range(400):
            if draws.share() < 0.03:
                fast[draws.whole(0, 2)] = 0.1 * draws.share() ** 3
            if draws.share() < 0.02:
                skill, busy = draws.whole(0, 4), draws.one_of([1.0, 1.0, 2.0])
            trip_s, pass_s, draft_s = (round(seconds * (0.9 + 0.2 * draws.share()), 6) for seconds in fast)
            args: list[Any]
            what = draws.share()
            if what < 0.2:
                args = ["trip", trip_s]
                placement.note_round_trip(args[1])
            elif placement.at_server and (not placement.wants_draft or what < 0.6):
                used = placement.takes_drafts and draws.share() < 0.1
                args = ["pushed", draws.whole(1, 2), pass_s, 0.25 * pass_s, used]
                placement.pushed(*args[1:4], used=used)
            else:
                kind = "drafted" if placement.at_server else "round_ended"
                accepted, waited_s = draws.whole(0, skill), trip_s + pass_s * (1 if placement.at_server else busy)
                outcome = RoundEnded(0, 4, 4, accepted, (1,) * 4, draft_s, waited_s, None)
                spared_s = round(0.2 * draws.share() * pass_s, 6)
                args = [kind, accepted, draft_s, waited_s, spared_s]
                if kind == "drafted":
                    placement.drafted(outcome, spared_s)
                else:
                    placement.round_ended(outcome, accepted + 1, spared_s)
            now = [placement.at_server, placement.wants_draft, placement.round_s, trace_json.plain(placement.pace)]
            told.append([args, now])
        yield {"drafting": drafting, "able": able, "takes_drafts": placement.takes_drafts, "told": told}


def unsolicited(draws: Draws) -> Iterator[Case]:
    """Budgets of unsolicited drafts, and the rounds that they would have made."""
    for _ in range(40):
        drafts, told = UnsolicitedDrafts(), list[Any]()
        step_s, interval_s, trip_s = (0.001 * 2 ** draws.whole(0, 5) for _ in range(3))
        text = copying(draws, [], draws.whole(1, 10))
        for _ in range(40):
            usual = some_budget(draws)
            pace = Pace(1.0 + 2 * draws.share(), interval_s * (0.5 + draws.share()), trip_s * draws.share())
            budget = drafts.budget(usual, pace)
            path = copying(draws, text, 8)[len(text) :]
            tree = _some_tree(draws, path[: draws.whole(0, 8)])
            drafts.begin(len(text), tree, step_s * len(tree.steps), usual)
            text += path[: draws.whole(1, 3)]
            ended = drafts.decided(text, interval_s, 0.0)
            said = {"usual": asdict(usual), "pace": asdict(pace), "tree": tree_of(tree), "text": list(text)}
            results = {"budget": asdict(budget), "next": drafts.next, "ended": trace_json.plain(ended)}
            told.append(said | results)
        yield {"step_s": step_s, "interval_s": interval_s, "told": told}


def _some_tree(draws: Draws, path: list[int]) -> DraftTree:
    """A tree around ``path``, in which each node is less likely than its parent."""
    tokens, parents, scores = list(path), list(range(len(path))), [-0.3 * (at + 1) for at in range(len(path))]
    for _ in range(draws.whole(0, 4)):
        parents.append(draws.whole(0, len(tokens)))
        tokens.append(draws.whole(0, 6))
        scores.append((scores[parents[-1] - 1] if parents[-1] else 0.0) - 2 * draws.share())
    steps = (1,) * draws.whole(0, max(depths(parents), default=0))
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores), steps)


def manners(draws: Draws) -> Iterator[Case]:
    for _ in range(200):
        rules = StoppingRule(0.1 * draws.whole(0, 9), draws.whole(1, 4), draws.whole(0, 12))
        text = copying(draws, [], draws.one_of([0, 5, 20, 300, 400]))
        unconfirmed, logprob = draws.whole(0, 6), -2 * draws.share()
        given = {"manners": asdict(rules), "text": text, "unconfirmed": unconfirmed, "logprob": logprob}
        yield given | {"go_on": rules.may_continue(text, unconfirmed, logprob)}


def client_table(draws: Draws) -> Iterator[dict[str, Any]]:
    """Yield each call, then each event, with all states; nothing is drawn."""
    for call, rule in CALLS.items():
        following = {
            state.name.lower(): _named(rule.next_states[state]) for state in State if state in rule.next_states
        }
        yield {"call": call.value, "next_states": following, "refusal": rule.refusal}
    for event in Event:
        transitions = {}
        for state in State:
            action, next_states = transition(event, state)
            transitions[state.name.lower()] = {"action": action.name.lower(), "next_states": _named(next_states)}
        yield {"event": event.name.lower(), "transitions": transitions}


def _named(states: frozenset[State]) -> list[str]:
    return [state.name.lower() for state in State if state in states]


_PARTS: tuple[Callable[[Draws], Iterator[Case]], ...] = (
    noise,
    luck,
    ngrams,
    mixtures,
    trees,
    ngram_drafts,
    prices,
    placements,
    manners,
    moa_drafts,
    client_table,
    unsolicited,
)


def figures_of() -> dict[str, list[Case]]:
    """The cases of each part."""
    return {part.__name__: list(part(Draws(200_000 + number))) for number, part in enumerate(_PARTS)}
