/**
 * A drafter's candidates mixed with what followed the same words before: a cache language model (Kuhn, De Mori 1990). A
 * small drafter knows the language and hardly the conversation; an n-gram index knows nothing but the conversation.
 */

import { sends, type Budget } from "../loop/budget.js";
import { NO_LUCK, type DraftToken, type Luck } from "./luck.js";
import { LONGEST_SUFFIX, NgramIndex } from "./ngram.js";

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
/** Probability from which a token is worth verifying that took no step: a longer draft costs a target little. */
const WORTH_COPYING = 0.1;

/** Whether a token that takes no step is worth sending in a chain, by the log-probability of its path (nats). */
export function worthCopying(budget: Budget, logprob: number): boolean {
  return budget.logprob + logprob >= Math.log(WORTH_COPYING) && sends(budget, logprob);
}

/**
 * Mixes a drafter's candidates with an index of the conversation: with `w` the weight for the length of the matching suffix,
 * a candidate's probability becomes `(1 - w) * drafter + w * index`. A token need not be in the draft vocabulary to be
 * copied.
 */
export class NgramMixture {
  private readonly index: NgramIndex;
  private confirmed = 0;

  /**
   * @param stopTokens ids that end a turn; they are not copied.
   * @param reach tokens behind the last one that the target confirmed that are mixed. What is written farther on, when the
   *   network is away, is the drafter's alone: a text that copies from itself ends in a loop.
   */
  constructor(
    stopTokens: Iterable<number> = [],
    private readonly reach = 16,
  ) {
    this.index = new NgramIndex(stopTokens);
  }

  /** Take `text`, which the target confirmed, as what is copied from. */
  confirm(text: readonly number[]): void {
    this.index.update(text);
    this.confirmed = text.length;
  }

  /** What may follow `path`, the whole text up to there, best first; more than `candidates` where the index has others. */
  mix(candidates: readonly DraftToken[], path: readonly number[]): readonly DraftToken[] {
    const match = this.reaches(path) ? this.index.match(path) : undefined;
    if (!match) return candidates;
    const weight = weightOf(match.length);
    const mixed = new Map(candidates.map(({ token, logprob }) => [token, (1 - weight) * Math.exp(logprob)]));
    for (const [token, probability] of match.probabilities) {
      mixed.set(token, (mixed.get(token) ?? 0) + weight * probability);
    }
    // exp() of a hopeless candidate may be 0, which has no logarithm.
    const possible = [...mixed].filter(([, probability]) => probability > 0);
    return possible
      .sort(([, a], [, b]) => b - a)
      .map(([token, probability]) => ({ token, logprob: Math.log(probability) }));
  }

  /**
   * What the index alone expects after `path`, within the reach; undefined where it knows nothing. It costs no step of the
   * drafter, whose part in the probability is 0.
   */
  copy(path: readonly number[], luck: Luck = NO_LUCK): DraftToken | undefined {
    return this.reaches(path) ? this.copied(path, path.length, luck) : undefined;
  }

  /**
   * The same, one token after the other until none is known, and beyond the reach: take what is worth verifying, there may
   * be no end.
   *
   * @param before tokens of the text before `path`, of which the last few are enough.
   */
  *copies(path: readonly number[], luck: Luck = NO_LUCK, before = 0): Generator<DraftToken> {
    const text = path.slice(-LONGEST_SUFFIX);
    for (let position = before + path.length; ; position++) {
      const copy = this.copied(text, position, luck);
      if (!copy) return;
      text.push(copy.token);
      yield copy;
    }
  }

  private copied(path: readonly number[], position: number, luck: Luck): DraftToken | undefined {
    const match = this.index.match(path);
    if (!match) return undefined;
    const weight = weightOf(match.length);
    const followers = [...match.probabilities].map(([token, share]) => ({ token, logprob: Math.log(weight * share) }));
    return luck.best(followers, position);
  }

  private reaches(path: readonly number[]): boolean {
    return path.length < this.confirmed + this.reach;
  }
}

function weightOf(length: number): number {
  return WEIGHTS.find(([least]) => length >= least)![1];
}
