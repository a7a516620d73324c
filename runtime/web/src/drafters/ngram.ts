/**
 * Drafting from n-grams: an index of one text, its mixture with the candidates of a model, and a drafter without a model.
 */

import type { StoppingRule } from "../offline_stopping.js";
import { GREEDY, type Sampling } from "../session/sampling.js";
import { NOTHING, prependChain, type DraftTree } from "../session/tree.js";
import { commonLength } from "../tokens.js";
import { sends, type Budget, type DraftToken, type Drafter } from "./base.js";
import { GumbelCoupling, NO_COUPLING } from "./gumbel_coupling.js";

/** Longest suffix that is matched, in tokens. */
export const LONGEST_SUFFIX = 16;
const TABLED = 5; // runs of up to this many tokens are looked up; longer ones are compared token by token
const OCCURRENCES = 8;
const DECAY = 0.7;

/** Tokens that followed the longest suffix that occurred before. */
export interface Match {
  /** Length of the suffix, 1 to {@link LONGEST_SUFFIX} tokens. */
  readonly length: number;
  /**
   * Probabilities of the tokens that followed, the latest first, adding up to 1. Each of the last eight occurrences counts
   * 0.7 times the one after it.
   */
  readonly probabilities: ReadonlyMap<number, number>;
}

/**
 * Index the tokens that followed every run of tokens of one text. After `update([1, 2, 3, 1, 2, 4])`, `match([9, 1, 2])` has
 * length 2 and the probabilities 4: 0.59, 3: 0.41.
 */
export class NgramIndex {
  private readonly stopTokens: ReadonlySet<number>;
  private readonly text: number[] = [];
  private readonly places = new Map<string, number[]>(); // positions after each run, oldest first

  /**
   * @param stopTokens ids that end a turn. They never count as followers: the end of a user's turn says nothing about the
   *   answer.
   */
  constructor(stopTokens: Iterable<number> = []) {
    this.stopTokens = new Set(stopTokens);
  }

  /** Index `text` instead of the text before; takes time in proportion to the tokens that differ at the end. */
  update(text: readonly number[]): void {
    const keep = commonLength(this.text, text);
    while (this.text.length > keep) {
      const token = this.text.pop()!;
      for (const run of this.runs(token)) this.places.get(run)!.pop();
    }
    for (const token of text.slice(keep)) {
      for (const run of this.runs(token)) {
        const places = this.places.get(run);
        if (places) places.push(this.text.length);
        else this.places.set(run, [this.text.length]);
      }
      this.text.push(token);
    }
  }

  /** Return the longest suffix of `tokens` that occurs in the text with a token after it; undefined if none does. */
  match(tokens: readonly number[]): Match | undefined {
    for (let length = Math.min(TABLED, tokens.length); length > 0; length--) {
      const places = this.places.get(keyOf(tokens.slice(-length)));
      if (!places?.length) continue;
      const found = places.slice(-OCCURRENCES).map((place) => ({ place, length: this.length(tokens, place, length) }));
      const longest = Math.max(...found.map((each) => each.length));
      const followers = found.filter((each) => each.length === longest).map(({ place }) => this.text[place]!);
      return { length: longest, probabilities: probabilitiesOf(followers) };
    }
    return undefined;
  }

  /**
   * Return how many tokens before `place` equal the last of `tokens`, at most {@link LONGEST_SUFFIX}. At least `length` do,
   * and no more if that is below the longest run that is looked up.
   */
  private length(tokens: readonly number[], place: number, length: number): number {
    if (length < TABLED) return length;
    const most = Math.min(LONGEST_SUFFIX, tokens.length, place);
    let found = length;
    while (found < most && this.text[place - 1 - found] === tokens[tokens.length - 1 - found]) found++;
    return found;
  }

  /** Return the runs at the end of the text that `token` counts as following. */
  private runs(token: number): string[] {
    if (this.stopTokens.has(token)) return [];
    const most = Math.min(TABLED, this.text.length);
    return Array.from({ length: most }, (_, at) => keyOf(this.text.slice(-1 - at)));
  }
}

function keyOf(run: readonly number[]): string {
  return run.join(" ");
}

function probabilitiesOf(followers: readonly number[]): Map<number, number> {
  const weights = new Map<number, number>();
  let total = 0;
  [...followers].reverse().forEach((token, age) => {
    const weight = DECAY ** age;
    weights.set(token, (weights.get(token) ?? 0) + weight);
    total += weight;
  });
  for (const [token, weight] of weights) weights.set(token, weight / total);
  return weights;
}

/** The index's share of a candidate's probability, by the least length of the matching suffix, longest first. */
const WEIGHTS = [
  [16, 0.91],
  [8, 0.77],
  [5, 0.63],
  [4, 0.55],
  [3, 0.46],
  [2, 0.34],
  [1, 0.13],
] as const;
/** Least probability of a token that took no step to be worth verifying: a longer draft costs a target little. */
const WORTH_COPYING = 0.1;

/** Return whether a token that takes no step is worth sending in a chain, by the log-probability of its path (nats). */
export function worthCopying(budget: Budget, logprob: number): boolean {
  return budget.logprob + logprob >= Math.log(WORTH_COPYING) && sends(budget, logprob);
}

/**
 * Mix a drafter's candidates with an n-gram index of the conversation: a cache language model (Kuhn, De Mori 1990). A small
 * drafter knows the language but little of the conversation; the index knows the conversation alone.
 *
 * With `w` the weight for the length of the matching suffix, a candidate's probability becomes `(1 - w) * drafter +
 * w * index`. Copied tokens need not be in the draft vocabulary.
 */
export class NgramMixture {
  private readonly index: NgramIndex;
  private confirmed = 0;

  /**
   * @param stopTokens ids that end a turn; they are not copied.
   * @param reach tokens after the last confirmed one up to which candidates are mixed. Text farther on, written without a
   *   network, is the drafter's alone: a text that copies from itself ends in a loop.
   */
  constructor(
    stopTokens: Iterable<number> = [],
    private readonly reach = 16,
  ) {
    this.index = new NgramIndex(stopTokens);
  }

  /** Copy from `text` from now on, which the target has confirmed. */
  confirm(text: readonly number[]): void {
    this.index.update(text);
    this.confirmed = text.length;
  }

  /** Return candidates after `path`, the whole text up to there, best first; more than `candidates` if the index has others. */
  mix(candidates: readonly DraftToken[], path: readonly number[]): readonly DraftToken[] {
    const match = this.reaches(path) ? this.index.match(path) : undefined;
    if (!match) return candidates;
    const weight = weightOf(match.length);
    const mixed = new Map(candidates.map(({ token, logprob }) => [token, (1 - weight) * Math.exp(logprob)]));
    for (const [token, probability] of match.probabilities) {
      mixed.set(token, (mixed.get(token) ?? 0) + weight * probability);
    }
    // exp() of a very unlikely candidate may be 0, which has no logarithm.
    const possible = [...mixed].filter(([, probability]) => probability > 0);
    return possible
      .sort(([, a], [, b]) => b - a)
      .map(([token, probability]) => ({ token, logprob: Math.log(probability) }));
  }

  /**
   * Return the token that the index alone expects after `path`, within the reach; undefined if it has no match. It takes no
   * step of the drafter, whose share of the probability is 0.
   */
  copy(path: readonly number[], coupling: GumbelCoupling = NO_COUPLING): DraftToken | undefined {
    return this.reaches(path) ? this.copied(path, path.length, coupling) : undefined;
  }

  /**
   * Yield such tokens one after the other until none is known, beyond the reach, too. There may be no end: stop at the first
   * that is not worth verifying.
   *
   * @param path the text, or its last {@link LONGEST_SUFFIX} tokens.
   * @param before tokens of the text before `path`.
   */
  *copies(path: readonly number[], coupling: GumbelCoupling = NO_COUPLING, before = 0): Generator<DraftToken> {
    const text = path.slice(-LONGEST_SUFFIX);
    for (let position = before + path.length; ; position++) {
      const copy = this.copied(text, position, coupling);
      if (!copy) return;
      text.push(copy.token);
      yield copy;
    }
  }

  private copied(path: readonly number[], position: number, coupling: GumbelCoupling): DraftToken | undefined {
    const match = this.index.match(path);
    if (!match) return undefined;
    const weight = weightOf(match.length);
    const followers = [...match.probabilities].map(([token, share]) => ({ token, logprob: Math.log(weight * share) }));
    return coupling.best(followers, position);
  }

  private reaches(path: readonly number[]): boolean {
    return path.length < this.confirmed + this.reach;
  }
}

function weightOf(length: number): number {
  return WEIGHTS.find(([least]) => length >= least)![1];
}

/**
 * Draft with an n-gram index alone, without a model or memory rows. It copies from the conversation and its own text, so
 * during an outage its drafts soon repeat.
 */
export class NgramDrafter implements Drafter {
  readonly rows = 0;
  readonly needsRows = false;
  private readonly mixture: NgramMixture;

  /** @param stopTokens ids that end a turn; they are not copied. */
  constructor(
    stopTokens: Iterable<number> = [],
    readonly stoppingRule: StoppingRule | null = null,
  ) {
    this.mixture = new NgramMixture(stopTokens);
  }

  addRows(): void {
    // Memory rows are not used.
  }

  truncateRows(): void {
    // Memory rows are not used.
  }

  /**
   * Return a chain of the tokens that followed before, which ends if the last token never occurred before. It has as many
   * tokens as the budget has levels if that pays, and more, also without levels, while all of it is likely enough: see
   * {@link worthCopying}.
   */
  propose(prefix: readonly number[], budget: Budget, sampling: Sampling = GREEDY): DraftTree {
    const text = [...prefix];
    const logprobs: number[] = [];
    const coupling = new GumbelCoupling(sampling);
    let logprob = 0;
    while (logprobs.length < Math.min(budget.nodes, budget.depth)) {
      this.mixture.confirm(text);
      const copy = this.mixture.copy(text, coupling);
      if (!copy) break;
      logprob += copy.logprob;
      const levelled = logprobs.length < budget.levels && (!logprobs.length || sends(budget, logprob));
      if (!levelled && !worthCopying(budget, logprob)) break;
      text.push(copy.token);
      logprobs.push(copy.logprob);
    }
    return prependChain(NOTHING, text.slice(prefix.length), logprobs);
  }
}
