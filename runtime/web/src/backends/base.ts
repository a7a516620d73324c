/** The contract of every backend: one stateless step of the device half. */

import { MoaError } from "../errors.js";
import type { KvArray } from "../session/memory_rows.js";

/**
 * Inputs of one step of the graph. `T` new tokens, `Q` queries among them, `S` cached tokens, `M` memory rows; keys and values
 * are float32 of shape `[count, kvHeads, headDim]`.
 */
export interface StepInputs {
  /** `[T]`, ids of the target's vocabulary. */
  readonly tokens: readonly number[];
  /** `[T]`, absolute. */
  readonly positions: readonly number[];
  /** `[Q]`, indices of the new tokens whose next token is predicted. */
  readonly queries: readonly number[];
  /** `S` cache entries of earlier tokens, from position 0 on. */
  readonly selfKeys: KvArray;
  readonly selfValues: KvArray;
  /** `[T, S + T]` row by row, 1 if the token attends: cached tokens first, then the new ones, itself included. */
  readonly selfMask: Uint8Array;
  /** Of positions `0..M-1`; every query sees all. With {@link Backend.needsRow} `M >= 1`: without rows, one of zeros. */
  readonly memoryKeys: KvArray;
  readonly memoryValues: KvArray;
}

/** Outputs of one step of the graph. */
export interface StepResult {
  /** The most probable next tokens of each query, best first. */
  readonly topTokens: readonly (readonly number[])[];
  /** Their log-probabilities over the draft vocabulary (nats). */
  readonly topLogprobs: readonly (readonly number[])[];
  /** Cache entries of the new tokens. */
  readonly keys: KvArray;
  readonly values: KvArray;
}

/** Heads of a cache entry and of a memory row, and numbers of each head. */
export interface KvShape {
  readonly kvHeads: number;
  readonly headDim: number;
}

/** The device half, compiled, or a writer. Caches stay with the caller. */
export interface Backend {
  readonly kvShape: KvShape;
  /** Whether a step needs a memory row, one of zeros if there is none; false for a writer, which takes no rows. */
  readonly needsRow: boolean;

  /**
   * Run one step; `inputs` are not changed.
   *
   * @throws EngineError the engine fails, or the graph cannot be loaded.
   */
  step(inputs: StepInputs): Promise<StepResult>;

  /** Free its memory. No step may follow. */
  release(): Promise<void>;
}

/** An engine cannot load or run a graph. */
export class EngineError extends MoaError {
  override readonly name = "EngineError";
}

/** Return the message of whatever an engine threw, as one line. */
export function saidBy(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  return text.split(/\s+/).filter(Boolean).join(" ") || "no reason given";
}

/**
 * Return the inputs of a chain of tokens after the cached ones, with a query at the last.
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
