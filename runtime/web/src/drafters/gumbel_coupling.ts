/** Gumbel coupling: guessing with the target's own noise (drafter-invariant coupling, arXiv 2408.07978). */

import { gumbel } from "../gumbel.js";
import { GREEDY, type Sampling } from "../session/sampling.js";
import type { DraftToken } from "./base.js";

/**
 * Weight of the noise: below 1, because a drafter's probabilities are not quite the target's; and what the noise adds to the
 * probability of all other tokens together (nats, at temperature 1).
 */
const TRUST = 0.84;
const OTHERS = 2.1;
const LEAST = 1e-4; // probability of all other tokens together, at least
const HOPELESS = -1e4; // nats; least log-probability of a candidate, so that all can be ordered
const HOTTEST = 100; // highest temperature that is told apart

/**
 * Rank a drafter's candidates with the target's noise. A candidate's chance is its share of `q * exp(TRUST * t * noise)`;
 * tokens outside the candidate list share `rest * exp(OTHERS * t**2)`; `t` is `T * topP`. For a greedy target nothing
 * changes.
 */
export class GumbelCoupling {
  private readonly seed: bigint;
  private readonly heat: number;

  /** @param sampling how the target chooses. */
  constructor(sampling: Sampling) {
    this.seed = sampling.seed;
    this.heat = Math.min(Math.max(0, sampling.temperature), HOTTEST) * Math.min(Math.max(0, sampling.topP), 1);
  }

  /** Return the candidates for the absolute `position`, best first, each with its chance in place of its probability. */
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

  /** Return the best candidate, the first among equals. */
  best(candidates: readonly DraftToken[], position: number): DraftToken {
    if (this.heat) return this.ranked(candidates, position)[0]!;
    return candidates.reduce((best, candidate) => (candidate.logprob > best.logprob ? candidate : best));
  }
}

/** For a greedy target. */
export const NO_COUPLING = new GumbelCoupling(GREEDY);

/** Return the logarithm of the sum of exponentials. */
function logSum(values: readonly number[]): number {
  const largest = Math.max(...values);
  return largest + Math.log(values.reduce((sum, value) => sum + Math.exp(value - largest), 0));
}
