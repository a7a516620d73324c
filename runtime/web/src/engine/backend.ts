/** The contract of every backend: one stateless step of the device half. */

import { MoaError } from "../errors.js";
import type { KvArray } from "../session/memory_rows.js";

/**
 * What one step is given: the inputs of the graph. `T` new tokens, `Q` queries among them, `S` cached tokens, `M` memory rows;
 * keys and values are float32 of shape `[count, kvHeads, headDim]`.
 */
export interface StepInputs {
  /** `[T]`, ids of the target's vocabulary. */
  readonly tokens: readonly number[];
  /** `[T]`, absolute. */
  readonly positions: readonly number[];
  /** `[Q]`, indices into the new tokens whose next token is wanted. */
  readonly queries: readonly number[];
  /** `S` cache entries of earlier tokens, from position 0 on. */
  readonly selfKeys: KvArray;
  readonly selfValues: KvArray;
  /** `[T, S + T]` row by row, 1 where a token may look: cached tokens first, then the new ones, itself included. */
  readonly selfMask: Uint8Array;
  /** Of positions `0..M-1`; every query sees all. `M >= 1` where {@link Backend.needsRow}: without any there is one of zeros. */
  readonly memoryKeys: KvArray;
  readonly memoryValues: KvArray;
}

/** What one step computes: the outputs of the graph. */
export interface StepResult {
  /** Of each query the most probable next tokens, best first. */
  readonly topTokens: readonly (readonly number[])[];
  /** Their log-probabilities over the draft vocabulary (nats). */
  readonly topLogprobs: readonly (readonly number[])[];
  /** Cache entries of the new tokens. */
  readonly keys: KvArray;
  readonly values: KvArray;
}

/** Heads and numbers of each, of a cache entry and of a memory row. */
export interface KvShape {
  readonly kvHeads: number;
  readonly headDim: number;
}

/** The device half, compiled, or a writer. Caches stay with the caller. */
export interface Backend {
  readonly kvShape: KvShape;
  /** Whether a step needs a memory row, so that it is given one of zeros where there is none; false of a writer, which has none. */
  readonly needsRow: boolean;

  /**
   * Run it; `inputs` are left as they are.
   *
   * @throws EngineError the engine fails, or the graph cannot be loaded.
   */
  step(inputs: StepInputs): Promise<StepResult>;

  /** Give its memory back. No step follows. */
  release(): Promise<void>;
}

/** An engine that cannot load or run a graph: one sentence. */
export class EngineError extends MoaError {
  override readonly name = "EngineError";
}

/** Whatever an engine threw, as one line. */
export function saidBy(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  return text.split(/\s+/).filter(Boolean).join(" ") || "no reason given";
}

/**
 * Tokens that follow one another behind the cached ones, with a query at the last.
 *
 * @param cache of the tokens before.
 * @param memory rows.
 */
export function chainInputs(
  tokens: readonly number[],
  cache: readonly [KvArray, KvArray],
  memory: readonly [KvArray, KvArray],
): StepInputs {
  const held = cache[0].count;
  const selfMask = new Uint8Array(tokens.length * (held + tokens.length));
  tokens.forEach((_, at) => {
    const start = at * (held + tokens.length);
    selfMask.fill(1, start, start + held + at + 1);
  });
  return {
    tokens,
    positions: tokens.map((_, at) => held + at),
    queries: [tokens.length - 1],
    selfKeys: cache[0],
    selfValues: cache[1],
    selfMask,
    memoryKeys: memory[0],
    memoryValues: memory[1],
  };
}
