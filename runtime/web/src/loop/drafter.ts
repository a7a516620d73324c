/** The contract of every drafter. */

import type { KvArray } from "../session/memory_rows.js";
import type { Sampling } from "../session/sampling.js";
import type { DraftTree } from "../session/tree.js";
import type { Budget } from "./budget.js";
import type { Manners } from "./manners.js";

/** Memory rows, or a start, that a drafter cannot take. */
export class RowsMismatchError extends Error {}

/**
 * Proposes what follows a prefix. Keeps caches, but every call names its whole prefix, so there is nothing to roll back: a
 * drafter drops by itself what no longer matches. How it drafts is the host's to call; the loop says when.
 */
export interface Drafter {
  /** Memory rows held, for positions `0..rows-1`. */
  readonly rows: number;
  /** Whether nothing worth reading is drafted without a memory row. */
  readonly needsRows: boolean;
  /** When it stops where it writes alone; null, and it has no reason to. */
  readonly manners: Manners | null;

  /**
   * Store memory rows of committed tokens.
   *
   * @param start absolute position of the first row, at most {@link rows}; later rows held are replaced.
   * @throws RowsMismatchError a gap between the rows held and `start`, or another shape.
   */
  addRows(start: number, keys: KvArray, values: KvArray): void;

  /** Forget the rows of positions `length` and above. */
  truncateRows(length: number): void;

  /**
   * What may follow `prefix`, the conversation's tokens from position 0. Until that is known nothing else is asked of the
   * drafter, and no rows are given to it.
   *
   * Where the target samples, who looks at `sampling` may guess with the target's own luck, see `Luck`; what is
   * committed is the target's choice in any case. Greedy if nothing is said.
   *
   * @returns as much as pays: where `budget.levels` allows any, its first level is drafted in any case. A chain is a tree
   *   without branches. Empty where nothing is known, or the context is full.
   */
  propose(prefix: readonly number[], budget: Budget, sampling?: Sampling): DraftTree | Promise<DraftTree>;
}
