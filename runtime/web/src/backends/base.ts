/** The contract of every engine: a loaded graph, and the caches of a conversation, which stay with the engine. */

import { MoaError } from "../errors.js";
import type { KvArray } from "../session/memory_rows.js";

/** Inputs of one step of a graph: `T` new tokens after `S` cached ones, `Q` queries among them. */
export interface StepInputs {
  /** `[T]`, ids of the target's vocabulary. */
  readonly tokens: Int32Array;
  /** `[T]`, absolute. */
  readonly positions: Int32Array;
  /** `[Q]`, indices of the new tokens whose next token is predicted. */
  readonly queries: Int32Array;
  /** `[T, S + T]` row by row, 1 if the token attends: cached tokens first, then the new ones, itself included. */
  readonly mask: Uint8Array;
  /** Number of leading memory rows that every query sees; at least 1 if the graph has {@link Graph.rowShape}, else 0. */
  readonly rows: number;
}

/** Outputs of one step of a graph: the `K` most probable next tokens of each query, best first. */
export interface StepResult {
  /** `[Q, K]`. */
  readonly tokens: Int32Array;
  /** `[Q, K]`, log-probabilities over the draft vocabulary (nats). */
  readonly logprobs: Float32Array;
}

/** Heads of a memory row, and numbers of each head. */
export interface KvShape {
  readonly kvHeads: number;
  readonly headDim: number;
}

/** A loaded graph: a device half, or a writer. Several conversations may share it. */
export interface Graph {
  /** The shape of a memory row; undefined for a writer, which takes none. */
  readonly rowShape: KvShape | undefined;

  /** Positions, and memory rows, that a step can hold; any number when omitted. */
  readonly maxPositions?: number | undefined;

  /** Return empty caches for one conversation. */
  open(): GraphCache;

  /** Free its memory. No step may follow. */
  release(): Promise<void>;
}

/** The caches of one conversation: keys and values of its tokens, and its memory rows. */
export interface GraphCache {
  /** Put memory rows at position `start`, at most the number of rows held, in place of those held from there on. */
  putRows(start: number, keys: KvArray, values: KvArray): void;

  /** Forget the keys and values of tokens from `length` on. Memory rows stay. */
  truncate(length: number): void;

  /**
   * Run one step, and append the keys and values of the new tokens. Steps of one cache do not overlap; `inputs` are not changed.
   *
   * @throws EngineError the engine fails, or the graph cannot be loaded. The cache may have changed after `S` entries.
   */
  step(inputs: StepInputs): Promise<StepResult>;

  /** Free their memory. */
  close(): void;
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
 * @param cached number of tokens in the cache.
 * @param rows see {@link StepInputs}.
 */
export function chainInputs(tokens: readonly number[], cached: number, rows: number): StepInputs {
  const width = cached + tokens.length;
  const mask = new Uint8Array(tokens.length * width);
  tokens.forEach((_, at) => mask.fill(1, at * width, at * width + cached + at + 1));
  return {
    tokens: Int32Array.from(tokens),
    positions: Int32Array.from(tokens, (_, at) => cached + at),
    queries: Int32Array.of(tokens.length - 1),
    mask,
    rows,
  };
}
