/** In a model's place, as `tests/vectors/drafts.py` has it: what follows is a sum over all that a query may see. */

import type { Graph, GraphCache, KvArray, KvShape, StepInputs, StepResult } from "../src/index.js";

const TOP_K = 4;
const VOCABULARY = 12;
const LESS = [0, 1, 1.75, 2.5];
export const SHAPE: KvShape = { kvHeads: 1, headDim: 2 };

/** What one step sees: keys and values of cached tokens and of memory rows, flat. */
export interface Seen {
  readonly keys: ArrayLike<number>;
  readonly values: ArrayLike<number>;
  readonly memoryKeys: ArrayLike<number>;
  readonly memoryValues: ArrayLike<number>;
}

/** What it makes: candidates, and keys and values of the new tokens. */
export interface Made extends StepResult {
  readonly keys: Float32Array;
  readonly values: Float32Array;
}

export function count({ tokens, positions, queries, mask }: StepInputs, seen: Seen): Made {
  const keys = Float32Array.from([...tokens].flatMap((token, at) => [token, positions[at]!]));
  const values = Float32Array.from([...tokens].flatMap((token, at) => [token + positions[at]!, 1]));
  const [allKeys, allValues] = [[...Array.from(seen.keys), ...keys], [...Array.from(seen.values), ...values]];
  const width = allKeys.length / 2;
  const entries = Array.from({ length: width }, (_, at) => 7 * allKeys[2 * at]! + 3 * allKeys[2 * at + 1]! + allValues[2 * at]!);
  let rows = 0;
  for (let at = 0; at < seen.memoryKeys.length / 2; at++) rows += 5 * seen.memoryKeys[2 * at]! + 11 * seen.memoryValues[2 * at + 1]!;
  const found = Array.from(queries, (query) => {
    const sum = entries.reduce((all, entry, at) => (mask[query * width + at] ? all + entry : all), 0);
    return (sum + 13 * positions[query]! + rows) % 1009;
  });
  return {
    tokens: Int32Array.from(found.flatMap((x) => Array.from({ length: TOP_K }, (_, k) => (x + 5 * k) % VOCABULARY))),
    logprobs: Float32Array.from(found.flatMap((x) => LESS.map((less) => -0.5 - ((x * 31) % 128) / 64 - less))),
    keys,
    values,
  };
}

export class CountingGraph implements Graph {
  readonly rowShape: KvShape | undefined;
  /** Of each step: new tokens, cached ones, memory rows. */
  steps: number[][] = [];
  /** Keys of the memory rows of each step. */
  readonly memory: number[][] = [];

  constructor(needsRow: boolean) {
    this.rowShape = needsRow ? SHAPE : undefined;
  }

  open(): GraphCache {
    return new CountingCache(this);
  }

  async release(): Promise<void> {}
}

class CountingCache implements GraphCache {
  private keys: number[] = [];
  private values: number[] = [];
  private memoryKeys: number[] = [];
  private memoryValues: number[] = [];

  constructor(private readonly graph: CountingGraph) {}

  putRows(start: number, keys: KvArray, values: KvArray): void {
    this.memoryKeys.splice(2 * start, Infinity, ...keys.data);
    this.memoryValues.splice(2 * start, Infinity, ...values.data);
  }

  truncate(length: number): void {
    this.keys = this.keys.slice(0, 2 * length);
    this.values = this.values.slice(0, 2 * length);
  }

  async step(inputs: StepInputs): Promise<StepResult> {
    const { keys, values } = this;
    const memoryKeys = this.memoryKeys.slice(0, 2 * inputs.rows);
    const memoryValues = this.memoryValues.slice(0, 2 * inputs.rows);
    this.graph.steps.push([inputs.tokens.length, keys.length / 2, inputs.rows]);
    this.graph.memory.push(memoryKeys);
    const made = count(inputs, { keys, values, memoryKeys, memoryValues });
    this.keys.push(...made.keys);
    this.values.push(...made.values);
    return made;
  }

  close(): void {}
}
