/** What a client session tells the application. */

import type { Numbers } from "./rows.js";

/**
 * Where a token of an answer came from: `drafted` by the device while online and confirmed by the target, written
 * `offline` by the device without the target, `corrected` is chosen by the target itself, `kept` was written offline
 * and is kept by the user's policy without asking the target.
 */
export type Origin = (typeof ORIGINS)[number];
export const ORIGINS = ["drafted", "offline", "corrected", "kept"] as const;

/**
 * What becomes of tokens written offline when the target comes back: with `rollback` they stay up to the first
 * disagreement, with `keep` they stay whatever the target would have written; `ask` is as `rollback`, and the application
 * hears of the disagreement and may keep them after all.
 */
export type Policy = (typeof POLICIES)[number];
export const POLICIES = ["rollback", "keep", "ask"] as const;

/** Why an answer ended. */
export type FinishReason = "stop" | "length" | "context";

/**
 * Why a verdict came: `asked` for by a Prompt or Draft of this connection, `pushed` within the credit, or `fetched`: it
 * followed the Welcome and was decided before this connection.
 */
export type Cause = "asked" | "pushed" | "fetched";

/** The link is up. `resumed`: the server still knew the conversation. `drafts`: the server drafts too. */
export interface Welcomed {
  readonly event: "Welcomed";
  readonly resumed: boolean;
  readonly drafts: boolean;
}

/** The server has taken the frame with this stamp, and held it for so many seconds before it answered. */
export interface Echoed {
  readonly event: "Echoed";
  readonly stamp: number;
  readonly heldS: number;
}

/** New memory rows for the drafter, from position `start` on: `keys` and `values` are `[count, kvHeads, headDim]`. */
export interface RowsReceived {
  readonly event: "RowsReceived";
  readonly start: number;
  readonly keys: Numbers;
  readonly values: Numbers;
}

/** A verdict was taken up; what it changed follows. */
export interface Decided {
  readonly event: "Decided";
  readonly cause: Cause;
  /** Tokens of the Prompt that it answers, 0 for a Draft. */
  readonly supplied: number;
  /** Tokens of the Draft that it answers; of a pushed one, those that the server drafted. */
  readonly drafted: number;
  /** Of them. */
  readonly accepted: number;
  /** Seconds that the target took. */
  readonly computeS: number;
  /** Seconds that the server's own draft took, for a verdict that was pushed. */
  readonly draftS: number;
  /** The verifier is busy, and asks the device to draft. */
  readonly draftsWanted: boolean;
  /** Conversations that share the target, this one included; 1 where the verifier does not say it. */
  readonly sharing: number;
}

/**
 * Answer tokens that became final, in order, from absolute position `start`; none where a late verdict brought nothing
 * but what the policy `keep` overrules.
 */
export interface Committed {
  readonly event: "Committed";
  readonly start: number;
  readonly tokens: readonly number[];
  readonly origins: readonly Origin[];
}

/** Tentative tokens that were dropped, from absolute position `start` on. */
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

/** The server refused something, or sent what cannot be understood. */
export interface Faulted {
  readonly event: "Faulted";
  /** Name of a `FaultCode`, such as `CONTEXT_FULL`. */
  readonly code: string;
  readonly text: string;
  /** Milliseconds after which trying again may help; 0 for never. */
  readonly retryAfterMs: number;
}

/** The server is given `replayed` tokens of the conversation again: it lost them. */
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
