/** The parts compute what Python's compute. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { DrafterSelection } from "../src/drafting/drafter_selection.js";
import type { Drafting } from "../src/drafting/settings.js";
import { UnsolicitedDrafts, type Pace } from "../src/drafting/unsolicited.js";
import { CostModel, GrowingTree, GumbelCoupling, NgramDrafter, NgramIndex, NgramMixture } from "../src/index.js";
import { gumbel, likeliestPath } from "../src/index.js";
import type { DraftToken, DraftTree, Pushed, RoundEnded, StoppingRule } from "../src/index.js";
import { mayContinue } from "../src/offline_stopping.js";
import { budgetFrom, samplingOf, type Fields } from "./figure_inputs.js";
import { alike, ours, plain, read, type Value } from "./vectors.js";

type Pair = [number, number];

/** Check the cases of a part: what `compute` makes of each, key by key. */
function part(name: string, compute: (given: Fields) => Fields): void {
  test(`figures: ${name}`, () => {
    read<Fields>(`figures/${name}`).forEach((given, number) => {
      for (const [key, value] of Object.entries(compute(given))) {
        if (!alike(value, given[key]!)) assert.deepEqual(value, given[key], `case ${number}, ${key}`);
      }
    });
  });
}

part("noise", (given) => {
  const seed = BigInt(given["seed"] as string);
  return { noise: (given["tokens"] as number[]).map((token) => gumbel(seed, given["position"] as number, token)) };
});

part("luck", (given) => {
  const coupling = new GumbelCoupling(samplingOf(given));
  const position = given["position"] as number;
  const alternatives = (given["alternatives"] as Pair[][]).map(candidatesOf);
  const ranked = alternatives.map((candidates) => said(coupling.ranked(candidates, position)));
  return { ranked, best: pair(coupling.best(alternatives[0]!, position)) };
});

part("ngrams", (given) => {
  const index = new NgramIndex(given["stop_tokens"] as number[]);
  const told = (given["told"] as Fields[]).map(({ text, asked }) => {
    index.update(text as number[]);
    const match = index.match(asked as number[]);
    return { text: text!, asked: asked!, match: match ? [match.length, [...match.probabilities]] : null };
  });
  return { told };
});

part("mixtures", (given) => {
  const mixture = new NgramMixture([0]);
  mixture.confirm(given["text"] as number[]);
  const path = given["path"] as number[];
  const coupling = new GumbelCoupling(samplingOf(given));
  const copies: DraftToken[] = [];
  for (const copy of mixture.copies(path, coupling)) {
    copies.push(copy);
    if (copies.length === 12) break;
  }
  const copy = mixture.copy(path, coupling);
  const mixed = said(mixture.mix(candidatesOf(given["candidates"] as Pair[]), path));
  return { mixed, copy: copy ? pair(copy) : null, copies: said(copies) };
});

part("trees", (given) => {
  const budget = budgetFrom(given["budget"]!);
  const table = (given["table"] as Pair[][]).map(candidatesOf);
  const tree = new GrowingTree(budget, [0]);
  const grown: Value[] = [];
  tree.addLevel([table[0]!]);
  while (tree.depth < budget.levels) {
    const { paths, mask } = tree.expand();
    grown.push({ paths, mask: mask.map((row) => row.map(Number)) });
    if (!paths.length) break;
    tree.addLevel(paths.map((path) => table[path.at(-1)! % 7]!));
  }
  tree.lengthen(() => candidatesOf(given["chain"] as Pair[]), given["room"] as number);
  const best = tree.best();
  return { grown, best: plain(best), path: likeliestPath(best) };
});

part("ngram_drafts", (given) => {
  const drafter = new NgramDrafter([0]);
  const tree = drafter.propose(given["prefix"] as number[], budgetFrom(given["budget"]!), samplingOf(given));
  return { tree: plain(tree) };
});

part("prices", (given) => {
  const controller = new CostModel();
  const told = (given["told"] as Fields[]).map(({ outcome }) => {
    controller.observe(ours<RoundEnded | Pushed>(outcome!));
    const ahead = [0, 7, 8].map((count) => controller.ahead(count, 0.9));
    return { outcome: outcome!, budget: plain(controller.budget()), ahead };
  });
  return { told };
});

part("placements", (given) => {
  const selection = new DrafterSelection(given["drafting"] as Drafting, given["able"] as boolean);
  selection.takesDrafts = given["takes_drafts"] as boolean;
  const told = (given["told"] as [[string, ...number[]], Value][]).map(([args]) => {
    const [name, ...figures] = args;
    if (name === "trip") selection.noteRoundTrip(figures[0]!);
    else if (name === "pushed") selection.pushed(figures[0]!, figures[1]!, figures[2]!, Boolean(figures[3]));
    else if (name === "drafted") selection.drafted(roundOf(figures), figures[3]!);
    else selection.roundEnded(roundOf(figures), figures[0]! + 1, figures[3]!);
    return [args, [selection.atServer, selection.wantsDraft, selection.roundS, plain(selection.pace)]];
  });
  return { told };
});

part("unsolicited", (given) => {
  const drafts = new UnsolicitedDrafts();
  const told = (given["told"] as Fields[]).map(({ next, pace, text, tree, usual }) => {
    const budget = drafts.budget(budgetFrom(usual!), ours<Pace>(pace!));
    const drafted = tree as unknown as DraftTree;
    const seconds = (given["step_s"] as number) * drafted.steps.length;
    drafts.begin((next as number) - 1, drafted, seconds, budgetFrom(usual!));
    const ended = drafts.decided(text as number[], given["interval_s"] as number, 0).map(({ event, ...round }) => plain(round));
    return { usual: usual!, pace: pace!, tree: tree!, text: text!, budget: plain(budget), next: drafts.next, ended };
  });
  return { told };
});

part("manners", (given) => {
  const rule = ours<StoppingRule>(given["manners"]!);
  const text = given["text"] as number[];
  return { go_on: mayContinue(rule, text, given["unconfirmed"] as number, given["logprob"] as number) };
});

function roundOf([accepted, draftS, waitedS]: number[]): RoundEnded {
  const draft = { supplied: 0, drafted: 4, depth: 4, steps: [1, 1, 1, 1] };
  const times = { draftS: draftS!, waitedS: waitedS!, computeS: null, sent: 0 };
  return { event: "RoundEnded", ...draft, accepted: accepted!, ...times };
}

function candidatesOf(said: Pair[]): DraftToken[] {
  return said.map(([token, logprob]) => ({ token, logprob }));
}

function pair({ token, logprob }: DraftToken): Pair {
  return [token, logprob];
}

function said(candidates: readonly DraftToken[]): Pair[] {
  return candidates.map(pair);
}
