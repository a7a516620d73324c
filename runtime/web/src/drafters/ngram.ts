/** An index of n-grams, without training: a text goes on as it went on before (as in SSSD, arXiv 2411.05894). */

import { commonLength } from "../sequences.js";

/** A suffix that occurred before counts as at most so many tokens long. */
export const LONGEST_SUFFIX = 16;
const TABLED = 5; // runs of up to so many tokens are looked up, what precedes them is compared
const OCCURRENCES = 8;
const DECAY = 0.7;

/** What followed the longest suffix that occurred before. */
export interface Match {
  /** Of the suffix, 1 to {@link LONGEST_SUFFIX} tokens. */
  readonly length: number;
  /**
   * Of the tokens that followed, the latest first, adding up to 1. Of the last eight occurrences each counts 0.7 times the
   * one after it.
   */
  readonly probabilities: ReadonlyMap<number, number>;
}

/**
 * What followed every run of tokens of one text. After `update([1, 2, 3, 1, 2, 4])`, `match([9, 1, 2])` has length 2 and
 * the probabilities 4: 0.59, 3: 0.41.
 */
export class NgramIndex {
  private readonly stopTokens: ReadonlySet<number>;
  private readonly text: number[] = [];
  private readonly places = new Map<string, number[]>(); // of what followed each run, oldest first

  /**
   * @param stopTokens ids that end a turn. They never count as what followed: that a turn of the user ended says nothing
   *   about the answer.
   */
  constructor(stopTokens: Iterable<number> = []) {
    this.stopTokens = new Set(stopTokens);
  }

  /** Hold `text` instead of what was held; costs what the end differs by. */
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

  /** The longest suffix of `tokens` that occurs in the text with a token after it, undefined without one. */
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
   * How many tokens before `place` are the last of `tokens`, at most {@link LONGEST_SUFFIX}; at least `length` are, and no
   * more if fewer than were looked up.
   */
  private length(tokens: readonly number[], place: number, length: number): number {
    if (length < TABLED) return length;
    const most = Math.min(LONGEST_SUFFIX, tokens.length, place);
    let found = length;
    while (found < most && this.text[place - 1 - found] === tokens[tokens.length - 1 - found]) found++;
    return found;
  }

  /** The runs at the end of the text that `token` counts as following. */
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
