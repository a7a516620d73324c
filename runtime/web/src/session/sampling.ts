/** Sampling parameters of an answer. */

/** `temperature` 0 is greedy. `seed` (64 bits) and position determine a token's noise. `topK`, `minP`: 0 disables. */
export interface Sampling {
  readonly temperature: number;
  readonly topP: number;
  readonly seed: bigint;
  readonly topK: number;
  readonly minP: number;
}

export const GREEDY: Sampling = { temperature: 0, topP: 1, seed: 0n, topK: 0, minP: 0 };
