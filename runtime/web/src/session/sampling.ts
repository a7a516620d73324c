/** How the target chooses. */

/** `temperature` 0 is greedy; `seed`, 64 bits, and the position make the noise. `topK` and `minP` are 0 for none. */
export interface Sampling {
  readonly temperature: number;
  readonly topP: number;
  readonly seed: bigint;
  readonly topK: number;
  readonly minP: number;
}

export const GREEDY: Sampling = { temperature: 0, topP: 1, seed: 0n, topK: 0, minP: 0 };
