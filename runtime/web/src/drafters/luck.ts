/** Guessing with the target's own luck (drafter-invariant coupling, arXiv 2408.07978). */

import { gumbel } from "../noise.js";
import { GREEDY, type Sampling } from "../session/sampling.js";

/** A candidate and its log-probability (nats): of being the target's choice, once {@link Luck} has seen it. */
export interface DraftToken {
  readonly token: number;
  readonly logprob: number;
}

/**
 * How far the noise is to be trusted, since a drafter's probabilities are not quite the target's: 1 would be for those. And
 * what the noise adds to the probability of all other tokens together (nats, at temperature 1).
 */
const TRUST = 0.84;
const OTHERS = 2.1;
const LEAST = 1e-4; // probability of what is no candidate
const HOPELESS = -1e4; // nats; as if no candidate had less, so that all have an order
const HOTTEST = 100; // as if no temperature were higher

/**
 * What the target's noise makes of a drafter's candidates: the chance that one is chosen is taken to be the share of
 * `q * exp(TRUST * t * noise)`, where what is no candidate has `rest * exp(OTHERS * t**2)`, and `t` is `T * topP`. Where
 * the target takes the likeliest token nothing is changed.
 */
export class Luck {
  private readonly seed: bigint;
  private readonly heat: number;

  /** @param sampling how the target chooses. */
  constructor(sampling: Sampling) {
    this.seed = sampling.seed;
    this.heat = Math.min(Math.max(0, sampling.temperature), HOTTEST) * Math.min(Math.max(0, sampling.topP), 1);
  }

  /** The candidates for the absolute `position`, best first, each with its chance in the place of its probability. */
  ranked(candidates: readonly DraftToken[], position: number): readonly DraftToken[] {
    if (!this.heat || !candidates.length) return candidates;
    const logprobs = candidates.map(({ logprob }) => Math.max(logprob, HOPELESS));
    const rest = Math.log(Math.max(LEAST, 1 - logprobs.reduce((sum, logprob) => sum + Math.exp(logprob), 0)));
    const scored = candidates.map(({ token }, at) => {
      return { token, score: logprobs[at]! + TRUST * this.heat * gumbel(this.seed, position, token) };
    });
    const whole = logSum([...scored.map(({ score }) => score), rest + OTHERS * this.heat ** 2]);
    return scored.sort((a, b) => b.score - a.score).map(({ token, score }) => ({ token, logprob: score - whole }));
  }

  /** The best of the candidates, of equals the first. */
  best(candidates: readonly DraftToken[], position: number): DraftToken {
    if (this.heat) return this.ranked(candidates, position)[0]!;
    return candidates.reduce((best, candidate) => (candidate.logprob > best.logprob ? candidate : best));
  }
}

/** Of a target that takes the likeliest token. */
export const NO_LUCK = new Luck(GREEDY);

/** The logarithm of the sum of exponentials. */
function logSum(values: readonly number[]): number {
  const largest = Math.max(...values);
  return largest + Math.log(values.reduce((sum, value) => sum + Math.exp(value - largest), 0));
}
