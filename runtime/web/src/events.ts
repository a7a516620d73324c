/** Events that a chat sends to its application. */

import type { FinishReason, Origin } from "./session/events.js";
import type { Statistics } from "./statistics.js";

/** One token of the answer, with its origin, and whether the target has confirmed it. */
export interface TokenOrigin {
  readonly token: number;
  readonly origin: Origin;
  readonly committed: boolean;
}

/** A stretch of the answer's text of one origin. A character of several tokens belongs to its last one. */
export interface TextSpan {
  readonly text: string;
  readonly origin: Origin;
  readonly committed: boolean;
}

/** The answer as it stands. */
export interface AnswerUpdate {
  readonly event: "AnswerUpdate";
  /** Text that the target has confirmed. */
  readonly committed: string;
  /** Text after it that may still change. A character that lacks tokens is in neither. */
  readonly tentative: string;
  /** All tokens of the answer, the tentative ones last. */
  readonly tokens: readonly TokenOrigin[];
  readonly statistics: Statistics;
  /** The text, cut at each change of origin or confirmation; joined it is committed + tentative. */
  readonly spans: readonly TextSpan[];
  /** Tentative text of the update before that was rolled back; mostly empty. */
  readonly dropped: string;
}

/** The link's state, as a user should see it; `reconnecting`: a connection is being made. */
export interface LinkChanged {
  readonly event: "LinkChanged";
  readonly status: "online" | "reconnecting" | "offline";
  readonly detail: string;
  /** Seconds until the next attempt; null if there will be none. */
  readonly retryInS: number | null;
}

/**
 * The target's text differs from the text written offline, by some words at least (policy `ask`).
 *
 * The answer continues with the target's version; `Chat.keepMine` restores the device's.
 */
export interface Disagreement {
  readonly event: "Disagreement";
  /** Index of the first token of the answer that differs. */
  readonly position: number;
  /** Offset of the first word that differs in the answer's text, in UTF-16 code units, as `slice` counts. */
  readonly offset: number;
  /** Text that the device had written from that word on. */
  readonly droppedText: string;
  /** The target's version, as far as it is known. */
  readonly replacementText: string;
}

/** Why the device does not write on. */
export type PauseReason = "limit" | "end" | "length" | "unsure" | "unprepared" | "background" | "low power" | "grammar" | "off";

/** The device does not write on, mostly because the verifier is away; the answer continues when that has changed. */
export interface Paused {
  readonly event: "Paused";
  readonly reason: PauseReason;
}

/** The last event of an answer. */
export interface AnswerFinished {
  readonly event: "AnswerFinished";
  /** The whole text. */
  readonly text: string;
  readonly tokens: readonly TokenOrigin[];
  readonly reason: FinishReason;
  readonly statistics: Statistics;
  /** As in {@link AnswerUpdate}. */
  readonly spans: readonly TextSpan[];
}

export type ChatEvent = AnswerUpdate | LinkChanged | Disagreement | Paused | AnswerFinished;
