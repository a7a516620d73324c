/** Events of a client session. */

import type { KvArray } from "./memory_rows.js";

/**
 * Origin of an answer's token: `drafted` by the device and confirmed by the target; written `offline` by the device;
 * `corrected`, chosen by the target itself; `kept`, written offline and kept by policy without asking the target.
 */
export type Origin = (typeof ORIGINS)[number];
export const ORIGINS = ["drafted", "offline", "corrected", "kept"] as const;

/**
 * What happens to offline tokens after the device is online again. `rollback`: they stay up to the first disagreement
 * with the target. `keep`: they stay. `ask`: like `rollback`, but the application learns of the disagreement and may
 * keep them after all.
 */
export type Policy = (typeof POLICIES)[number];
export const POLICIES = ["rollback", "keep", "ask"] as const;

/** Why an answer ended. */
export type FinishReason = "stop" | "length" | "context" | "grammar";

/**
 * Why a verdict was sent: `asked` by a Prompt or Draft of this connection, `pushed` within the credit, or `fetched`,
 * decided before this connection and sent after the Welcome.
 */
export type Cause = "asked" | "pushed" | "fetched";

/** The link is up. `resumed`: the server had kept the conversation. `drafts`: the server drafts for pushed verdicts. */
export interface Welcomed {
  readonly event: "Welcomed";
  readonly resumed: boolean;
  readonly drafts: boolean;
}

/** The server has answered the frame with this stamp, `heldS` seconds after it arrived. */
export interface Echoed {
  readonly event: "Echoed";
  readonly stamp: number;
  readonly heldS: number;
}

/** Memory rows for the drafter from position `start` on; `keys` and `values` are `[count, kvHeads, headDim]`. */
export interface RowsReceived {
  readonly event: "RowsReceived";
  readonly start: number;
  readonly keys: KvArray;
  readonly values: KvArray;
}

/** A verdict was accepted; the events of its effects follow. */
export interface Decided {
  readonly event: "Decided";
  readonly cause: Cause;
  /** Number of tokens of the Prompt that it answers; 0 for a Draft. */
  readonly supplied: number;
  /**
   * Number of tokens of the Draft that it answers, or of the part that was verified; if pushed, of the unsolicited Draft or
   * of the server's own draft.
   */
  readonly drafted: number;
  /** Number of drafted tokens that the target accepted. */
  readonly accepted: number;
  /** Time of the target, seconds. */
  readonly computeS: number;
  /** Time of the server's own draft, seconds, if pushed. */
  readonly draftS: number;
  /** Stamp of the verified unsolicited Draft, or of a requested Draft verified only in part; else 0. */
  readonly draftStamp: number;
  /** Number of tokens of the Draft that it answers, verified or not; 0 if pushed. */
  readonly sent: number;
}

/**
 * Answer tokens became final, in order, from absolute position `start` on. There are none if the policy `keep` overrules
 * all tokens of a late verdict.
 */
export interface Committed {
  readonly event: "Committed";
  readonly start: number;
  readonly tokens: readonly number[];
  readonly origins: readonly Origin[];
}

/** Tentative tokens were dropped, from absolute position `start` on. */
export interface RolledBack {
  readonly event: "RolledBack";
  readonly start: number;
  readonly tokens: readonly number[];
  readonly origins: readonly Origin[];
}

/** The answer ended. */
export interface Finished {
  readonly event: "Finished";
  readonly reason: FinishReason;
}

/** The server refused a request, or sent a broken frame. */
export interface Faulted {
  readonly event: "Faulted";
  /** Name of a `FaultCode`, such as `CONTEXT_FULL`. */
  readonly code: string;
  readonly text: string;
  /** Delay after which a retry may succeed, milliseconds; 0 for never. */
  readonly retryAfterMs: number;
}

/** The server had lost `replayed` tokens of the conversation, which are sent again. */
export interface Resumed {
  readonly event: "Resumed";
  readonly replayed: number;
}

export type SessionEvent =
  | Welcomed
  | Echoed
  | RowsReceived
  | Decided
  | Committed
  | RolledBack
  | Finished
  | Faulted
  | Resumed;
