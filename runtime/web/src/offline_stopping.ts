/** When a drafter that writes offline stops. */

/** Tokens in which repetitions are searched. */
const RECENT = 256;

/** Limits of a drafter that writes without the target: it predicts a few tokens well but degenerates on long text. */
export interface StoppingRule {
  /** Least probability that the target keeps all of it, by the drafter's own estimate; below, it stops. */
  readonly leastProbability: number;
  /** It stops if its last `repeated` tokens stood among the newest 256 before. */
  readonly repeated: number;
  /** Tokens that it writes, at most; 0 for none. */
  readonly longest: number;
}

/** Defaults, fitted to the shipped drafter; `moa-export` fits others to a target's own answers. */
export const USUAL_STOPPING_RULE: StoppingRule = { leastProbability: 0.4, repeated: 12, longest: 8 };

/**
 * Return whether one more token is worth writing.
 *
 * @param text the conversation, or its end.
 * @param unconfirmed tokens of it that the target has not seen.
 * @param logprob of all these (nats).
 */
export function mayContinue(rule: StoppingRule, text: readonly number[], unconfirmed: number, logprob: number): boolean {
  const sure = rule.leastProbability ? logprob >= Math.log(rule.leastProbability) : true;
  return sure && unconfirmed < rule.longest && !repeats(text, rule.repeated, unconfirmed);
}

/** Return whether the last `length` tokens stood among the newest ones before, and some of them are `unconfirmed`. */
function repeats(text: readonly number[], length: number, unconfirmed: number): boolean {
  const recent = text.slice(-RECENT);
  const end = recent.length - length;
  if (!unconfirmed || end < 0) return false;
  for (let start = 0; start < end; start++) {
    let same = 0;
    while (same < length && recent[start + same] === recent[end + same]) same++;
    if (same === length) return true;
  }
  return false;
}
