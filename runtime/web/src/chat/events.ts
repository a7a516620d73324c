/** What a chat tells its application while an answer is written. */

import type { LinkChanged, PauseReason } from "../loop/events.js";
import type { FinishReason, Origin } from "../session/events.js";
import type { Statistics } from "./statistics.js";

/** One token of the answer, where it came from, and whether the target has confirmed it. */
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
  /** Text the target has confirmed. */
  readonly committed: string;
  /** Text after it that may still change. A character of which tokens are missing is in neither. */
  readonly tentative: string;
  /** All of its tokens, the tentative ones last. */
  readonly tokens: readonly TokenOrigin[];
  readonly statistics: Statistics;
  /** The text cut wherever the origin or the confirmation changes; joined it is committed + tentative. */
  readonly spans: readonly TextSpan[];
  /** Tentative text that was there at the update before and was rolled back; mostly empty. */
  readonly dropped: string;
}

/**
 * The target writes something else than the device wrote offline, some words at least (policy `ask`).
 *
 * The answer goes on with the target's version; `Chat.keepMine` takes it back.
 */
export interface Disagreement {
  readonly event: "Disagreement";
  /** Index of the first token of the answer that differs. */
  readonly position: number;
  /** Where in its text the word begins in which they differ, in UTF-16 code units, as `slice` counts. */
  readonly offset: number;
  /** What the device had written from that word on. */
  readonly droppedText: string;
  /** What of the target's version is known by now. */
  readonly replacementText: string;
}

/** The device does not write on, mostly since the verifier is away; the answer goes on when that has changed. */
export interface Paused {
  readonly event: "Paused";
  readonly reason: PauseReason;
}

/** The last event of an answer. */
export interface AnswerFinished {
  readonly event: "AnswerFinished";
  /** All of it. */
  readonly text: string;
  readonly tokens: readonly TokenOrigin[];
  readonly reason: FinishReason;
  readonly statistics: Statistics;
  /** As in {@link AnswerUpdate}. */
  readonly spans: readonly TextSpan[];
}

export type ChatEvent = AnswerUpdate | LinkChanged | Disagreement | Paused | AnswerFinished;
