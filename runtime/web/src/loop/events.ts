/** What the drafting loop asks of its host, and what it tells its listeners. */

import type { Origin, SessionEvent } from "../session/events.js";
import type { Sampling } from "../session/sampling.js";
import type { Budget } from "./budget.js";
import type { Drafter } from "./drafter.js";

/** To be done next: have `by` propose what follows `prefix`, then `DraftingLoop.drafted`. */
export interface Draft<D extends Drafter = Drafter> {
  readonly todo: "draft";
  /** The drafter, or what writes without a verifier. */
  readonly by: D;
  /** The conversation's tokens as the device sees it, tentative ones included. */
  readonly prefix: readonly number[];
  readonly budget: Budget;
  /** Of what is drafted. */
  readonly origin: Extract<Origin, "drafted" | "offline">;
  /** How the target will choose, and how the device writes alone. */
  readonly sampling: Sampling;
}

/** Nothing is to be done before something happens, or before `until` (seconds of the loop's clock). */
export interface Wait {
  readonly todo: "wait";
  readonly until: number | null;
}

/** The device drafted for so many seconds, or what is offline text among the tentative tokens changed. */
export interface Drafted {
  readonly event: "Drafted";
  readonly seconds: number;
}

/** A frame was answered. */
export interface RoundEnded {
  readonly event: "RoundEnded";
  /** Tokens that the client gave: the user's turn, or lost ones. 0 for a draft's verdict. */
  readonly supplied: number;
  /** Tokens sent to be verified, in a chain or a tree. */
  readonly drafted: number;
  /** Of them, on the longest path. */
  readonly depth: number;
  /** Of them. */
  readonly accepted: number;
  /** Nodes that each step of the model continued for this draft. */
  readonly steps: readonly number[];
  /** Seconds that drafting took. */
  readonly draftS: number;
  /** Seconds from sending to the verdict. */
  readonly waitedS: number;
  /** Of them, the target's, by its own account; null of a draft that was not sent. */
  readonly computeS: number | null;
  /** Conversations that share the target, this one included. */
  readonly sharing: number;
}

/** The server went on by itself, and said so in a verdict. */
export interface Pushed {
  readonly event: "Pushed";
  /** Tokens that it drafted. */
  readonly drafted: number;
  /** Those of them that the target took. */
  readonly accepted: number;
  /** Seconds since the verdict before. */
  readonly waitedS: number;
  /** The target's, by its own account. */
  readonly computeS: number;
  /** As in `RoundEnded`. */
  readonly sharing: number;
}

/** The link as a user should see it; `reconnecting`: a connection is being made. */
export interface LinkChanged {
  readonly event: "LinkChanged";
  readonly status: "online" | "reconnecting" | "offline";
  readonly detail: string;
  /** Seconds until the next attempt; null where there will be none. */
  readonly retryInS: number | null;
}

/** A connection that stood is gone. */
export interface LinkLost {
  readonly event: "LinkLost";
}

/** Why the device does not write on. */
export type PauseReason = "limit" | "end" | "length" | "unsure" | "unprepared" | "background" | "low power" | "off";

/** The device cannot write on for now. */
export interface PauseBegan {
  readonly event: "PauseBegan";
  readonly reason: PauseReason;
}

/** Something went wrong; `final` where waiting cannot mend it. */
export interface Problem {
  readonly event: "Problem";
  readonly error: string;
  readonly final: boolean;
}

export type LoopEvent =
  | SessionEvent
  | Drafted
  | RoundEnded
  | Pushed
  | LinkChanged
  | LinkLost
  | PauseBegan
  | Problem;
