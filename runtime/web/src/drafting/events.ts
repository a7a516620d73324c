/** Orders of the drafting loop to its host, and events for its listeners. */

import type { Budget, Drafter } from "../drafters/base.js";
import type { LinkChanged, PauseReason } from "../events.js";
import type { Origin, SessionEvent } from "../session/events.js";
import type { Sampling } from "../session/sampling.js";

/** Order: call `by.propose(prefix, budget, sampling)`, then `DraftingLoop.drafted`. */
export interface Draft<D extends Drafter = Drafter> {
  readonly todo: "draft";
  /** The drafter, or the writer during an outage. */
  readonly by: D;
  /** The conversation's tokens, tentative ones included. */
  readonly prefix: readonly number[];
  readonly budget: Budget;
  /** Of the drafted tokens. */
  readonly origin: Extract<Origin, "drafted" | "offline">;
  /** How the target will choose, and how the device writes offline. */
  readonly sampling: Sampling;
}

/** Order: wait until something happens, or until `until` (seconds of the loop's clock; null for no limit). */
export interface Wait {
  readonly todo: "wait";
  readonly until: number | null;
}

/** The device drafted for `seconds`, or the origins of tentative tokens changed. */
export interface Drafted {
  readonly event: "Drafted";
  readonly seconds: number;
  /** Tokens that were sent without being asked for, while the server streams. */
  readonly unsolicited: number;
}

/** A frame was answered. */
export interface RoundEnded {
  readonly event: "RoundEnded";
  /** Tokens of a prompt, or lost ones that were sent again; 0 for a draft's verdict. */
  readonly supplied: number;
  /** Tokens of the draft, a chain or a tree, or of the part that was verified. */
  readonly drafted: number;
  /** Tokens on its longest path. */
  readonly depth: number;
  /** Drafted tokens that the target chose, too. */
  readonly accepted: number;
  /** Nodes that each step of the model continued for this draft. */
  readonly steps: readonly number[];
  /** Seconds that drafting took. */
  readonly draftS: number;
  /** Seconds from sending to the verdict. */
  readonly waitedS: number;
  /** Seconds of the target's pass, as the server reports them; null if the draft was not awaited. */
  readonly computeS: number | null;
  /** Tokens of the draft as it was sent; the server may have verified only a part of it. */
  readonly sent: number;
}

/** A verdict arrived while the server streamed on its own. */
export interface Pushed {
  readonly event: "Pushed";
  /** Drafted tokens that the server verified. */
  readonly drafted: number;
  /** Those of them that the target chose. */
  readonly accepted: number;
  /** Seconds since the verdict before. */
  readonly waitedS: number;
  /** Seconds of the target's pass, as the server reports them. */
  readonly computeS: number;
  /** Stamp of the unsolicited draft that was verified; 0 for the server's own draft, or none. */
  readonly draftStamp: number;
}

/** An established connection is gone. */
export interface LinkLost {
  readonly event: "LinkLost";
}

/** The device cannot write on for now. */
export interface PauseBegan {
  readonly event: "PauseBegan";
  readonly reason: PauseReason;
}

/** Something went wrong; `final` if waiting cannot mend it. */
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
