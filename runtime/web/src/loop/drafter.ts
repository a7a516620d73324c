/** The contract of every drafter. */

import type { Numbers } from "../session/rows.js";
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
  addRows(start: number, keys: Numbers, values: Numbers): void;

  /** Forget the rows of positions `length` and above. */
  truncateRows(length: number): void;
}
