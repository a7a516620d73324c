/** In a model's place, as `tests/vectors/drafts.py` has it: what follows is a sum over all that a query may see. */

import type { Backend, KvShape, KvArray, StepInputs, StepResult } from "../src/index.js";

const TOP_K = 4;
const VOCABULARY = 12;
const LESS = [0, 1, 1.75, 2.5];

export class CountingBackend implements Backend {
  readonly kvShape: KvShape = { kvHeads: 1, headDim: 2 };
  /** Of each step: new tokens, cached ones, memory rows. */
  steps: number[][] = [];
  released = false;

  constructor(readonly needsRow: boolean) {}

  async step(inputs: StepInputs): Promise<StepResult> {
    const { tokens, positions, selfKeys, selfValues, selfMask, memoryKeys, memoryValues } = inputs;
    this.steps.push([tokens.length, selfKeys.count, memoryKeys.count]);
    const keys = this.numbers(tokens.map((token, at) => [token, positions[at]!]));
    const values = this.numbers(tokens.map((token, at) => [token + positions[at]!, 1]));
    const [allKeys, allValues] = [[...selfKeys.data, ...keys.data], [...selfValues.data, ...values.data]];
    const width = selfKeys.count + tokens.length;
    const entries = Array.from({ length: width }, (_, at) => 7 * allKeys[2 * at]! + 3 * allKeys[2 * at + 1]! + allValues[2 * at]!);
    let rows = 0;
    for (let at = 0; at < memoryKeys.count; at++) rows += 5 * memoryKeys.data[2 * at]! + 11 * memoryValues.data[2 * at + 1]!;
    const found = inputs.queries.map((query) => {
      const seen = entries.reduce((sum, entry, at) => (selfMask[query * width + at] ? sum + entry : sum), 0);
      return (seen + 13 * positions[query]! + rows) % 1009;
    });
    return {
      topTokens: found.map((x) => Array.from({ length: TOP_K }, (_, k) => (x + 5 * k) % VOCABULARY)),
      topLogprobs: found.map((x) => LESS.map((less) => -0.5 - ((x * 31) % 128) / 64 - less)),
      keys,
      values,
    };
  }

  async release(): Promise<void> {
    this.released = true;
  }

  private numbers(pairs: number[][]): KvArray {
    return { ...this.kvShape, count: pairs.length, data: Float32Array.from(pairs.flat()) };
  }
}
